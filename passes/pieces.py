"""Readers of a piece of a tensor read what was stored there, as programs write that update slices in place.

piece(slice_scatter(x, new)) = new
piece(x) = an equal piece of x, the first      of inputs x
"""

from __future__ import annotations

import operator

from torch import fx

from .graph.anchors import find_anchors
from .graph.follow import Followed, Shapes, argument, aten, follow, is_view, tensor
from .graph.layout import Layout

_PIECES = (aten.slice.Tensor, operator.getitem)


def forward_pieces(graph: fx.Graph) -> None:
    """In place, in graphs that can have an update of slices (`matchers.sliced_update`)."""
    if not {"reduce_scatter", "all_gather"} <= {anchor.kind for anchor in find_anchors(graph)}:
        return
    first: dict[Followed, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _PIECES or tensor(node) is None:
            continue
        found = follow(node, lambda n: not is_view(n), Shapes())
        if found is None or len(found.leaves) != 1:
            continue
        same = _stored(found)
        if same is None and found.leaves[0].op == "placeholder":
            same = first.setdefault(found, node)
        if same is not None and same is not node and _stands_for(same, node):
            node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if not node.users and (is_view(node) or node.target is aten.slice_scatter.default):
            graph.erase_node(node)


def _stored(found: Followed) -> fx.Node | None:
    """What a slice_scatter stored at the very place that is read of its result."""
    leaf = found.leaves[0]
    if leaf.target is not aten.slice_scatter.default or argument(leaf, 5, "step", 1) != 1:
        return None
    new, start = leaf.args[1], argument(leaf, 3, "start") or 0
    whole, stored = tensor(leaf), tensor(new)
    if not isinstance(new, fx.Node) or whole is None or stored is None:
        return None
    dim = argument(leaf, 2, "dim", 0) % whole.dim()
    length, of = stored.shape[dim], whole.shape[dim]
    if not all(isinstance(n, int) for n in (start, length, of)) or start < 0 or not length:
        return None
    if start % length or of % length:
        return None
    place = Layout.of(tuple(whole.shape)).piece(dim, start // length, of // length)
    return new if place is not None and place == found.layout else None


def _stands_for(same: fx.Node, node: fx.Node) -> bool:
    """Whether every view of the node can be one of `same`, too."""
    new, old = tensor(same), tensor(node)
    if new is None or old is None:
        return False
    alike = new.is_contiguous() or new.stride() == old.stride()
    in_place = any(user.target is aten.as_strided.default for user in node.users)
    return new.shape == old.shape and new.dtype == old.dtype and alike and not in_place
