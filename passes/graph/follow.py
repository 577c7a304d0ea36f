"""Follows views, permutations, splits and concatenations from a node up to their source.

The result is a `Layout`. All spellings of one movement of data (`view`, `reshape`, `_unsafe_view`, `t`,
`split` and `cat`, `copy(dst, src)`, clones) have the same layout, so that matchers know layouts and no
spellings.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.lowering import torch_internals

from .layout import Digit, Layout, Size, exact_quotient, merge, same_shape, same_size

aten = torch.ops.aten
prims = torch.ops.prims

# Views whose layout is determined by the shapes before and after.
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
}
# Ops that return the values of their argument in the shape of their argument.
_ALIASES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.expand.default,
}
_CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
_VIEWS = {
    *_RESHAPES, *_ALIASES, *SPLITS, aten.permute.default, aten.t.default, aten.transpose.int, aten.select.int,
    aten.slice.Tensor, aten.cat.default, aten.stack.default, operator.getitem,
}  # fmt: skip
WAIT = torch.ops._c10d_functional.wait_tensor.default


def value(node: object) -> object:
    if isinstance(node, fx.Node) and node.op == "get_attr" and "val" not in node.meta:
        # An attribute that is not a tensor, such as a process group, has no metadata.
        known = attrgetter(str(node.target))(node.graph.owning_module)
        return None if isinstance(known, torch.Tensor) else known
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def tensor(node: object) -> torch.Tensor | None:
    val = value(node)
    return val if isinstance(val, torch.Tensor) else None


def expression(size: object) -> Size:
    """A size as an int or a sympy expression, from an int, a SymInt or a node that holds one."""
    size = value(size)
    if isinstance(size, torch.SymInt):
        expr = _quotient(size.node.expr)
        return int(expr) if expr.is_Integer else expr
    assert isinstance(size, int), size
    return size


def _quotient(expr: sympy.Expr) -> sympy.Expr:
    """`a` for `(a * b + b - 1) // b`, the length of `arange(0, a * b, b)`; else `expr`."""
    floor = torch_internals.floor_division(expr)
    if floor is None:
        return expr
    whole, part = floor
    found = exact_quotient(whole - part + 1, part)
    return expr if found is None else sympy.sympify(found)


def argument(node: fx.Node, index: int, name: str, default: object = None) -> Any:
    """The argument `name`, given by keyword or at position `index`."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    val = tensor(node)
    return None if val is None else val.dtype


def is_cast(node: fx.Node) -> bool:
    """Whether the node changes the dtype and nothing else."""
    if node.target not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    out, source = tensor(node), tensor(node.args[0])
    return (
        out is not None and source is not None and out.dtype != source.dtype and out.device == source.device
    )


class Shapes:
    """Shapes of nodes. A dim of size `s` that a collective cuts into `world` parts is `world * part`."""

    def __init__(self) -> None:
        self._assumed: dict[sympy.Expr, sympy.Expr] = {}
        self._meaning: dict[sympy.Symbol, Size] = {}

    def assume_cut(self, length: Size, world: int, part: Size, own: bool = False) -> None:
        """Assume `length == world * part` where that is not proved; else the collective would raise. `own`:
        other ranks may have other multiples of the length, from which nothing must follow."""
        count, runs = part.as_coeff_Mul() if isinstance(part, sympy.Mul) else (1, part)
        if count != 1 and isinstance(runs, (sympy.Symbol, sympy.Function)):
            entries = exact_quotient(length, count)
            length, part = (length, part) if entries is None else (entries, runs)
        whole = exact_quotient(length, world)
        if isinstance(length, sympy.Expr) and whole is None:
            # `coefficient * rest` is a multiple of `world`, so `rest` is a multiple of `divisor`.
            coefficient, rest = length.primitive()
            if own and coefficient != 1:
                return
            divisor = world // math.gcd(int(coefficient), world)
            symbol = sympy.Dummy("part", integer=True, positive=True)
            constant, varying = rest.as_coeff_Add()  # such as s - 1 bags of s offsets
            self._assumed[varying] = divisor * symbol - constant
            if coefficient == 1 and isinstance(part, sympy.Function):
                self._assumed[part] = symbol  # s // 3 in 4 parts is s // 12: not derived from the above
            self._meaning[symbol] = part if coefficient == 1 else torch_internals.floor_divide(rest, divisor)
        elif isinstance(whole, sympy.Symbol) and not same_size(whole, part):
            self._assumed[whole] = sympy.sympify(part)

    def assume_alike(self, node: fx.Node) -> None:
        """Assume equal pieces of the `split` above `node`: a `cat` along another dim requires them."""
        while is_view(node) and node.target not in (aten.cat.default, operator.getitem):
            source = node.args[0]
            if not isinstance(source, fx.Node):
                return
            node = source
        pieces = node.args[0] if node.target is aten.cat.default else None
        if not isinstance(pieces, (list, tuple)) or not all(isinstance(p, fx.Node) for p in pieces):
            return
        split = pieces[0].args[0] if pieces[0].args else None
        source = split.args[0] if isinstance(split, fx.Node) and split.target is aten.split.Tensor else None
        val, length = tensor(source), tensor(pieces[0])
        if (
            val is None
            or length is None
            or [p.args for p in pieces] != [(split, i) for i in range(len(pieces))]
        ):
            return
        dim = argument(split, 2, "dim", 0) % val.dim()
        if dim != argument(node, 1, "dim", 0) % val.dim() and len(value(split)) == len(pieces):  # type: ignore[arg-type]
            self.assume_cut(expression(val.shape[dim]), len(pieces), expression(length.shape[dim]))

    def size(self, size: object) -> Size:
        expr = expression(size)
        if self._assumed and isinstance(expr, sympy.Expr):
            expr = expr.subs(self._assumed)
            return int(expr) if expr.is_Integer else expr
        return expr

    def meaning(self, size: Size) -> Size:
        """The size in the symbols of the graph, without the symbols of assumptions."""
        if self._meaning and isinstance(size, sympy.Expr):
            return size.xreplace(self._meaning)
        return size

    def of(self, node: object) -> tuple[Size, ...] | None:
        val = tensor(node)
        return None if val is None else tuple(self.size(s) for s in val.shape)

    def alike(self, a: object, b: object) -> bool:
        """Whether both are tensors of one shape."""
        first, second = self.of(a), self.of(b)
        return first is not None and second is not None and same_shape(first, second)

    def known(self, node: object) -> tuple[Size, ...]:
        """The shape of a node that is a tensor."""
        shape = self.of(node)
        assert shape is not None
        return shape


@dataclass(frozen=True)
class Followed:
    """A node as a layout of leaves. With `n` leaves, the digit `(-1, 1, n)` numbers the leaf."""

    layout: Layout
    leaves: tuple[fx.Node, ...]

    def map(self, layout: Layout | None) -> Followed | None:
        return None if layout is None else Followed(layout, self.leaves)


def follow(
    node: fx.Node,
    is_leaf: Callable[[fx.Node], bool],
    shapes: Shapes,
    through: torch.dtype | None = None,
    shape: tuple[Size, ...] | None = None,
) -> Followed | None:
    """The layout of `node` relative to the nearest leaves above it; None if an op between them is not a view.

    `node` is viewed as `shape` first (default: its own shape). A cast to the dtype `through` counts as a
    view.
    """
    memo: dict[fx.Node, Followed | None] = {}

    def visit(n: fx.Node) -> Followed | None:
        if n not in memo:
            memo[n] = step(n)
        return memo[n]

    def step(n: fx.Node) -> Followed | None:
        shape = shapes.of(n)
        if shape is not None and is_leaf(n):
            return Followed(Layout.of(shape), (n,))
        if n.op != "call_function" or shape is None:
            return None
        if n.target in (aten.cat.default, aten.stack.default):
            return join(n)
        if is_reshape(n):
            return viewed(n, shape)
        source, view = above(n)
        below = visit(source) if isinstance(source, fx.Node) else None
        if below is None:
            return None
        return below.map(view(below.layout, shape))

    def above(n: fx.Node) -> tuple[fx.Node | None, Callable]:
        if through is not None and is_cast(n) and dtype_of(n) == through:
            return n.args[0], _keep
        return source_and_view(n, shapes)

    def viewed(n: fx.Node, shape: tuple[Size, ...]) -> Followed | None:
        """`n` viewed as `shape`. In a chain of views, only the last view needs a layout."""
        while n.op == "call_function" and not is_leaf(n):
            source, view = above(n)
            if source is None or not (view is _keep or is_reshape(n)):
                break
            n = source
        below = visit(n)
        return None if below is None else below.map(below.layout.reshape(shape))

    def join(n: fx.Node) -> Followed | None:
        parts = n.args[0]
        assert isinstance(parts, Sequence)
        followed = [visit(p) if isinstance(p, fx.Node) else None for p in parts]
        found = [f for f in followed if f is not None]
        if not found or len(found) != len(followed):
            return None
        first = found[0]
        rank = len(first.layout.dims)
        dim = argument(n, 1, "dim", 0)
        assert isinstance(dim, int)
        if n.target is aten.stack.default:
            dim %= rank + 1
            found = [Followed(f.layout.unsqueeze(dim), f.leaves) for f in found]
        else:
            dim %= rank
        if all(f.leaves == first.leaves for f in found):
            return first.map(Layout.join([f.layout for f in found], dim))
        # Each part has a leaf of its own, and all parts have the same layout.
        layout = found[0].layout
        if any(f.layout != layout or len(f.leaves) != 1 for f in found):
            return None
        which = Digit(-1, 1, len(found))
        dims = (*layout.dims[:dim], merge((which, *layout.dims[dim])), *layout.dims[dim + 1 :])
        return Followed(Layout(dims, layout.fixed), tuple(f.leaves[0] for f in found))

    return visit(node) if shape is None else viewed(node, shape)


def is_reshape(n: fx.Node) -> bool:
    """Whether `n` is a view whose layout is determined by the shapes before and after."""
    return n.target in _RESHAPES and isinstance(n.args[0], fx.Node)


def source_and_view(n: fx.Node, shapes: Shapes) -> tuple[fx.Node | None, Callable]:
    """The node that `n` is a view of, and the function `(layout of that node, shape of n) -> layout of n`."""
    nothing = (None, lambda layout, shape: None)
    target = n.target
    if target is operator.getitem:
        return _split_piece(n, shapes) or nothing
    if not n.args or not isinstance(n.args[0], fx.Node):
        return nothing
    source = n.args[0]
    if target is aten.copy.default:  # copy(dst, src) has the values of src
        src = n.args[1]
        if isinstance(src, fx.Node) and dtype_of(src) == dtype_of(n) and shapes.alike(src, n):
            return src, _keep
        return nothing
    before = shapes.of(source)
    if before is None:
        return nothing
    if target in _RESHAPES:
        return source, lambda layout, shape: layout.reshape(shape)
    if target in _ALIASES or (target in _CASTS and not is_cast(n) and dtype_of(n) == dtype_of(source)):
        return (source, _keep) if shapes.alike(source, n) else nothing
    rank = len(before)
    if target is aten.permute.default:
        order = [d % rank for d in n.args[1]]
        return source, lambda layout, shape: layout.permute(order)
    if target is aten.t.default:
        return source, lambda layout, shape: layout.permute(range(rank)[::-1])
    if target is aten.transpose.int:
        order = list(range(rank))
        a, b = n.args[1] % rank, n.args[2] % rank
        order[a], order[b] = b, a
        return source, lambda layout, shape: layout.permute(order)
    if target is aten.select.int:
        dim, index = n.args[1] % rank, n.args[2]
        count = before[dim]
        if isinstance(index, int) and isinstance(count, int):
            return source, lambda layout, shape: _select(layout, dim, index % count, count)
    if target is aten.slice.Tensor:
        return _slice_piece(n, source, before) or nothing
    return nothing


def _keep(layout: Layout, shape: Sequence[Size]) -> Layout:
    return layout


def _select(layout: Layout, dim: int, index: int, count: int) -> Layout | None:
    piece = layout.piece(dim, index, count)
    return None if piece is None else piece.squeeze([dim])


def slice_bounds(n: fx.Node, length: Size) -> tuple[int, Size, Size] | None:
    """(dim, start, length) of a slice of step 1."""
    val = tensor(n)
    if val is None or argument(n, 4, "step", 1) != 1:
        return None
    dim = argument(n, 1, "dim", 0)
    if not isinstance(dim, int):
        return None
    dim %= val.dim()
    start = expression(argument(n, 2, "start", 0) or 0)
    if isinstance(start, int) and start < 0:
        if not isinstance(length, int):
            return None
        start += length
    return dim, start, expression(val.shape[dim])


def _slice_piece(n: fx.Node, source: fx.Node, before: tuple[Size, ...]) -> tuple[fx.Node, Callable] | None:
    rank = len(before)
    dim = argument(n, 1, "dim", 0)
    if not isinstance(dim, int):
        return None
    bounds = slice_bounds(n, before[dim % rank])
    if bounds is None:
        return None
    dim, start, length = bounds
    if start == 0 and same_size(length, before[dim]):
        return source, _keep
    count, index = exact_quotient(before[dim], length), exact_quotient(start, length)
    if not isinstance(count, int) or not isinstance(index, int) or not 0 <= index < count:
        return None
    return source, lambda layout, shape: layout.piece(dim, index, count)


def _split_piece(n: fx.Node, shapes: Shapes) -> tuple[fx.Node, Callable] | None:
    split, index = n.args
    if not isinstance(split, fx.Node) or split.target not in SPLITS or not isinstance(split.args[0], fx.Node):
        return None
    source = split.args[0]
    before, after = shapes.of(source), shapes.of(n)
    if before is None or after is None or not isinstance(index, int):
        return None
    axis = 1 if split.target is aten.unbind.int else 2
    dim = argument(split, axis, "dim", 0)
    assert isinstance(dim, int)
    dim %= len(before)
    if split.target is aten.unbind.int:
        count = before[dim]
        return (
            (source, lambda layout, shape: _select(layout, dim, index, count))
            if isinstance(count, int)
            else None
        )
    pieces = value(split)
    lengths = [shapes.of(p) for p in pieces] if isinstance(pieces, (list, tuple)) else None
    if lengths is None and split.target is aten.split_with_sizes.default:
        lengths = [(*after[:dim], shapes.size(s), *after[dim + 1 :]) for s in split.args[1]]
    if lengths is not None and any(s is None or not same_size(s[dim], after[dim]) for s in lengths):
        return None
    count = exact_quotient(before[dim], after[dim])
    if not isinstance(count, int):
        return None
    return source, lambda layout, shape: layout.piece(dim, index, count)


def is_view(n: fx.Node) -> bool:
    """Whether `n` only moves data. A split counts as a view, since its pieces are views."""
    if n.op != "call_function":
        return False
    return n.target in _VIEWS or (n.target in _CASTS and not is_cast(n))
