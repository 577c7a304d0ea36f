"""Operands of the stages of a product, in the shapes that fused ops take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, aten, tensor, value
from autofuse.passes.graph.layout import Layout, Size, merge, prod, same_size
from autofuse.passes.graph.row_numbers import from_start


@dataclass(frozen=True)
class Operand:
    """An operand of a stage. The fused op takes it expanded to `expand`, then reshaped to `shape`.

    `others`: the operands of the other experts, if each expert has its own. `numbers`: the operand chooses
    among so many rows, and a negative number counts from the last.
    """

    node: fx.Node
    expand: tuple[Size, ...] | None = None
    shape: tuple[Size, ...] | None = None
    others: tuple[Operand, ...] = ()
    numbers: Size | None = None

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
    natural = merge(layout.digits) == merge(Layout.of(shape).digits)
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
    if not natural:
        return None
    if columns not in used:
        # One value for each row: dims of columns have size 1, other dims are expanded.
        cut = next((i for i in range(rank) if columns in per_dim[i]), rank)
        if any(per_dim[i] & set(range(columns)) for i in range(cut, rank)):
            return None
        return Operand(operand, expand=(*full[:cut], *([1] * (rank - cut))), shape=(*rows, 1))
    return Operand(operand, expand=full, shape=shape)


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
    if operand.numbers is not None:
        node = from_start(emitter, node, operand.numbers)
    if operand.expand is not None:
        have = emitter.shapes.known(node)
        full = (*((1,) * (len(operand.expand) - len(have))), *have)
        node = emitter.reshape(node, full)
        sizes = [-1 if a == b else emitter.size(b) for a, b in zip(full, operand.expand, strict=True)]
        if any(s != -1 for s in sizes):
            node = emitter.call(aten.expand.default, node, sizes)
    return node if operand.shape is None else emitter.reshape(node, operand.shape)


def two_dimensional(emitter: Emitter, node: fx.Node) -> fx.Node:
    """`node` as a matrix, with all dims but the last flattened."""
    *rows, columns = emitter.shapes.of(node) or ()
    return emitter.reshape(node, (prod(rows), columns))
