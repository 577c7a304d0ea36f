"""Calls of embedding_bag_all_to_all that are like one before: the descriptors of its tables, with other
addresses and numbers of indices.

A call has three tensors a table, so that looking at them takes most of its time: what has not changed since
the last call is recognised by the tensors themselves.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse.native_kernels.triton.embedding_tables import WORDS_SOURCE, WORDS_TABLE, Places, Tables

_shape, _dtype = Tensor.shape.__get__, Tensor.dtype.__get__  # type: ignore[attr-defined]


class Same:
    """Tensors that a call had, and their addresses. `ask`: whether others are laid out like them, at the same
    places."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._remember(tensors)
        self._layouts = _layouts(tensors)

    def _remember(self, tensors: Sequence[Tensor]) -> None:
        self._ids = list(map(id, tensors))
        self.addresses = [t.data_ptr() for t in tensors]
        # An id may be given again once its tensor has ended.
        self._held = [weakref.ref(t, self._end) for t in tensors]

    def _end(self, ended: object) -> None:
        self._ids = []

    def ask(self, tensors: Sequence[Tensor]) -> bool:
        if [t.data_ptr() for t in tensors] != self.addresses:
            return False
        if list(map(id, tensors)) == self._ids:
            return True
        if _layouts(tensors) != self._layouts:
            return False
        self._remember(tensors)
        return True


def _layouts(tensors: Sequence[Tensor]) -> list[object]:
    return [*map(_shape, tensors), *(t.stride() for t in tensors), *map(_dtype, tensors)]


class Words:
    """The descriptors of calls of one kind, as `Tables.words` makes them."""

    def __init__(self, tables: Tables, places: Places) -> None:
        self._weights, self._offsets = Same(tables.weights), Same(_distinct(tables.offsets))
        self._index = tables.indices[0].dtype
        self._words = array("q", tables.words(places))
        self._count, self._first = len(tables.weights), WORDS_SOURCE * len(places.sources)

    def of(
        self, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]
    ) -> bytes | None:
        """Those of a call; None unless it differs in its indices alone, which kernels take as they are."""
        if len(indices) != self._count or not self._weights.ask(weights):
            return None
        if not self._offsets.ask(_distinct(offsets)) or set(map(_dtype, indices)) != {self._index}:
            return None
        if not all(map(Tensor.is_contiguous, indices)):
            return None
        words = self._words[:]
        words[self._first + 2 :: WORDS_TABLE] = array("q", [i.data_ptr() for i in indices])
        words[self._first + 3 :: WORDS_TABLE] = array("q", map(torch.numel, indices))
        return words.tobytes()


def _distinct(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """One tensor of a list that has it for each table, or the list."""
    return tensors[:1] if all(t is tensors[0] for t in tensors) else tensors
