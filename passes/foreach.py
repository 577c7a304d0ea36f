"""Gives each tensor of a foreach op an op of its own, in graphs of CPU ranks that may have an update.

`torch.nn.utils.clip_grad_norm_` leaves such ops in a graph. Inductor makes a loop of each tensor there, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .graph.anchors import find_anchors
from .graph.emit import Emitter, origin
from .graph.follow import Shapes, aten, tensor

_NAMES = ("mul", "add", "sub", "div")
_ALONE: dict[object, Callable[..., Any]] = {
    getattr(getattr(aten, f"_foreach_{name}"), kind): getattr(aten, name).Tensor
    for name in _NAMES
    for kind in ("Scalar", "List", "Tensor", "ScalarList")
    if hasattr(getattr(aten, f"_foreach_{name}"), kind)
}
_ALONE |= {
    getattr(aten, f"_foreach_{name}").default: getattr(aten, name).default
    for name in ("sqrt", "neg", "reciprocal")
}
_NORM = aten._foreach_norm.Scalar
_PRODUCTS: dict[object, Callable[..., Any]] = {
    aten._foreach_addcmul.Scalar: aten.mul.Tensor,  # Inductor makes it of _foreach_lerp, too
    aten._foreach_addcmul.ScalarList: aten.mul.Tensor,
    aten._foreach_addcdiv.Scalar: aten.div.Tensor,
    aten._foreach_addcdiv.ScalarList: aten.div.Tensor,
}


def split_foreach(graph: fx.Graph) -> None:
    """In place, where something is reduced over ranks, and only norms of float32 by squares."""
    if not any(anchor.kind in ("all_reduce", "reduce_scatter") for anchor in find_anchors(graph)):
        return
    for node in list(graph.nodes):
        if node.target in (*_ALONE, *_PRODUCTS) or (node.target is _NORM and _is_plain(node)):
            _split(node)


def _is_plain(norm: fx.Node) -> bool:
    dtypes = {val.dtype for x in norm.args[0] if (val := tensor(x)) is not None}
    return len(norm.args) < 3 and not norm.kwargs and (*norm.args, 2)[1] == 2 and dtypes == {torch.float32}


def _split(node: fx.Node) -> None:
    items = list(node.users)
    vals = [tensor(item) for item in items]
    if not all(item.target is operator.getitem for item in items):
        return
    if not all(val is not None and val.device.type == "cpu" for val in vals):
        return
    for item in items:
        emitter = Emitter(item, Shapes())
        args = [each[item.args[1]] if isinstance(each, (list, tuple)) else each for each in node.args]
        if node.target is _NORM:
            total = emitter.call(aten.sum.default, emitter.call(aten.pow.Tensor_Scalar, args[0], 2))
            new = emitter.call(aten.sqrt.default, total)
        elif node.target in _PRODUCTS:
            start, a, b, *value = args
            new = emitter.call(_PRODUCTS[node.target], a, b)
            new = emitter.call(aten.mul.Tensor, new, value[0]) if value else new
            new = emitter.call(aten.add.Tensor, start, new)
        else:
            new = emitter.call(_ALONE[node.target], *args, **node.kwargs)
        new.meta.update(origin(node.meta))
        item.replace_all_uses_with(new)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
