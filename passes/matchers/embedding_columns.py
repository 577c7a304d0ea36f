"""An exchange of gradients of pooled rows whose columns belong to tables.

Each user of the exchanged `[B, C]` reads the columns of one table, as a piece, as a slice or whole, and
computes the gradient of the table or its new rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor, hint
from autofuse.passes.graph.emit import CannotEmit, Emitter
from autofuse.passes.graph.follow import Shapes, aten, expression, slice_bounds, tensor
from autofuse.passes.graph.layout import (
    Cut,
    Digit,
    Digits,
    Layout,
    Size,
    cut_out,
    exact_quotient,
    merge,
    prod,
    same_size,
)
from autofuse.passes.reasons import Reason, Reject

from .match import Context, Work, check_dtype
from .readers import Reader, find_cast_readers

Reads = Callable[[fx.Node, fx.Node], bool]
"""Whether a node computes a table's gradient or new rows from the second node."""


@dataclass(frozen=True)
class Columns:
    """`node` reads columns `[start, start + width)` of `[B, C]`, which has `layout` on the exchanged
    tensor."""

    node: fx.Node
    start: Size
    width: Size
    layout: Layout


@dataclass(frozen=True)
class Exchanged:
    """All users of an exchange: those of `tables`, in the order of their columns, and `others`."""

    tables: list[Columns]
    others: list[Reader]
    layout: Layout
    cut: Cut
    work: Work

    @property
    def nodes(self) -> list[fx.Node]:
        return [t.node for t in self.tables]


def match_columns(anchor: Anchor, context: Context, reads: Reads, what: str) -> Exchanged | Reject:
    """The users of an exchange, if all its columns belong to tables. `what` names the nodes that `reads`
    accepts."""
    shapes = context.shapes
    received = tensor(anchor.node)
    assert received is not None
    if any(not same_size(expression(s), expression(anchor.output_splits[0])) for s in anchor.output_splits):
        return Reject(Reason.NO_COMPUTE, "what is received has uneven parts")
    readers, cast = find_cast_readers(anchor, shapes)
    found = [(r, c) for r in readers for c in _columns_of(r, reads)]
    if not found:
        return Reject(Reason.NO_COMPUTE, f"no {what} reads what is exchanged")
    tables = sorted((c for _, c in found), key=lambda c: c.start if isinstance(c.start, int) else 0)
    layout = tables[0].layout
    reject = _check(tables, layout, received)
    if reject is not None:
        return reject
    cut = cut_out(layout, Digit(0, shapes.size(anchor.output_splits[0]), context.world))
    if cut is None or cut.dim != 0 or cut.outer != 1:
        return Reject(Reason.LAYOUT, "the batch is not made of one run of bags a rank")
    consumed = {r.user for r, _ in found}
    others = [r for r in readers if r.user not in consumed]
    others += [r for r in readers if r.user in consumed and _read_besides(r, {c.node for c in tables})]
    if others and cast is not None:
        return Reject(Reason.EXTRA_USERS, f"{others[0].user.name} reads the gradient after its cast")
    work = Work(count=len(tables), bytes_read=prod(layout.shape) * received.element_size())
    return Exchanged(tables, others, layout, cut, work)


def _columns_of(reader: Reader, reads: Reads) -> list[Columns]:
    """The tables whose columns `reader` reads: as one of equal pieces, as a slice, or whole."""
    user, layout = reader.user, reader.layout
    if user.target is aten.slice.Tensor and len(layout.dims) == 2 and not layout.fixed:
        bounds = slice_bounds(user, layout.shape[1])
        if bounds is None or bounds[0] != 1:
            return []
        _, start, width = bounds
        return [Columns(n, start, width, layout) for n in user.users if reads(n, user)]
    if not reads(user, reader.view) or len(layout.dims) != 2 or len(layout.fixed) > 1:
        return []
    width = layout.shape[1]
    if not layout.fixed:
        return [Columns(user, 0, width, layout)]
    (digit, index), *_ = layout.fixed
    return [Columns(user, index * width, width, Layout((layout.dims[0], merge((digit, *layout.dims[1])))))]


def _check(tables: list[Columns], layout: Layout, received: torch.Tensor) -> Reject | None:
    end: Size = 0
    for c in tables:
        if not same_size(c.start, end) or c.layout != layout:
            return Reject(Reason.LAYOUT, "the tables' gradients are no consecutive columns")
        end = c.start + c.width
    if not same_size(end, layout.shape[1]):
        return Reject(Reason.LAYOUT, "some columns of the exchanged gradient belong to no table")
    return check_dtype(received.dtype)


def _read_besides(reader: Reader, mine: set[fx.Node]) -> bool:
    """Whether the slice of this reader has users other than those of tables."""
    return reader.user.target is aten.slice.Tensor and any(u not in mine for u in reader.user.users)


def sent(
    anchor: Anchor, context: Context, found: Exchanged, emitter: Emitter
) -> tuple[fx.Node, list[int | fx.Node], str]:
    """The tensor that the fused op sends, the number of columns for each rank, and the layout of the
    tensor."""
    shapes = context.shapes
    have = shapes.known(anchor.input)
    batch, own = found.cut.rest.dims
    width = found.layout.shape[1]
    columns: list[Size] = [width] * context.world
    if anchor.even:
        letters, want = "bsc", Layout((batch, merge((found.cut.digit, *own))))
        grad = emitter.rebuild(anchor.input, Layout.of(have), want)
    else:
        letters, columns = "sbc", _columns(anchor, shapes, batch, width, context.world)
        grad = emitter.reshape(anchor.input, (prod(have),))
    return grad, [emitter.size(c) for c in columns], letters


def has_last_offset(grad: fx.Node, offsets: fx.Node) -> bool:
    """Whether the offsets have an entry for the end of the last bag."""
    bags, starts = (hint(tensor(n).shape[0]) for n in (grad, offsets))  # type: ignore[union-attr]
    return bags is not None and starts == bags + 1


def _columns(anchor: Anchor, shapes: Shapes, batch: Digits, width: Size, world: int) -> list[Size]:
    """The number of columns of each rank's tables, from the flat runs that are sent to the ranks."""
    bags = prod(d.size for d in batch)
    runs = [exact_quotient(shapes.size(s), bags) for s in anchor.input_splits]
    if len(runs) != world or any(r is None for r in runs):
        raise CannotEmit("uneven parts that are no flat runs of bags")
    return [r for r in runs if r is not None]
