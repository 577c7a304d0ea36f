"""Indices that are permutations. The ops that make an index decide, never the values.

The backward graph has the indices of the forward graph as inputs, without the ops that make them. Hence the
joint graph of both is marked (`marks.py`).
"""

from __future__ import annotations

import torch
from torch import fx

from .follow import Shapes, argument, aten, dtype_of, tensor
from .segments import counts_up, moves_segments

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
    return moves_segments(index) or inverse_of(index) is not None


def inverse_of(index: fx.Node) -> fx.Node | None:
    """The permutation `p`, if `index` is filled by `index[p] = 0, 1, ...`, and so is the inverse of `p`."""
    if index.target is aten.index_put.default:
        base, places, numbers = index.args[:3]
        p = places[0] if isinstance(places, (list, tuple)) and len(places) == 1 else None
        adds = argument(index, 3, "accumulate", False)
    elif index.target is aten.scatter.src:
        base, adds, p, numbers = index.args[:4]  # scattered along dim 0, the only one
    else:
        return None
    if adds or not isinstance(p, fx.Node) or not isinstance(numbers, fx.Node) or not counts_up(numbers):
        return None
    # Numbers that are fewer than the places would be repeated, and a longer base keeps some of its entries.
    alike = Shapes().alike(p, numbers) and Shapes().alike(p, base)
    return p if alike and dtype_of(index) == torch.int64 and is_permutation(p) else None
