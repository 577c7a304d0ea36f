"""Which values of a graph can be computed on slices, each rank its own.

A value is *cut* along a dim if every rank computes only its part of it: `W` equal parts, the part of rank `r`
is the `r`-th. `cut_dim` says along which dim the result of an op is cut, given how its inputs are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from autofuse.passes.graph.follow import WAIT, argument, aten, expression, is_cast, tensor, value

Cuts: TypeAlias = Mapping[fx.Node, int]
"""The cut values, each with the dim."""

SUM = aten.sum.dim_IntList

_REDUCTIONS = {
    SUM,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.var.correction,
}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, WAIT}
_PERMUTES = {aten.permute.default}
_WITH_SHAPE = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}


def static_shape(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of the node's value, or of the first of its values; None if it has symbols."""
    val = value(node)
    first = val[0] if isinstance(val, (list, tuple)) and val else val
    if not isinstance(first, torch.Tensor):
        return None
    sizes = [expression(s) for s in first.shape]
    return tuple(s for s in sizes if isinstance(s, int)) if all(isinstance(s, int) for s in sizes) else None


def leading_dim(shape: tuple[int, ...], world: int) -> int | None:
    """The dim along which rows of `[..., N]` are cut: the first that leaves parts in one piece, else the
    first that has `world` equal parts."""
    fitting = [d for d in range(len(shape) - 1) if shape[d] and shape[d] % world == 0]
    whole = [d for d in fitting if math.prod(shape[:d]) == 1]
    return next(iter(whole or fitting), None)


def cut_dim(node: fx.Node, cuts: Cuts, world: int) -> int | None:
    """The dim along which the result of `node` is cut if its inputs are cut as in `cuts`; None if the op
    cannot be computed on slices."""
    shape = static_shape(node)
    if shape is None or node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in cuts:
        return _of_pointwise(node, shape, cuts) if is_pointwise(node) else None
    given = static_shape(source)
    assert given is not None
    dim = cuts[source]
    if is_pointwise(node):
        return _of_pointwise(node, shape, cuts)
    if node.target in _COPIES or node.target is operator.getitem:
        return dim if shape == given else _of_item(node, given, shape, dim)
    if node.target in _REDUCTIONS:
        return _of_reduction(node, len(given), dim)
    if node.target in _RESHAPES:
        return _of_reshape(given, shape, dim, world)
    if node.target in _PERMUTES:
        order: list[int] = [d % len(given) for d in node.args[1]]
        return order.index(dim)
    if node.target is aten.expand.default:
        place = dim + len(shape) - len(given)
        return place if shape[place] == given[dim] else None
    return None


def sums_cut_dim(node: fx.Node, cuts: Cuts) -> bool:
    """Whether the node adds up a cut value along the dim that is cut: on slices it has a partial sum."""
    source = node.args[0] if node.args else None
    if node.target is not SUM or not isinstance(source, fx.Node) or source not in cuts:
        return False
    val = tensor(source)
    return val is not None and val.is_floating_point() and cuts[source] in _dims(node, val.dim())


def is_pointwise(node: fx.Node) -> bool:
    target = node.target
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return (tagged and isinstance(value(node), torch.Tensor)) or is_cast(node)


def is_free(node: fx.Node) -> bool:
    """Whether the node only views its input, or widens it: on gathered values it costs no more."""
    if node.target in _RESHAPES or node.target in _COPIES or node.target in _PERMUTES:
        return True
    if node.target is aten.expand.default:
        return True
    out, source = tensor(node), tensor(node.args[0]) if node.args else None
    return is_cast(node) and out is not None and source is not None and out.itemsize > source.itemsize


def needs_part(node: fx.Node, read: fx.Node, dim: int) -> int | None:
    """The dim along which `node`, cut along `dim`, needs only its part of the uncut `read`; None if it reads
    all of it."""
    whole, given = static_shape(node), static_shape(read)
    if whole is None or not given:
        return None
    place = dim - len(whole) + len(given)
    return place if place >= 0 and given[place] == whole[dim] and given[place] != 1 else None


def on_slices(node: fx.Node, dim: int, world: int) -> tuple[Any, ...]:
    """The arguments of `node` for a result that is cut along `dim`, with the inputs as they are."""
    if node.target not in _WITH_SHAPE:
        return node.args
    shape = static_shape(node)
    assert shape is not None
    return (node.args[0], [s // world if d == dim else s for d, s in enumerate(shape)], *node.args[2:])


def _of_pointwise(node: fx.Node, shape: tuple[int, ...], cuts: Cuts) -> int | None:
    """Pointwise ops broadcast: dims are counted from the last one."""
    found = set()
    for source in node.all_input_nodes:
        if source in cuts:
            given = static_shape(source)
            if given is None or not isinstance(value(source), torch.Tensor):
                return None
            place = cuts[source] + len(shape) - len(given)
            if shape[place] != given[cuts[source]]:
                return None
            found.add(place)
    return found.pop() if len(found) == 1 else None


def _of_item(node: fx.Node, given: tuple[int, ...], shape: tuple[int, ...], dim: int) -> int | None:
    """Results of one op that are all reduced likewise have one shape."""
    return dim if node.target is operator.getitem and shape == given else None


def _of_reduction(node: fx.Node, dims: int, dim: int) -> int | None:
    reduced = _dims(node, dims)
    if dim in reduced:
        return None
    keeps = argument(node, 2, "keepdim", False)
    if node.target in (aten.var_mean.correction, aten.var.correction):
        keeps = node.kwargs.get("keepdim", False)
    return dim if keeps else dim - sum(d < dim for d in reduced)


def _dims(node: fx.Node, dims: int) -> set[int]:
    given = argument(node, 1, "dim")
    if given is None or given == []:
        return set(range(dims))
    return {d % dims for d in (given if isinstance(given, (list, tuple)) else [given])}


def _of_reshape(given: tuple[int, ...], shape: tuple[int, ...], dim: int, world: int) -> int | None:
    """The dim of `shape` that begins where `dim` of `given` does: its parts are the same elements."""
    before = math.prod(given[:dim])
    for place, size in enumerate(shape):
        if math.prod(shape[:place]) == before and size != 1:
            return place if size % world == 0 else None
    return None
