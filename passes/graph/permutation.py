"""Indices that are permutations. The ops that make an index decide, never the values.

The backward graph has the indices of the forward graph as inputs, without the ops that make them. Hence the
joint graph of both is marked: the partition into two graphs keeps `meta` of a node that becomes an input.
"""

from __future__ import annotations

from torch import fx

from .follow import aten, tensor
from .segments import moves_segments

_MARK = "autofuse_permutation"
_SORTS = (aten.sort.default, aten.sort.stable)
_ORDERS = (aten.argsort.default, aten.argsort.stable, aten.randperm.default)


def mark_permutations(joint: fx.Graph) -> None:
    """Mark the permutations of a joint graph, which is not yet cut into forward and backward."""
    for node in joint.nodes:
        if _is_made_one(node):
            node.meta[_MARK] = True


def is_permutation(index: fx.Node) -> bool:
    """Whether the index is known to hold every number below its length once."""
    # Only inputs: rewrites of other nodes may copy `meta`.
    return _is_made_one(index) or (index.op == "placeholder" and _MARK in index.meta)


def marked_inputs(graph: fx.Graph) -> list[int]:
    """Positions of the inputs that are known to be permutations; the code of the graph does not tell them."""
    inputs = (n for n in graph.nodes if n.op == "placeholder")
    return [i for i, node in enumerate(inputs) if is_permutation(node)]


def _is_made_one(index: fx.Node) -> bool:
    val = tensor(index)
    if val is None or val.dim() != 1:
        return False
    empty = isinstance(val.shape[0], int) and val.shape[0] == 0
    if empty or index.target in _ORDERS:
        return True
    source = index.args[0] if index.args else None
    if isinstance(source, fx.Node) and source.target in _SORTS:
        return index.args[1:] == (1,)
    return moves_segments(index)
