"""Moves casts to the side of a collective where fewer bytes travel; the bits of the result stay the same.

An all_gather and an all_to_all move values as they are. With views between:

    narrow(gather(x)) = gather(narrow(x))      where everyone who reads the gathered tensor casts it
    gather(widen(x)) = widen(gather(x))        the gradient of the former, and products in a wider dtype
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from .graph.anchors import Anchor, find_anchors
from .graph.emit import Emitter, erase_unused, origin, relax_views
from .graph.follow import SPLITS, WAIT, Shapes, aten, dtype_of, is_cast, is_view, prims, tensor, value

_MOVING = ("all_gather", "all_to_all")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CAST = prims.convert_element_type.default
_JOINS = {aten.cat.default, aten.stack.default}
_PARTS = {*SPLITS, operator.getitem}


def narrow_collectives(graph: fx.Graph) -> None:
    """Move the casts of `graph` in place."""
    moved = False
    for anchor in find_anchors(graph):
        if anchor.kind in _MOVING and tensor(anchor.node) is not None:
            moved = _widen_behind(anchor) or _narrow_before(anchor) or moved
    if moved:
        relax_views(graph)  # what a cast had made contiguous may no longer be


def _widen_behind(anchor: Anchor) -> bool:
    """Send what is widened before the collective as it was; whether there is such a cast."""
    views: list[fx.Node] = []
    cast = anchor.input
    while is_view(cast) and cast.target not in _JOINS | _PARTS and not _has_dtype(cast):
        views.append(cast)
        cast = cast.args[0]
    if not _is_from(cast, lambda source, result: source < result):
        return False
    source, wide = cast.args[0], dtype_of(cast)
    assert isinstance(source, fx.Node)
    narrow = dtype_of(source)
    emitter = Emitter(anchor.node, Shapes())
    sent = source
    for view in reversed(views):
        target = aten.reshape.default if view.target is aten._unsafe_view.default else view.target
        target = aten.reshape.default if target is aten.view.default else target
        sent = emitter.call(target, sent, *view.args[1:], **view.kwargs)
    before = {node: node.meta["val"] for node in anchor.results}
    _send(emitter, anchor, sent, narrow)
    for node, val in before.items():
        users = [u for u in node.users if u not in before and u.target is not aten.sym_size.int]
        if users:
            with node.graph.inserting_after(node):
                widened = node.graph.call_function(_CAST, (node, wide))
            widened.meta.update(origin(cast.meta), val=val)
            for user in users:
                user.replace_input_with(node, widened)
    erase_unused([views[0] if views else cast])
    return True


def _narrow_before(anchor: Anchor) -> bool:
    """Send as it is read what every reader narrows behind the collective; whether they all do, alike."""
    moved = list(anchor.results)
    casts: list[fx.Node] = []
    for node in moved:  # grows
        for user in node.users:
            if user in moved or user.target is aten.sym_size.int:
                continue
            if _is_from(user, lambda source, result: source > result):
                casts.append(user)
            elif user.target is WAIT or (is_view(user) and not _has_dtype(user)):
                moved.append(user)
            else:
                return False
    dtypes = {dtype_of(cast) for cast in casts}
    joined = [source for node in moved if node.target in _JOINS for source in node.all_input_nodes]
    if len(dtypes) != 1 or not set(joined) <= set(moved):
        return False
    (narrow,) = dtypes
    emitter = Emitter(anchor.node, Shapes())
    _send(emitter, anchor, emitter.call(_CAST, anchor.input, narrow), narrow)
    for node in moved:
        _retype(node, narrow)
    for cast in casts:
        cast.replace_all_uses_with(cast.args[0])
    erase_unused(casts)
    return True


def _is_from(node: fx.Node, changes: Callable[[int, int], bool]) -> bool:
    """Whether the node is a cast between dtypes whose sizes change so."""
    if not is_cast(node):
        return False
    source, result = dtype_of(node.args[0]), dtype_of(node)
    if source not in _DTYPES or result not in _DTYPES:
        return False
    assert source is not None
    assert result is not None
    return changes(source.itemsize, result.itemsize)


def _has_dtype(view: fx.Node) -> bool:
    """Whether the node names the dtype that it does not change."""
    return view.target in (_CAST, aten._to_copy.default, aten.to.dtype) or "dtype" in view.kwargs


def _send(emitter: Emitter, anchor: Anchor, sent: fx.Node, dtype: torch.dtype | None) -> None:
    """Let the collective take `sent`, of another dtype."""
    val = tensor(sent)
    if val is not None and not val.is_contiguous():
        sent = emitter.call(aten.clone.default, sent, memory_format=torch.contiguous_format)
    anchor.node.update_arg(0, sent)
    for node in anchor.results:
        _retype(node, dtype)


def _retype(node: fx.Node, dtype: torch.dtype | None) -> None:
    """Let the metadata of a node that moves data have a dtype."""
    node.meta.pop("eager_input_vals", None)
    node.meta["val"] = fx.node.map_aggregate(value(node), lambda val: _cast(val, dtype))


def _cast(val: object, dtype: torch.dtype | None) -> object:
    if not isinstance(val, torch.Tensor) or val.dtype == dtype:
        return val
    if not hasattr(val, "fake_mode"):
        return val.to(dtype)
    with val.fake_mode:
        return torch.empty_strided(val.shape, val.stride(), dtype=dtype, device=val.device)
