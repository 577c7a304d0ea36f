"""Marks on the joint graph of forward and backward, for what a backward graph receives as an input.

The partition into two graphs keeps `meta` of a node that becomes an input.
"""

from __future__ import annotations

from torch import fx

from . import blank, permutation


def mark_inputs(joint: fx.Graph) -> None:
    """Mark the permutations and the blank tensors of a joint graph, which is not yet cut in two."""
    for node in joint.nodes:
        if permutation.makes_permutation(node):
            node.meta[permutation.MARK] = True
        if blank.makes_blank(node):
            node.meta[blank.MARK] = True


def marked_inputs(graph: fx.Graph) -> tuple[list[int], list[int]]:
    """Positions of the inputs that are known to be permutations, and of those that are known to be blank; the
    code of the graph does not tell them."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    permutations = [i for i, node in enumerate(inputs) if permutation.is_permutation(node)]
    return permutations, [i for i, node in enumerate(inputs) if blank.is_blank(node)]
