"""Indices that are permutations. The ops that make an index decide, never the values.

The backward graph has the indices of the forward graph as inputs, without the ops that make them. Hence the
joint graph of both is marked (`marks.py`).
"""

from __future__ import annotations

from torch import fx

from .follow import aten, tensor
from .segments import moves_segments

MARK = "autofuse_permutation"
_SORTS = (aten.sort.default, aten.sort.stable)
_ORDERS = (aten.argsort.default, aten.argsort.stable, aten.randperm.default)


def is_permutation(index: fx.Node) -> bool:
    """Whether the index is known to hold every number below its length once."""
    # Only inputs: rewrites of other nodes may copy `meta`.
    return makes_permutation(index) or (index.op == "placeholder" and MARK in index.meta)


def makes_permutation(index: fx.Node) -> bool:
    """Whether the node makes a permutation. That an index has no entries does not count: it has some on other
    ranks, and all ranks must decide alike."""
    val = tensor(index)
    if val is None or val.dim() != 1:
        return False
    if index.target in _ORDERS:
        return True
    source = index.args[0] if index.args else None
    if isinstance(source, fx.Node) and source.target in _SORTS:
        return index.args[1:] == (1,)
    return moves_segments(index)
