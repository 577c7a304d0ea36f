"""Readers of a piece of a tensor read what was stored there, as programs write that update slices in place.

A piece is a run of elements. With equal places:

    piece(slice_scatter(x, new)) = new
    slice_scatter(slice_scatter(x, a), b) = slice_scatter(x, b)
    piece(x) = an equal piece of x, the first      of inputs x
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from .graph.anchors import find_anchors
from .graph.follow import SPLITS, argument, aten, is_reshape, is_view, slice_bounds, tensor, value

SCATTER = aten.slice_scatter.default


class Piece(NamedTuple):
    """Elements `[start, start + length)` of a tensor, whatever its shape."""

    source: fx.Node
    start: int
    length: int


def forward_pieces(graph: fx.Graph) -> None:
    """In place, in graphs that can have an update of slices (`matchers.sliced_update`)."""
    if not {"reduce_scatter", "all_gather"} <= {anchor.kind for anchor in find_anchors(graph)}:
        return
    first: dict[Piece, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is SCATTER:
            _store_once(node)
        piece = piece_of(node)
        if piece is None:
            continue
        same = _stored_at(piece)
        if same is None and piece.source.op == "placeholder":
            same = first.setdefault(piece, node)
        if same is not None and same is not node and _stands_for(same, node):
            node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if not node.users and (is_view(node) or node.target is SCATTER):
            graph.erase_node(node)


def piece_of(node: fx.Node) -> Piece | None:
    """A slice, or a part of a split, as a piece, if its elements follow each other."""
    source, val = None, tensor(node)
    if node.target is aten.slice.Tensor:
        source = node.args[0]
    elif node.target is operator.getitem and node.args[0].target in SPLITS - {aten.unbind.int}:
        source = node.args[0].args[0]
    whole = tensor(source)
    if source is None or whole is None or val is None:
        return None
    if node.target is aten.slice.Tensor:
        bounds = slice_bounds(node, whole.shape[argument(node, 1, "dim", 0)])
        if bounds is None:
            return None
        dim, start, _ = bounds
    else:
        split, index = node.args
        dim = argument(split, 2, "dim", 0) % whole.dim()
        parts = value(split)
        assert isinstance(parts, (list, tuple))
        start = sum(part.shape[dim] for part in parts[:index])
    return _run(source, whole.shape, dim, start, val.shape)


def stored(scatter: fx.Node) -> Piece | None:
    """What was stored by a slice_scatter, as a piece of its result."""
    whole, new = tensor(scatter), tensor(scatter.args[1])
    if whole is None or new is None or argument(scatter, 5, "step", 1) != 1:
        return None
    dim, start = argument(scatter, 2, "dim", 0) % whole.dim(), argument(scatter, 3, "start") or 0
    return _run(scatter, whole.shape, dim, start, new.shape)


def unshaped(node: fx.Node) -> fx.Node:
    """What the node is a reshape of."""
    while is_reshape(node):
        node = node.args[0]
    return node


def _run(source: fx.Node, shape: Sequence[int], dim: int, start: int, part: Sequence[int]) -> Piece | None:
    static = all(isinstance(n, int) for n in (*shape, *part, start))
    if not static or start < 0 or math.prod(shape[:dim]) != 1:
        return None
    return Piece(unshaped(source), start * math.prod(shape[dim + 1 :]), math.prod(part))


def _store_once(scatter: fx.Node) -> None:
    below, here = unshaped(scatter.args[0]), stored(scatter)
    there = stored(below) if below.target is SCATTER else None
    if here is None or there is None or here[1:] != there[1:]:
        return
    whole, before = tensor(scatter), tensor(below.args[0])
    if whole is not None and before is not None and whole.shape == before.shape:
        scatter.replace_input_with(scatter.args[0], below.args[0])


def _stored_at(piece: Piece) -> fx.Node | None:
    """What a slice_scatter stored at the very place that is read of its result."""
    scatter = piece.source
    same = scatter.target is SCATTER and stored(scatter) == piece
    new = scatter.args[1] if same else None
    return new if isinstance(new, fx.Node) else None


def _stands_for(same: fx.Node, node: fx.Node) -> bool:
    """Whether every view of the node can be one of `same`, too."""
    new, old = tensor(same), tensor(node)
    if new is None or old is None:
        return False
    alike = new.is_contiguous() or new.stride() == old.stride()
    in_place = any(user.target is aten.as_strided.default for user in node.users)
    return new.shape == old.shape and new.dtype == old.dtype and alike and not in_place
