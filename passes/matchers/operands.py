"""Operands of the stages of a product, in the shapes that fused ops take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, aten, tensor, value
from autofuse.passes.graph.layout import Layout, Size, common_digits, is_natural, prod, same_size
from autofuse.passes.graph.row_numbers import from_start


@dataclass(frozen=True)
class Operand:
    """An operand of a stage. The fused op takes it expanded to `expand`, then reshaped to `shape`.

    `layout`: that of the expanded operand on what the op takes, if views lie between product and stage that
    change the order. `others`: the operands of the other experts, if each expert has its own. `numbers`: the
    operand chooses among so many rows, and a negative number counts from the last. `dtype`: the op takes the
    operand cast to it.
    """

    node: fx.Node
    expand: tuple[Size, ...] | None = None
    shape: tuple[Size, ...] | None = None
    layout: Layout | None = None
    others: tuple[Operand, ...] = ()
    numbers: Size | None = None
    dtype: torch.dtype | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node, *(o.node for o in self.others))


def broadcast(
    operand: fx.Node, n: fx.Node, layout: Layout, shape: tuple[Size, ...], shapes: Shapes
) -> Operand | None:
    """The operand of `n` as `[]`, `[N]`, `[M, 1]` or `[M, N]`; None if it does not broadcast like that.

    `n` has `layout` on the product, which has `shape`.
    """
    if is_symbol(operand):
        return Operand(operand)
    have, full = shapes.of(operand), shapes.of(n)
    val = tensor(operand)
    if have is None or full is None or val is None:
        return None
    if val.dim() == 0:
        return Operand(operand)
    if all(s == 1 for s in have):
        return Operand(operand, shape=(1,))
    rank = len(full)
    have = (1,) * (rank - len(have)) + have
    natural = is_natural(layout, shape)
    columns = len(shape) - 1
    rows = shape[:-1]
    per_dim = [frozenset(d.dim for d in digits) for digits in layout.dims]
    varies = [not same_size(have[i], 1) for i in range(rank)]
    used = frozenset().union(*(per_dim[i] for i in range(rank) if varies[i])) if any(varies) else frozenset()
    complete = all(same_size(have[i], full[i]) for i in range(rank) if varies[i])
    if not complete:
        return None
    if used <= {columns}:
        exact = [full[i] for i in range(rank) if columns in per_dim[i]]
        if len(exact) == 1 and same_size(exact[0], shape[-1]):
            return Operand(operand, shape=(shape[-1],))
        return None
    if not natural and not _has_all_of(layout, shape):
        return None
    if columns in used:
        return Operand(operand, full, shape, None if natural else layout)
    # One value for each row: dims of columns have size 1, other dims are expanded.
    of_columns = [columns in dims for dims in per_dim]
    if any(is_one and len(dims) > 1 for is_one, dims in zip(of_columns, per_dim, strict=True)):
        return None
    expand = tuple(1 if is_one else size for is_one, size in zip(of_columns, full, strict=True))
    rest = Layout(tuple(() if i else dims for i, dims in zip(of_columns, layout.dims, strict=True)))
    return Operand(operand, expand, (*rows, 1), None if natural else rest)


def _has_all_of(layout: Layout, shape: tuple[Size, ...]) -> bool:
    """Whether the layout has every element of a tensor of this shape once."""
    refined = common_digits(layout.digits, Layout.of(shape).digits)
    return not layout.fixed and refined is not None and len(refined[0]) == len(refined[1])


def is_symbol(operand: fx.Node) -> bool:
    """Whether the operand is a number that the graph computes. A number that changes between the calls of one
    rank is such a number there, and may be a constant in the graphs of its peers."""
    return isinstance(value(operand), (torch.SymInt, torch.SymFloat))


def materialise(emitter: Emitter, operand: Operand) -> fx.Node:
    """Insert the views that give the operand the shape that the fused op takes; numbers become tensors."""
    node = operand.node
    if is_symbol(node):
        dtype = torch.int64 if isinstance(value(node), torch.SymInt) else torch.float64
        return emitter.call(aten.scalar_tensor.default, node, dtype=dtype)
    node = emitter.cast(node, operand.dtype)
    if operand.numbers is not None:
        node = from_start(emitter, node, operand.numbers)
    if operand.expand is not None:
        have = emitter.shapes.known(node)
        full = (*((1,) * (len(operand.expand) - len(have))), *have)
        node = emitter.reshape(node, full)
        sizes = [-1 if a == b else emitter.size(b) for a, b in zip(full, operand.expand, strict=True)]
        if any(s != -1 for s in sizes):
            node = emitter.call(aten.expand.default, node, sizes)
    if operand.shape is None:
        return node
    if operand.layout is not None:
        return emitter.rebuild(node, operand.layout, Layout.of(operand.shape), operand.shape)
    return emitter.reshape(node, operand.shape)


def values_of(operands: Iterable[Operand]) -> list[torch.Tensor]:
    """The metadata of operands, as the ops compute with them."""
    known = ((o, tensor(o.node)) for o in operands)
    return [val if o.dtype is None else val.to(o.dtype) for o, val in known if val is not None]


def two_dimensional(emitter: Emitter, node: fx.Node) -> fx.Node:
    """`node` as a matrix, with all dims but the last flattened."""
    *rows, columns = emitter.shapes.of(node) or ()
    return emitter.reshape(node, (prod(rows), columns))
