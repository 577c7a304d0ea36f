"""Which indices are permutations: known from how they are made, never from their values.

A backward graph has the indices that the forward graph made as inputs, and does not say how. The joint graph
of both does: there they are marked, and the partition into two graphs keeps `meta` of what becomes an input.
"""

from __future__ import annotations

from torch import fx

from .follow import aten, tensor

_MARK = "autofuse_permutation"
_SORTS = (aten.sort.default, aten.sort.stable)
_ORDERS = (aten.argsort.default, aten.argsort.stable, aten.randperm.default)


def mark_permutations(joint: fx.Graph) -> None:
    """Of a graph that is not yet cut into forward and backward."""
    for node in joint.nodes:
        if _is_made_one(node):
            node.meta[_MARK] = True


def is_permutation(index: fx.Node) -> bool:
    """Is it known to have every number below its length once?"""
    # Rewrites may copy `meta` to other nodes than inputs.
    return _is_made_one(index) or (index.op == "placeholder" and _MARK in index.meta)


def marked_inputs(graph: fx.Graph) -> list[int]:
    """The numbers of the inputs that are known to be permutations, which the graph's code does not say."""
    inputs = (n for n in graph.nodes if n.op == "placeholder")
    return [i for i, node in enumerate(inputs) if is_permutation(node)]


def _is_made_one(index: fx.Node) -> bool:
    val = tensor(index)
    if val is None or val.dim() != 1:
        return False
    if index.target in _ORDERS:
        return True
    source = index.args[0] if index.args else None
    return isinstance(source, fx.Node) and source.target in _SORTS and index.args[1:] == (1,)
