"""Indices that move segments as a whole: rows that came rank by rank are brought into the order of experts.

    counts                                      rows of each segment of the source
    sizes = p(counts)                           p: an order of the segments, by views
    starts = p(cumsum(counts) - counts)         where each segment begins in the source
    begins = cumsum(sizes) - sizes              where it begins in the result
    s = repeat_interleave(sizes)                the segment of every row of the result
    index[i] = starts[s[i]] + i - begins[s[i]]

Segments of the source share no row and cover it, and each is in the result once: the index is a permutation,
whatever the counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from .follow import Shapes, argument, aten, dtype_of, follow, is_view, prims, tensor
from .layout import Layout, compose, merge, prod, same_size

_PROVEN = "autofuse_moves_segments"
"""The entry of `meta` of an index that another pass has computed from counts."""

_SUMS = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


class Term(NamedTuple):
    """`sign * node`, or `sign * node[s]`, where `s` are the segments of `sizes`."""

    sign: int
    node: fx.Node
    sizes: fx.Node | None


def prove(index: fx.Node) -> None:
    """Mark the node as an index that moves segments. Its ops need not have the form above."""
    index.meta[_PROVEN] = True


def moves_segments(index: fx.Node) -> bool:
    """Whether the index is marked, or is such a sum, in any order of its terms."""
    if index.meta.get(_PROVEN):
        return True
    if index.target not in _SUMS or dtype_of(index) != torch.int64:
        return False
    terms = _terms(index, 1, None)
    own = [t for t in terms if t.sizes is None]
    chosen = [t for t in terms if t.sizes is not None]
    if len(own) != 1 or len(chosen) != 3 or own[0].sign != 1 or not counts_up(own[0].node):
        return False
    sizes = chosen[0].sizes
    assert sizes is not None
    starts = [t for t in chosen if t.node is not sizes and _summed(t.node) is not sizes]
    rest = {(t.sign, t.node is sizes) for t in chosen if t not in starts}
    if any(t.sizes is not sizes for t in chosen) or rest != {(1, True), (-1, False)} or len(starts) != 1:
        return False
    return starts[0].sign == 1 and _in_one_order(starts[0].node, sizes)


def _terms(node: fx.Node, sign: int, sizes: fx.Node | None) -> list[Term]:
    """The terms of a sum; a sum that is indexed by segments is a sum of what is indexed."""
    if node.target in _SUMS and argument(node, 2, "alpha", 1) == 1:
        left, right = node.args[:2]
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            return _terms(left, sign, sizes) + _terms(right, sign * _SUMS[node.target], sizes)
    chosen = choice_of(node) if sizes is None else None
    if chosen is not None:
        source, index = chosen
        of_index = _segments(index)
        if of_index is not None:
            return _terms(source, sign, of_index)
    return [Term(sign, node, sizes)]


def choice_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The vector and the vector of its entries that a node chooses."""
    if node.target is aten.index.Tensor:
        source, indices = node.args[:2]
        index = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    elif node.target is aten.index_select.default:
        source, index = node.args[0], node.args[2]
    else:
        return None
    both = isinstance(source, fx.Node) and isinstance(index, fx.Node)
    vectors = both and all((t := tensor(n)) is not None and t.dim() == 1 for n in (source, index))
    return (source, index) if vectors else None


def _segments(index: fx.Node) -> fx.Node | None:
    """The sizes of the segments whose numbers `index` repeats."""
    chosen = choice_of(index)  # of 0, 1, ...
    if chosen is not None and counts_up(chosen[0]):
        index = chosen[1]
    sizes = index.args[0] if index.target is aten.repeat_interleave.Tensor else None
    return sizes if isinstance(sizes, fx.Node) else None


def counts_up(node: fx.Node) -> bool:
    """Whether the node is 0, 1, ..."""
    if node.target is prims.iota.default:
        return node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1
    return node.target is aten.arange.default


def _summed(node: fx.Node) -> fx.Node | None:
    """What the node is the running sum of, a vector of int64."""
    source = node.args[0] if node.target is aten.cumsum.default else None
    alike = isinstance(source, fx.Node) and dtype_of(source) == dtype_of(node) == torch.int64
    return source if alike and tensor(source).dim() == 1 else None  # type: ignore[union-attr]


def _in_one_order(starts: fx.Node, sizes: fx.Node) -> bool:
    """Whether `starts` has the beginnings of segments, and `sizes` their rows, in the same order."""
    shapes = Shapes()
    found = follow(starts, lambda n: n.target is aten.sub.Tensor, shapes)
    if found is None or len(found.leaves) != 1:
        return False
    begins = found.leaves[0]
    running, counts = begins.args[:2]
    if not isinstance(running, fx.Node) or not isinstance(counts, fx.Node):
        return False
    if _summed(running) is not counts or argument(begins, 2, "alpha", 1) != 1:
        return False

    def source_of(node: fx.Node) -> tuple[fx.Node, Layout] | None:
        followed = follow(node, lambda n: not is_view(n), shapes)
        return (
            None if followed is None or len(followed.leaves) != 1 else (followed.leaves[0], followed.layout)
        )

    of_counts, of_sizes = source_of(counts), source_of(sizes)
    if of_counts is None or of_sizes is None or of_counts[0] is not of_sizes[0]:
        return False
    order = compose(found.layout, of_counts[1])
    if order is None or found.layout.fixed or any(d.dim < 0 for d in found.layout.digits):
        return False
    whole = same_size(prod(found.layout.shape), shapes.known(counts)[0])
    return whole and merge(order.digits) == merge(of_sizes[1].digits) and not of_sizes[1].fixed
