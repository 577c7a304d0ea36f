"""Repeats a call of embedding_bag_all_to_all with other indices.

The call uses the descriptors of the tables of an earlier call, with other addresses and numbers of indices. A
call has three tensors a table, and comparing their layouts would take most of its time. So torch compares the
layouts of a whole list in one call of C.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from operator import is_

from torch import Tensor

from autofuse.lowering.torch_internals import alike
from autofuse.native_kernels.triton.embedding_tables import WORDS_SOURCE, WORDS_TABLE, Places, Tables

_shape, _dtype = Tensor.shape.__get__, Tensor.dtype.__get__  # type: ignore[attr-defined]


class Same:
    """The layouts and addresses of the tensors of a call. `ask` returns whether other tensors have the same
    layouts and addresses. Both may change for one tensor, as by `t.data = other`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self._layouts, self._alike = _layouts(tensors), alike(tensors)

    def ask(self, tensors: Sequence[Tensor]) -> bool:
        if list(map(Tensor.data_ptr, tensors)) != self.addresses:
            return False
        if self._alike(*tensors):
            return True
        if _layouts(tensors) != self._layouts:
            return False
        self._alike = alike(tensors)
        return True


def _layouts(tensors: Sequence[Tensor]) -> list[object]:
    return [*map(_shape, tensors), *(t.stride() for t in tensors), *map(_dtype, tensors)]


class Words:
    """The descriptors of calls of one kind, as `Tables.words` makes them."""

    def __init__(self, tables: Tables, places: Places) -> None:
        self._weights, self._offsets = Same(tables.weights), Same(distinct(tables.offsets))
        self._index, self._alike = tables.indices[0].dtype, alike(tables.indices, lengths=False)
        self._words = array("q", tables.words(places))
        self._count, self._first = len(tables.weights), WORDS_SOURCE * len(places.sources)

    def of(
        self, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]
    ) -> bytes | None:
        """The descriptors of a call. None unless the call differs only in its indices, and kernels take these
        as they are."""
        if len(indices) != self._count or not self._weights.ask(weights):
            return None
        if not self._offsets.ask(distinct(offsets)):
            return None
        if not self._alike(*indices):
            if set(map(_dtype, indices)) != {self._index} or not all(map(Tensor.is_contiguous, indices)):
                return None
            self._alike = alike(indices, lengths=False)
        words = self._words[:]
        words[self._first + 2 :: WORDS_TABLE] = array("q", map(Tensor.data_ptr, indices))
        words[self._first + 3 :: WORDS_TABLE] = array("q", map(Tensor.numel, indices))
        return words.tobytes()


def distinct(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The list, or one tensor of it if all its tensors are the same object."""
    return tensors[:1] if all(map(is_, tensors, repeat(tensors[0]))) else tensors
