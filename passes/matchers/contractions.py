"""The contractions that a product begins with: matmuls, rows that an embedding reads, and pooled rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from autofuse.lowering.reference.bags import Pooling
from autofuse.passes.graph.follow import Shapes, argument, aten, dtype_of, is_cast, is_view, tensor
from autofuse.passes.graph.layout import Layout, Size, prod, same_shape, same_size
from autofuse.passes.reasons import Reason, Reject

from .bags import Bag, check_bags, read_bag
from .matmuls import grouped_offsets, is_grouped, one_weight
from .operands import Operand
from .placement import row_index

_CONTRACTIONS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_mm.default,
    aten.embedding.default,
}


def is_contraction(target: object) -> bool:
    """Whether a product may begin with what a node calls."""
    return target in _CONTRACTIONS or is_grouped(target)


ROWS = "rows"
"""The contraction of a product whose x are the places of rows of w."""


class Contraction(NamedTuple):
    """The node of a contraction, or of the sum of several. It has `layout` relative to the matrix `shape`."""

    node: fx.Node
    layout: Layout
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Product:
    """`stages` (the first is the contraction) applied to `x[i] @ w[i]`."""

    x: tuple[fx.Node, ...]
    w: tuple[fx.Node, ...]
    stages: tuple[str, ...]
    operands: tuple[Operand, ...]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    layout: Layout
    """The layout of the matched node relative to P."""
    last: fx.Node
    """The last node of the epilogue, which has layout `last_layout` relative to P."""
    last_layout: Layout
    offsets: fx.Node | None = None
    """Of a grouped matmul: the ends of the row ranges of the experts."""
    inner: frozenset[fx.Node] = field(default=frozenset())
    """Nodes before `last`. They may have no users outside of the product, those that are `readable` apart."""
    bias: tuple[fx.Node | None, ...] = ()
    """Of experts: one bias for each matmul."""
    listed: int = 0
    """Number of experts that each have a matmul of their own. `x`, `w` and `bias` then list, for each term of
    the sum, the entries of all experts."""
    of_vectors: bool = False
    """Of a `grouped` product: x are vectors `[R, K, 1]`, and w their matrices `[R, N, K]`."""
    from_either_end: bool = False
    """Of a `rows` product: negative numbers count from the last row."""
    bags: tuple[Bag, ...] = ()
    """Of a `bags` product: those of all tables."""
    heads: tuple[tuple[fx.Node, Layout], ...] = ()
    """Of listed experts, if the epilogue ends before they are joined: the last node of each expert's
    epilogue, with its layout relative to `[1, R, N]`."""
    contraction: Contraction | None = None
    """Of a product with an epilogue."""

    @property
    def text(self) -> str:
        return "; ".join(self.stages)


def indexes_a_table(n: fx.Node) -> bool:
    """Whether the node reads rows of a matrix as an embedding does, by an index. The matrix is an input of
    the graph, or a cast of one: rows of another matrix may rather be rows of a matmul."""
    if n.target is not aten.index.Tensor:
        return False
    table, index = n.args[0], row_index(n.args[1])
    whole = tensor(table)
    while isinstance(table, fx.Node) and (is_view(table) or is_cast(table)):
        table = table.args[0]
    of_input = isinstance(table, fx.Node) and table.op in ("placeholder", "get_attr")
    by_numbers = isinstance(index, fx.Node) and dtype_of(index) == torch.int64
    return of_input and by_numbers and whole is not None and whole.dim() == 2


def table_rows(n: fx.Node, shapes: Shapes) -> Product | Reject:
    """Rows that an embedding or an index reads: one for each number."""
    table, indices = n.args[:2]
    counted = n.target is aten.index.Tensor
    if counted:
        indices = row_index(indices)
    assert isinstance(table, fx.Node)
    assert isinstance(indices, fx.Node)
    dtype, shape = dtype_of(n), shapes.known(n)
    if dtype is None or dtype_of(indices) != torch.int64:
        return Reject(Reason.LAYOUT, f"the indices of {n.name} are not int64")
    flat = (prod(shape[:-1]), shape[-1])
    layout = Layout.of(flat).reshape(shape)
    assert layout is not None
    return Product((indices,), (table,), (ROWS,), (), flat, dtype, layout, n, layout, from_either_end=counted)


def bags_of(n: fx.Node) -> list[Bag]:
    """The bags whose pooled rows `n` is, or joins along their columns; [] if it is something else."""
    joins = n.target is aten.cat.default and argument(n, 1, "dim", 0) in (1, -1)
    found = [read_bag(part) for part in (n.args[0] if joins else [n])]
    return [bag for bag in found if bag is not None] if all(found) else []


def pooled_rows(n: fx.Node, shapes: Shapes) -> Product | Reject:
    """Rows of tables that embedding bags pool."""
    bags, dtype, shape = bags_of(n), dtype_of(n), shapes.known(n)
    assert dtype is not None
    reject = check_bags(bags, dtype)
    if reject is not None:
        return reject
    first = bags[0]
    weights = [b.per_sample_weights for b in bags if b.per_sample_weights is not None]
    stage = Pooling(first.mode, first.include_last_offset, first.padding_idx, bool(weights)).text
    offsets = [b.offsets for b in bags if b.offsets is not None]
    operands = tuple(map(Operand, [*offsets, *weights]))
    x, w = tuple(b.indices for b in bags), tuple(b.weight for b in bags)
    layout, inner = Layout.of(shape), frozenset(b.pooled for b in bags) - {n}
    return Product(x, w, (stage,), operands, shape, dtype, layout, n, layout, inner=inner, bags=tuple(bags))


def contraction(n: fx.Node, shapes: Shapes, batched: bool) -> Product | Reject:
    if n.target is aten.embedding.default:
        return Reject(Reason.NO_COMPUTE, f"{n.name} is no matmul") if batched else table_rows(n, shapes)
    shape = shapes.known(n)
    dtype = dtype_of(n)
    assert dtype is not None
    args = n.args
    operands: tuple[Operand, ...] = ()
    stage = "mm"
    bias: fx.Node | None = None
    if n.target in (aten.addmm.default, aten.baddbmm.default):
        bias, x, w = args[:3]
        beta, alpha = argument(n, 3, "beta", 1), argument(n, 4, "alpha", 1)
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            return Reject(Reason.UNSUPPORTED_VARIANT, f"{n.name} scales its terms by numbers not known yet")
        added = shapes.known(bias)
        # One vector, or one vector for each expert.
        vectors = (shape[0], 1, shape[2]) if len(shape) == 3 else shape[1:]
        if not (batched and beta == alpha == 1 and same_shape(added, vectors)):
            if len(shape) == 3 and shape[0] != 1:
                return Reject(Reason.UNSUPPORTED_VARIANT, f"{n.name} has a bias that is no vector an expert")
            operands = (Operand(bias, shape=added[-2:] if len(added) > 2 else None),)
            stage = "addmm %0" if beta == alpha == 1 else f"addmm %0 {beta} {alpha}"
            bias = None
    elif n.target is aten._scaled_mm.default:
        x, w, scale_a, scale_b = args[:4]
        out_dtype = argument(n, 6, "out_dtype")
        extras = [argument(n, 4, "bias"), argument(n, 5, "scale_result")]
        scales = _scales(scale_a, scale_b, () if batched else shape, shapes)
        if any(e is not None for e in extras) or out_dtype is None or scales is None:
            return Reject(
                Reason.UNSUPPORTED_VARIANT,
                f"{n.name}: only scalar scales or one a row and column, no bias, explicit dtype",
            )
        operands = scales
        stage = f"scaled_mm %0 %1 {str(out_dtype).removeprefix('torch.')}"
    else:
        x, w = args[:2]
    layout = Layout.of(shape)
    if is_grouped(n.target):
        offsets = grouped_offsets(n)
        if offsets is None or not batched:
            return Reject(Reason.NO_COMPUTE, f"{n.name} is no grouped matmul of rows")
        return Product((x,), (w,), (stage,), operands, shape, dtype, layout, n, layout, offsets, bias=(None,))
    if n.target in (aten.bmm.default, aten.baddbmm.default) and not batched:
        weight = one_weight(w)
        if weight is None:
            return Reject(Reason.NO_COMPUTE, f"{n.name} is a batch of matmuls")
        w = weight
        batch, shape = shape, (shape[0] * shape[1], shape[2])
        flat = Layout.of(shape).reshape(batch)
        assert flat is not None
        layout = flat
    if len(shape) == 2 and batched:  # one expert
        shape = (1, *shape)
        layout = Layout(Layout.of(shape).dims[1:])
    biases = (bias,) if batched else ()
    return Product((x,), (w,), (stage,), operands, shape, dtype, layout, n, layout, bias=biases)


def _scales(a: fx.Node, b: fx.Node, shape: tuple[Size, ...], shapes: Shapes) -> tuple[Operand, ...] | None:
    """The scales of both operands of a `_scaled_mm`: two numbers, or, of a matmul of this shape, one for each
    row of x and one for each column of w. None if they are others, such as one for each block."""
    scales = Operand(a), Operand(b)
    sizes = shapes.known(a), shapes.known(b)
    if all(same_size(prod(size), 1) for size in sizes):
        return scales
    of_rows = shape and same_shape(sizes[0], (shape[0], 1)) and same_shape(sizes[1], (1, shape[1]))
    return scales if of_rows and dtype_of(a) == dtype_of(b) == torch.float32 else None
