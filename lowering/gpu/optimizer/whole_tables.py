"""The descriptors of tensors for the kernel of all_reduce_update. `tables` has the words of buckets and of
numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from autofuse.lowering.buckets import Buckets
from autofuse.lowering.gpu.operands import ALIGNED
from autofuse.native_kernels.triton.whole_update_parts import (
    FIELDS,
    GRADIENT,
    PARAMETER,
    ROW,
    STATES,
    SUM,
    UNITS,
)

from .tables import unit_of

_FIELDS, _STATES = FIELDS.value, STATES.value


def whole_words(
    buckets: Buckets, grads: Sequence[Tensor], params: Sequence[Tensor], states: Sequence[Tensor],
    rows: Sequence[int], sums: Tensor, keep_sums: Sequence[bool],
) -> bytes:  # fmt: skip
    """The descriptors that the kernels take as `words`. All tensors are contiguous; states, rows, sums and
    keep_sums: as in `AllReduceUpdate`."""
    count = len(params)
    words = array("q", _template(buckets, tuple(rows)))
    words[GRADIENT.value :: _FIELDS] = array("q", [g.data_ptr() for g in grads])
    words[PARAMETER.value :: _FIELDS] = array("q", [p.data_ptr() for p in params])
    for i in range(len(states) // max(count, 1)):
        of_tensors = [s.data_ptr() for s in states[i * count : (i + 1) * count]]
        words[_STATES + i :: _FIELDS] = array("q", of_tensors)
    at, size = sums.data_ptr(), sums.element_size()
    for t, keep in enumerate(keep_sums):
        if keep:
            words[t * _FIELDS + SUM.value] = at
            at += buckets.numels[t] * size
    return words.tobytes()


def rows_of_numbers(numbers: Tensor) -> bytes:
    """Numbers [rows, .] on the host, in fp32. Their size is such that a tensor may follow."""
    assert numbers.shape[1] * 4 % ALIGNED == 0
    return bytes(numbers.float().contiguous().numpy().tobytes())


@lru_cache(maxsize=64)
def _template(buckets: Buckets, rows: tuple[int, ...]) -> array[int]:
    """The words without addresses."""
    unit, words = unit_of(buckets), array("q", [0]) * (_FIELDS * len(rows))
    words[UNITS.value :: _FIELDS] = array("q", [n // unit for n in buckets.numels])
    words[ROW.value :: _FIELDS] = array("q", rows)
    return words
