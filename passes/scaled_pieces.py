"""Scales pieces of what is reduced, and not the whole: pieces of a flat buffer of gradients update tensors.

piece(x * c) = piece(x) * c
"""

from __future__ import annotations

import operator

from torch import fx

from .graph.anchors import find_anchors
from .graph.emit import Emitter
from .graph.follow import SPLITS, Shapes, aten, is_reshape, tensor
from .matchers.update_rule import SCALES


def scale_pieces(graph: fx.Graph) -> None:
    """In place, behind all_reduces."""
    for anchor in find_anchors(graph):
        for result in anchor.results if anchor.kind == "all_reduce" else ():
            _scale_behind(result)


def _scale_behind(whole: fx.Node) -> None:
    """Scales and casts of `whole`, the last one first. Other readers of one leave it in the graph, too."""
    for scale in [user for user in whole.users if _is_scale(user, whole)]:
        _scale_behind(scale)
        cuts = list(filter(_is_cut, scale.users))
        for cut in cuts:
            _move_behind(cut, scale, whole)
        if cuts and not scale.users:
            scale.graph.erase_node(scale)


def _is_scale(node: fx.Node, whole: fx.Node) -> bool:
    if node.target not in SCALES or node.args[0] is not whole or whole in node.args[1:]:
        return False
    return all(n is whole or ((val := tensor(n)) is not None and not val.dim()) for n in node.all_input_nodes)


def _is_cut(node: fx.Node) -> bool:
    if node.target in SPLITS:
        return all(user.target is operator.getitem for user in node.users)
    return node.target is aten.slice.Tensor


def _move_behind(view: fx.Node, scale: fx.Node, source: object) -> None:
    """`view`: a cut, piece or view of `scale`; it becomes one of `source`, and its readers read it scaled."""
    emitter = Emitter(view, Shapes())
    new = emitter.call(view.target, source, *view.args[1:], **view.kwargs)
    for user in list(view.users):
        if view.target in SPLITS or is_reshape(user):
            _move_behind(user, scale, new)
    if view.users:
        view.replace_all_uses_with(emitter.call(scale.target, new, *scale.args[1:], **scale.kwargs))
    view.graph.erase_node(view)
