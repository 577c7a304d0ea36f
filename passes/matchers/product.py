"""Recognises a product: a sum of matmuls, then a pointwise epilogue, with views anywhere between.

The result holds the arguments `x`, `w`, `operands` and `product` of the fused op (docs/ops.md), and
the layout of the matched node relative to the product `P: [M, N]`, or `[E, R, N]` for experts.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TypeAlias

import torch
from torch import fx

from autofuse.lowering.plan import Family
from autofuse.lowering.reference.bags import CONTRACTION as BAGS
from autofuse.passes.graph.anchors import fused_op, is_fused
from autofuse.passes.graph.follow import Shapes, argument, dtype_of, follow, is_cast, is_view
from autofuse.passes.graph.layout import Digit, Layout, Size, compose, is_natural, same_shape
from autofuse.passes.graph.paths import between
from autofuse.passes.reasons import Reason, Reject

from .contractions import (
    ROWS,
    Contraction,
    Product,
    bags_of,
    contraction,
    indexes_a_table,
    is_contraction,
    pooled_rows,
    table_rows,
)
from .operands import Operand, broadcast
from .product_readers import readable
from .token_sums import (
    CHOICES,
    GROUPED,
    added_rows,
    adds_rows,
    chosen_rows,
    rows_of_experts,
)

aten = torch.ops.aten

_BINARY = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
}


class Batch(Enum):
    """The third value of `Batched`."""

    ROWS = "rows"


Batched: TypeAlias = bool | Batch
"""What `_match` looks for. False: `[M, N]`, of matmuls, a lookup, pooled rows, or tokens of experts. True:
matmuls of experts, `[E, R, N]`. `Batch.ROWS`: rows of experts, `[R, N]`, that are not added up yet."""

_UNARY = {aten.neg.default: "neg", aten.relu.default: "relu"}


def match_product(
    node: fx.Node,
    shapes: Shapes,
    batched: bool = False,
    shape: tuple[Size, ...] | None = None,
    read_inside: bool = False,
) -> Product | Reject:
    """The product whose elements `node`, viewed as `shape`, holds in some layout.

    `batched` allows matmuls of several experts, `read_inside` readers of the values that are `readable`.
    """
    found = _match(node, shapes, batched, shape)
    if isinstance(found, Reject):
        return found
    own = next((n for o in found.operands for n in o.nodes if n in found.inner), None)
    if own is not None:
        return Reject(Reason.EXTRA_USERS, f"{own.name} is also an operand behind the matmul")
    taken = found.inner | {found.last, *(head for head, _ in found.heads)}
    for inner in found.inner - (readable(found) if read_inside else frozenset()):
        outside = [u for u in inner.users if u not in taken]
        if outside:
            return Reject(Reason.EXTRA_USERS, f"{inner.name} is also read by {outside[0].name}")
    return found


def _match(
    node: fx.Node, shapes: Shapes, batched: Batched, shape: tuple[Size, ...] | None = None
) -> Product | Reject:
    def is_leaf(n: fx.Node) -> bool:
        more = n.target in CHOICES if batched is Batch.ROWS else not batched and adds_rows(n)
        return (
            more
            or is_contraction(n.target)
            or is_stage(n)
            or is_fused(n)
            or (not batched and (bool(bags_of(n)) or indexes_a_table(n)))
        )

    followed = follow(node, is_leaf, shapes, shape=shape)
    if followed is None:
        if _moves_a_matmul(node):
            return Reject(Reason.LAYOUT, f"{node.name} is no list of digits of a matmul")
        return Reject(Reason.NO_COMPUTE, f"no matmul was found above {node.name}")
    if len(followed.leaves) != 1 and not batched:
        return Reject(Reason.NO_COMPUTE, f"{node.name} joins several tensors")
    parts: list[Product] = []
    for leaf in followed.leaves:
        part = _leaf(leaf, shapes, batched)
        if isinstance(part, Reject):
            return part
        parts.append(part)
    layout = compose(followed.layout, parts[0].layout)
    if layout is None or layout.fixed:
        return Reject(
            Reason.LAYOUT, f"{node.name} is a part or an inexpressible view of {followed.leaves[0].name}"
        )
    found = parts[0] if len(parts) == 1 else list_experts(parts, node)
    if isinstance(found, Reject):
        return found
    if found.listed and len(parts) > 1:
        layout = Layout(
            tuple(tuple(Digit(0, 1, d.size) if d.dim < 0 else d for d in dim) for dim in layout.dims)
        )
        found = replace(found, last_layout=layout)
    return replace(found, layout=layout)


def _moves_a_matmul(n: fx.Node) -> bool:
    """Whether only views, casts, pointwise ops and padding lie between some matmul and `n`."""
    seen: set[fx.Node] = set()
    work = [n]
    while work:
        node = work.pop()
        if is_contraction(node.target):
            return True
        moves = is_view(node) or is_stage(node) or node.target is aten.constant_pad_nd.default
        if node not in seen and moves:
            seen.add(node)
            work.extend(node.all_input_nodes)
    return False


def _of_fused(n: fx.Node) -> Reject:
    """Why nothing is fused with an output of a fused op. The op has the matmul if the output is a product; it
    has none to give if a collective made the output of a product."""
    source, index = n.args
    assert isinstance(source, fx.Node)
    op = fused_op(source)
    assert op is not None
    if op.family in (Family.GATHER, Family.CONSUME) or index:
        return Reject(
            Reason.NO_COMPUTE, f"the matmul above {n.name} is part of {source.target} already", taken=True
        )
    return Reject(Reason.NO_COMPUTE, f"no matmul was found behind {source.target}")


def is_stage(n: fx.Node) -> bool:
    others = aten.where.self, aten.index_put.default
    return n.target in _BINARY or n.target in _UNARY or n.target in others or is_cast(n)


def _leaf(n: fx.Node, shapes: Shapes, batched: Batched) -> Product | Reject:
    if is_fused(n):
        return _of_fused(n)
    if batched is Batch.ROWS and n.target in CHOICES:
        return chosen_rows(n, shapes, partial(_match, shapes=shapes, batched=batched), _extend)
    if not batched and adds_rows(n):
        added = added_rows(n, shapes, partial(_match, shapes=shapes, batched=Batch.ROWS), _extend)
        if isinstance(added, Product) or not is_contraction(n.target):
            return added
    if bags_of(n):
        return pooled_rows(n, shapes)
    if n.target is aten.index.Tensor:
        return table_rows(n, shapes)
    if is_contraction(n.target):
        return rows_of_experts(n, shapes) if batched is Batch.ROWS else contraction(n, shapes, bool(batched))
    if n.target in _BINARY:
        return _binary(n, shapes, batched)
    if n.target is aten.where.self:
        return _where(n, shapes, batched)
    if n.target is aten.index_put.default:
        return _filled(n, shapes, batched)
    return _unary(n, shapes, batched)


def list_experts(parts: list[Product], node: fx.Node) -> Product | Reject:
    """One product of shape `[E, R, N]` from the products of all experts, which `node` joins."""
    first = parts[0]
    for p in parts:
        alike = (p.stages, len(p.x), p.dtype, p.layout) == (
            first.stages,
            len(first.x),
            first.dtype,
            first.layout,
        )
        if not alike or not same_shape(p.shape, first.shape):
            return Reject(Reason.UNEVEN, "the experts' matmuls differ in shape, dtype or form")
        if p.listed or p.offsets is not None or p.shape[0] != 1:
            return Reject(Reason.UNSUPPORTED_VARIANT, "a loop over experts that are batches of matmuls")
    if first.stages[0] != "mm":
        return Reject(
            Reason.UNSUPPORTED_VARIANT, "an expert's matmul scales its terms or has a bias that is no vector"
        )
    terms = range(len(first.x))
    return replace(
        first,
        x=tuple(p.x[i] for i in terms for p in parts),
        w=tuple(p.w[i] for i in terms for p in parts),
        bias=tuple(p.bias[i] for i in terms for p in parts),
        operands=tuple(
            replace(first.operands[i], others=tuple(p.operands[i] for p in parts[1:]))
            for i in range(len(first.operands))
        ),
        shape=(len(parts), *first.shape[1:]),
        last=node,
        inner=frozenset().union(*(p.inner for p in parts)),
        listed=len(parts),
        heads=tuple((p.last, p.last_layout) for p in parts),
    )


def _unary(n: fx.Node, shapes: Shapes, batched: Batched) -> Product | Reject:
    """A function of one argument, or a cast."""
    source = n.args[0]
    assert isinstance(source, fx.Node)
    found = _match(source, shapes, batched)
    stage = _UNARY.get(n.target) or f"to {str(dtype_of(n)).removeprefix('torch.')}"
    return found if isinstance(found, Reject) else _extend(found, source, n, stage)


def _extend(found: Product, side: fx.Node, n: fx.Node, stage: str, *operands: Operand) -> Product:
    """The product with one more stage, `n`, which reads it through `side`."""
    path = between(side, found.last)
    for head, _ in found.heads:
        path |= between(side, head) | {head}
    dtype = dtype_of(n)
    assert dtype is not None
    return replace(
        found,
        stages=(*found.stages, stage),
        operands=(*found.operands, *operands),
        dtype=dtype,
        last=n,
        last_layout=found.layout,
        inner=found.inner | path | {found.last},
        heads=(),
        contraction=found.contraction or Contraction(found.last, found.last_layout, found.shape),
    )


def _binary(n: fx.Node, shapes: Shapes, batched: Batched) -> Product | Reject:
    name = _BINARY[n.target]
    if argument(n, 2, "alpha", 1) != 1 or n.kwargs.get("rounding_mode") is not None:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{n.name} has an alpha or a rounding mode")
    left, right = n.args[:2]
    first = _side(left, n, shapes, batched)
    second = _side(right, n, shapes, batched) if name != "div" else None
    sides = [(first, left, right, name)]
    if isinstance(second, Product):
        # r - P = -P + r, to the bit.
        sides.append((second, right, left, "neg; add" if name == "sub" else name))
        if isinstance(first, Product):
            summed = _sum(first, second, n) if name == "add" else None
            if summed is not None:
                return summed
            # One product becomes an operand of the other: better the one with fewer operations.
            sides.sort(key=lambda side: -_inner_length(side[0], shapes))
    reject = first if isinstance(first, Reject) else Reject(Reason.NO_COMPUTE, f"no matmul above {n.name}")
    for found, side, other, stage in sides:
        if not isinstance(found, Product):
            continue
        assert isinstance(side, fx.Node)
        if not isinstance(other, fx.Node):
            number = int(other) if isinstance(other, bool) else other
            return _extend(found, side, n, f"{stage} {number}")
        operand = broadcast(other, n, found.layout, found.shape, shapes)
        if operand is not None:
            return _extend(found, side, n, f"{stage} %{len(found.operands)}", operand)
        reject = Reject(Reason.LAYOUT, f"{other.name} does not broadcast along rows or columns of the matmul")
    return reject


def _inner_length(found: Product | Reject | None, shapes: Shapes) -> int:
    """The contracted length of all terms, without symbolic lengths."""
    assert isinstance(found, Product)
    lengths = [shapes.known(x)[-1] for x in found.x]
    return sum(length for length in lengths if isinstance(length, int))


def _where(n: fx.Node, shapes: Shapes, batched: Batched) -> Product | Reject:
    """`where(mask, P, value)` or `where(mask, value, P)`."""
    mask, left, right = n.args
    first = _side(left, n, shapes, batched)
    second = _side(right, n, shapes, batched)
    reject = first if isinstance(first, Reject) else Reject(Reason.NO_COMPUTE, f"no matmul above {n.name}")
    for found, side, other, stage in (
        (first, left, right, "where"),
        (second, right, left, "masked_fill"),
    ):
        if not isinstance(found, Product):
            continue
        assert isinstance(side, fx.Node)
        count, fill = len(found.operands), constant(other, found.dtype)
        rest = [mask] if fill is not None else [mask, other]
        operands = [
            broadcast(o, n, found.layout, found.shape, shapes) for o in rest if isinstance(o, fx.Node)
        ]
        given = [o for o in operands if o is not None]
        if len(given) == len(rest):
            text = f"{stage} %{count} {f'%{count + 1}' if fill is None else fill}"
            return _extend(found, side, n, text, *given)
        reject = Reject(Reason.LAYOUT, f"{n.name} has a mask or value that is not along the matmul")
    return reject


def _filled(n: fx.Node, shapes: Shapes, batched: Batched) -> Product | Reject:
    """`P[mask] = number`, of a mask of rows."""
    source, masks, number = n.args[:3]
    assert isinstance(source, fx.Node)
    mask = masks[0] if isinstance(masks, (list, tuple)) and len(masks) == 1 else None
    found = Reject(Reason.NO_COMPUTE, f"{n.name} puts values into {source.name}")
    if not isinstance(mask, fx.Node) or dtype_of(mask) != torch.bool or argument(n, 3, "accumulate", False):
        return found
    below = _match(source, shapes, batched)
    if isinstance(below, Reject):
        return below
    fill, have = constant(number, below.dtype), shapes.of(mask)
    natural = is_natural(below.layout, below.shape)
    of_rows = have is not None and same_shape(have, below.layout.shape[:-1])
    if fill is None or not natural or not of_rows or len(below.shape) != 2:
        return found
    return _extend(
        below,
        source,
        n,
        f"masked_fill %{len(below.operands)} {fill}",
        Operand(mask, shape=(below.shape[0], 1)),
    )


def _side(arg: object, n: fx.Node, shapes: Shapes, batched: Batched) -> Product | Reject | None:
    """The product on one side of a binary op; a Reject if the op broadcasts it, None for a number."""
    if not isinstance(arg, fx.Node) or shapes.of(arg) is None:
        return None
    found = _match(arg, shapes, batched)
    if isinstance(found, Product) and not same_shape(shapes.of(arg), shapes.of(n)):
        return Reject(Reason.LAYOUT, f"{n.name} broadcasts the matmul")
    return found


def _sum(a: Product, b: Product, n: fx.Node) -> Product | None:
    """`a + b` as one product of several terms, of which only the first may be an addmm; None if
    impossible."""
    if len(b.stages) == 1 and b.stages[0].startswith("addmm"):
        a, b = b, a
    experts = a.stages[0].startswith(GROUPED) and a.stages == b.stages and a.operands == b.operands
    alike = experts or (b.stages == ("mm",) and not a.stages[0].startswith(("scaled", ROWS, GROUPED, BAGS)))
    if len(a.stages) != 1 or not alike:
        return None
    if (
        a.dtype != b.dtype
        or a.layout != b.layout
        or a.offsets is not b.offsets
        or a.listed
        or b.listed
        or not same_shape(a.shape, b.shape)
        or a.dtype != dtype_of(n)
    ):
        return None
    paths = (between(i, p.last) for i in n.all_input_nodes for p in (a, b) if i is p.last or p.last < i)
    inner = frozenset({a.last, b.last}).union(a.inner, b.inner, *paths)
    sums = replace(a, x=a.x + b.x, w=a.w + b.w, bias=a.bias + b.bias)
    return replace(sums, last=n, last_layout=a.layout, inner=inner)


def constant(node: object, dtype: torch.dtype) -> int | float | None:
    """The value of a constant scalar tensor of this dtype; None for another node."""
    if not isinstance(node, fx.Node) or node.target is not aten.full.default or node.args[0] != []:
        return None
    number = node.args[1]
    return number if isinstance(number, (int, float)) and dtype_of(node) == dtype else None
