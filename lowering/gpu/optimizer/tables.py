"""The descriptors of tensors for the kernels of reduce_update_gather: buckets, addresses, numbers."""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from autofuse.lowering.buckets import BUCKET, Buckets
from autofuse.lowering.gpu.operands import ALIGNED
from autofuse.native_kernels.triton.update_parts import FIELDS, LENGTH, TENSOR_BIT

assert LENGTH.value == BUCKET


@lru_cache(maxsize=256)
def runs_of(buckets: Buckets) -> list[int]:
    """The number of the bucket with which the run of each rank begins, and of all buckets."""
    before = [0, *accumulate(-(-n // BUCKET) for n in buckets.numels)]
    found = []
    for position in buckets.starts:
        tensor = bisect_right(buckets.offsets, position) - 1
        found.append(before[tensor] + -(-(position - buckets.offsets[tensor]) // BUCKET))
    return found


def longest_run(buckets: Buckets) -> int:
    """The most buckets that a rank owns."""
    runs = runs_of(buckets)
    return max(end - begin for begin, end in pairwise(runs))


def bucket_words(buckets: Buckets) -> Tensor:
    """A word for each bucket of all tensors, in order; then the number of the first bucket of each tensor,
    and that of all buckets."""
    counts = torch.tensor([-(-n // BUCKET) for n in buckets.numels], dtype=torch.int64, device="cpu")
    tensors = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    numbers = torch.arange(len(tensors), device="cpu") - firsts[tensors]
    return torch.cat([tensors << TENSOR_BIT.value | numbers, firsts])


def unit_of(buckets: Buckets) -> int:
    """Elements that are loaded and stored together."""
    return math.gcd(4, *buckets.numels)


def tensor_words(
    buckets: Buckets,
    rank: int,
    grads: Sequence[Tensor | None],
    params: Sequence[Tensor],
    rows: Sequence[int],
) -> bytes:
    """The descriptors that the kernel takes as `words`. Gradients and parameters are contiguous; rows: the
    row of numbers of each tensor."""
    words = array("q", _template(buckets, rank, tuple(rows)))
    first = len(buckets.starts)
    words[first :: FIELDS.value] = array("q", [0 if g is None else g.data_ptr() for g in grads])
    words[first + 1 :: FIELDS.value] = array("q", [p.data_ptr() for p in params])
    return words.tobytes()


@lru_cache(maxsize=64)
def _template(buckets: Buckets, rank: int, rows: tuple[int, ...]) -> array[int]:
    """The words without addresses."""
    unit, start = unit_of(buckets), buckets.starts[rank]
    words = array("q", runs_of(buckets))
    for numel, row, first in zip(buckets.numels, rows, buckets.offsets, strict=False):
        words.extend((0, 0, (first - start) // unit, numel // unit, row))
    return words


def rates_of(numbers: Tensor) -> tuple[bytes, list[int]]:
    """The distinct rows of numbers in fp32, padded so that a tensor may follow, and the index of the row of
    each tensor."""
    if numbers.shape[0] and not numbers.stride(0):
        return _floats(numbers.numpy()[0].tolist()), [0] * numbers.shape[0]
    known: dict[tuple[float, ...], int] = {}
    rows = [known.setdefault(tuple(row), len(known)) for row in numbers.tolist()]
    return _floats([number for row in known for number in row]), rows


def _floats(values: Sequence[float]) -> bytes:
    found = struct.pack(f"{len(values)}f", *values)
    return found + bytes(-len(found) % ALIGNED)
