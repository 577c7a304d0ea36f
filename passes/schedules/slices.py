"""Which values of a graph can be computed on slices, so that each rank computes its own slice.

A value is *cut* along a dim if each rank computes only its part: rank `r` has the `r`-th of `W` equal parts.
`cut_dim` returns the dim along which the result of an op is cut, given the cuts of its inputs.

If a size has no `W` equal parts, parts may be *padded*: the parts of the last ranks end in rows that are
never read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from autofuse.lowering.torch_internals import floor_divide
from autofuse.passes.graph.follow import WAIT, argument, aten, expression, is_cast, tensor, value
from autofuse.passes.graph.layout import Size, exact_quotient, prod, same_shape, same_size

Cuts: TypeAlias = Mapping[fx.Node, int]
"""The cut values, each with the dim along which it is cut."""

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


MOST_PADDED = 1.25
"""A number of rows is padded only to at most so many times itself; a symbolic number is always padded."""


@dataclass
class Fit:
    """Which sizes can be cut into `world` parts.

    Attributes:
        symbols: the symbols about which an assumption may be made.
        padded: whether parts may be padded. If not, symbolic sizes are assumed to have equal parts.
        assumed: the sizes that were assumed to have equal parts. If one has not, the graph must not run.
    """

    world: int
    symbols: Collection[sympy.Symbol] = ()
    padded: bool = False
    assumed: set[sympy.Expr] = field(default_factory=set)

    def __call__(self, size: Size) -> bool:
        if self.exactly(size):
            return True
        if isinstance(size, int):
            return self.padded and self.world * self.part(size) <= MOST_PADDED * size
        if not size.free_symbols <= set(self.symbols):
            return False
        if not self.padded:
            self.assumed.add(size)
        return True

    def exactly(self, size: Size) -> bool:
        """Whether the size is known to have equal parts."""
        return exact_quotient(size, self.world) is not None

    def pads(self, size: Size) -> bool:
        """Whether parts of the size, which can be cut, are padded."""
        return self.padded and not self.exactly(size)

    def part(self, size: Size) -> Size:
        """A part of a size that can be cut."""
        exact = exact_quotient(size, self.world)
        if exact is not None:
            return exact
        length = size + self.world - 1 if self.padded else size
        return length // self.world if isinstance(length, int) else floor_divide(length, self.world)


def shape_of(node: fx.Node) -> tuple[Size, ...] | None:
    """The shape of the node's value, or of the first of its values."""
    val = value(node)
    first = val[0] if isinstance(val, (list, tuple)) and val else val
    if not isinstance(first, torch.Tensor):
        return None
    return tuple(expression(s) for s in first.shape)


def in_one_piece(shape: tuple[Size, ...], dim: int) -> bool:
    """Whether each part along `dim` is contiguous in memory."""
    return bool(prod(shape[:dim]) == 1)


def leading_dim(shape: tuple[Size, ...], fit: Fit) -> int | None:
    """The dim along which rows of `[..., N]` are cut: the first one with contiguous parts, else the first one
    with equal parts."""
    dims = [d for d in range(len(shape) - 1) if shape[d] != 0]
    for d in dims:
        if in_one_piece(shape, d) and fit(shape[d]):
            return d
    return next((d for d in dims if _can_gather(shape, d, fit) and fit(shape[d])), None)


def cut_dim(node: fx.Node, cuts: Cuts, fit: Fit) -> int | None:
    """The dim along which the result of `node` is cut if its inputs are cut as in `cuts`; None if the op
    cannot be computed on slices."""
    shape = shape_of(node)
    dim = _cut_dim(node, shape, cuts, fit)
    return dim if dim is not None and shape is not None and _can_gather(shape, dim, fit) else None


def _can_gather(shape: tuple[Size, ...], dim: int, fit: Fit) -> bool:
    """Whether a value that is cut along `dim` can be gathered. Parts that are not contiguous are gathered by
    a split and a cat, which need known sizes without padding."""
    return in_one_piece(shape, dim) or (all(isinstance(s, int) for s in shape) and fit.exactly(shape[dim]))


def _cut_dim(node: fx.Node, shape: tuple[Size, ...] | None, cuts: Cuts, fit: Fit) -> int | None:
    if shape is None or node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in cuts:
        return _of_pointwise(node, shape, cuts) if is_pointwise(node) else None
    given = shape_of(source)
    assert given is not None
    dim = cuts[source]
    if is_pointwise(node):
        return _of_pointwise(node, shape, cuts)
    if node.target in _COPIES or node.target is operator.getitem:
        return dim if same_shape(shape, given) else None
    if node.target in _REDUCTIONS:
        return _of_reduction(node, len(given), dim)
    if node.target in _RESHAPES:
        return _of_reshape(given, shape, dim, fit)
    if node.target in _PERMUTES:
        order: list[int] = [d % len(given) for d in node.args[1]]
        return order.index(dim)
    if node.target is aten.expand.default:
        place = dim + len(shape) - len(given)
        return place if same_size(shape[place], given[dim]) else None
    return None


def sums_cut_dim(node: fx.Node, cuts: Cuts) -> bool:
    """Whether the node sums a cut value along the dim that is cut. On a slice it then computes a partial
    sum."""
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
    """Whether the node only views its input or casts it to a wider dtype. It costs no more on gathered
    values."""
    if node.target in _RESHAPES or node.target in _COPIES or node.target in _PERMUTES:
        return True
    if node.target is aten.expand.default:
        return True
    out, source = tensor(node), tensor(node.args[0]) if node.args else None
    return is_cast(node) and out is not None and source is not None and out.itemsize > source.itemsize


def keeps_rows(node: fx.Node) -> bool:
    """Whether the node only views, copies or casts its input, in the order of its elements."""
    return node.target in _RESHAPES or node.target in _COPIES or is_cast(node)


def needs_part(node: fx.Node, read: fx.Node, dim: int) -> int | None:
    """The dim along which `node`, cut along `dim`, needs only its part of the uncut `read`; None if it reads
    all of it."""
    whole, given = shape_of(node), shape_of(read)
    if whole is None or not given:
        return None
    place = dim - len(whole) + len(given)
    return place if place >= 0 and same_size(given[place], whole[dim]) and given[place] != 1 else None


def on_slices(node: fx.Node, dim: int, fit: Fit, size: Callable[[Size], int | fx.Node]) -> tuple[Any, ...]:
    """The arguments of `node` for a result that is cut along `dim`, with the inputs as they are.

    size: a size as an argument.
    """
    if node.target not in _WITH_SHAPE:
        return node.args
    shape = shape_of(node)
    assert shape is not None
    part = [size(fit.part(s) if d == dim else s) for d, s in enumerate(shape)]
    return (node.args[0], part, *node.args[2:])


def _of_pointwise(node: fx.Node, shape: tuple[Size, ...], cuts: Cuts) -> int | None:
    """Pointwise ops broadcast: dims are counted from the last one."""
    found = set()
    for source in node.all_input_nodes:
        if source in cuts:
            given = shape_of(source)
            if given is None or not isinstance(value(source), torch.Tensor):
                return None
            place = cuts[source] + len(shape) - len(given)
            if not same_size(shape[place], given[cuts[source]]):
                return None
            found.add(place)
    return found.pop() if len(found) == 1 else None


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


def _of_reshape(given: tuple[Size, ...], shape: tuple[Size, ...], dim: int, fit: Fit) -> int | None:
    """The dim of `shape` whose parts have the same elements as the parts of dim `dim` of `given`."""
    before = prod(given[:dim])
    for place, size in enumerate(shape):
        if same_size(prod(shape[:place]), before) and size != 1:
            alike = same_size(size, given[dim]) or not fit.padded
            equal = fit.exactly(size) and fit.exactly(given[dim])
            return place if fit(size) and (alike or equal) else None
    return None
