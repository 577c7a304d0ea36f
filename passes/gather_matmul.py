"""all_gather -> matmul: from every matmul that reads the gathered tensor, walk up to the collective.

Gathering adds one digit, the rank, to the index of the part. The layout of a matmul's operand tells where in
its rows or columns that digit has gone; the rest of the layout is applied to the part before the op. A cast
of the gathered tensor commutes with the gather: `cast(AG(x)) = AG(cast(x))`, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from .anchors import Anchor
from .emit import Emitter
from .layout import Cut, Digit, Layout, cut_out, exact_quotient, product
from .match import (
    Context,
    Found,
    Match,
    Reader,
    Work,
    check_dtype,
    depends_on,
    fill_biases,
    find_readers,
    hand_out,
    only_cast,
    reread,
)
from .matmul_reduce import two_dimensional
from .product import Reject, linear_operands
from .report import Reason
from .trace import aten, dtype_of, tensor

PATTERN = "all_gather_matmul"


@dataclass(frozen=True)
class Consumer:
    """`reader.user = X @ w (+ bias)`, where `layout` is that of X: [M, K] on the gathered tensor."""

    reader: Reader
    w: fx.Node
    bias: fx.Node | None
    layout: Layout


def match_all_gather(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    readers = find_readers(anchor, shapes)
    cast = only_cast(readers)
    if cast is not None:
        readers = find_readers(anchor, shapes, through=cast)
    consumers = [c for r in readers if (c := _consumer(r)) is not None]
    if not consumers:
        return Reject(Reason.NO_COMPUTE, "no matmul reads the gathered tensor as its left operand")
    first = consumers[0]
    consumers = [c for c in consumers if c.layout == first.layout]
    gathered = shapes.of(anchor.node)
    assert gathered is not None
    length = exact_quotient(gathered[0], context.world)
    if length is None:
        return Reject(Reason.UNEVEN, f"dim 0 of size {gathered[0]} has no {context.world} equal parts")
    cut = cut_out(first.layout, Digit(0, length, context.world))
    if cut is None or first.layout.fixed or product(first.layout.shape) != product(gathered):
        return Reject(Reason.LAYOUT, f"{first.reader.view.name} is no whole view of the gathered tensor")
    dtype = dtype_of(first.reader.view)
    reject = check_dtype(dtype)
    if dtype is None or reject is not None:
        return reject or Reject(Reason.DTYPE, "the dtype is not known")
    inputs = [n for c in consumers for n in (c.w, c.bias) if n is not None]
    late = depends_on(anchor, inputs)
    if late is not None:
        return Reject(Reason.EXTRA_USERS, f"the weight {late.name} depends on the gathered tensor")
    fused = {c.reader for c in consumers}
    others = [r for r in readers if r not in fused]
    rows, inner = first.layout.shape
    sizes = tuple((rows, inner, shapes.of(c.w)[-1]) for c in consumers)  # type: ignore[index]
    assert anchor.input is not None
    return Match(
        PATTERN,
        Work(sizes, bytes_kept=product((rows, inner, dtype.itemsize)) if others else 0),
        context.shapes,
        partial(_rewrite, anchor, context, consumers, others, cut, cast),
        (anchor.input, *inputs),
    )


def _consumer(reader: Reader) -> Consumer | None:
    """The matmul that reads the view as its left operand, if all_gather_matmul can compute it."""
    found = linear_operands(reader.user)
    if found is None:
        return None
    x, w, bias = found
    if x is not reader.view or w is reader.view or bias is reader.view:
        return None
    layout = reader.layout
    if reader.user.target is aten.bmm.default:
        if tensor(reader.user).shape[0] != 1:  # type: ignore[union-attr]
            return None
        layout = layout.squeeze([0])
    return Consumer(reader, w, bias, layout)


def _rewrite(
    anchor: Anchor,
    context: Context,
    consumers: list[Consumer],
    others: list[Reader],
    cut: Cut,
    cast: torch.dtype | None,
    emitter: Emitter,
) -> None:
    part = anchor.input
    assert part is not None
    shape = context.shapes.of(part)
    assert shape is not None
    if cast is not None:
        part = emitter.call(torch.ops.prims.convert_element_type.default, part, cast)
    x = emitter.rebuild(part, Layout.of(shape), cut.rest)
    w = [two_dimensional(emitter, c.w) for c in consumers]
    bias = fill_biases(emitter, x, [c.bias for c in consumers])
    fused = emitter.call(
        torch.ops.autofuse.all_gather_matmul.default,
        *(x, w, bias, cut.dim, emitter.size(cut.outer), bool(others)),
        *(context.group, context.order, context.site),
    )
    if others:
        reread(emitter, emitter.item(fused, len(consumers)), consumers[0].layout, others)
    hand_out(emitter, fused, [c.reader.user for c in consumers])
