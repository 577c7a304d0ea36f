"""An exchange of gradients of pooled rows whose columns belong to tables.

A user of the exchanged `[B, C]` reads the columns of one table, as a piece, as a slice or whole, and computes
the gradient of the table or its new rows. The fused op does so for tables that are alike. It returns what is
exchanged, which all other users read. It must have a table for each column: where no user has one, or another
user, the op has a table without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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

from .embedding import sends_nothing
from .match import Context, Work, check_dtype
from .readers import Reader, find_cast_readers, reread

Reads = Callable[[fx.Node, fx.Node], fx.Node | None]
"""Of a node that reads the second node: the node that computes a table's gradient or new rows from that."""

Kind = Callable[[fx.Node], Hashable | None]
"""What must be equal for all tables of one op, at a node that computes a gradient or new rows; None if no op
does that."""


@dataclass(frozen=True)
class Columns:
    """`node` computes something from columns `[start, start + width)` of `[B, C]`, which has `layout` on the
    exchanged tensor; `reader`, the node or one before it, reads them. None for columns of which the op
    computes nothing."""

    node: fx.Node | None
    start: Size
    width: Size
    layout: Layout
    reader: fx.Node | None = None


@dataclass(frozen=True)
class Exchanged:
    """All users of an exchange: those of `tables`, in the order of their columns, and `others`, which read
    what is exchanged after a cast to `cast`, if there is one."""

    tables: list[Columns]
    others: list[Reader]
    layout: Layout
    cut: Cut
    work: Work
    cast: torch.dtype | None
    remark: str

    @property
    def nodes(self) -> list[fx.Node]:
        return [t.node for t in self.tables if t.node is not None]

    def reread(self, emitter: Emitter, exchanged: fx.Node) -> None:
        """Let the others read `exchanged`, an output of the fused op."""
        if self.others:
            reread(emitter, emitter.cast(exchanged, self.cast), self.layout, self.others)


def match_columns(
    anchor: Anchor, context: Context, reads: Reads, kind: Kind, what: str
) -> Exchanged | Reject:
    """The users of an exchange, if one of them is a node that `reads` accepts, which `what` names.

    The tables of a rank are its own. So whatever they are, the rank must fuse the exchange if its peers can.
    """
    shapes = context.shapes
    received = tensor(anchor.node)
    assert received is not None
    if any(not same_size(expression(s), expression(anchor.output_splits[0])) for s in anchor.output_splits):
        return Reject(Reason.NO_COMPUTE, "what is received has uneven parts")
    readers, cast = find_cast_readers(anchor, shapes)
    found = [(r, c) for r in readers for c in _columns_of(r, reads)]
    if not found:
        return Reject(Reason.NO_COMPUTE, f"no {what} reads what is exchanged")
    layout = found[0][1].layout
    mine = _alike([c for _, c in found], kind)
    tables = _all_columns(mine, layout)
    if isinstance(tables, Reject):
        return tables
    if (reject := check_dtype(received.dtype) or sends_nothing(anchor.input_splits)) is not None:
        return reject
    cut = cut_out(layout, Digit(0, shapes.size(anchor.output_splits[0]), context.world))
    if cut is None or cut.dim != 0 or cut.outer != 1:
        return Reject(Reason.LAYOUT, "the batch is not made of one run of bags a rank")
    consumed = {r.user for r, c in found if c in mine}
    others = [r for r in readers if r.user not in consumed]
    others += [r for r in readers if r.user in consumed and _read_besides(r, {c.reader for c in mine})]
    work = Work(count=len(tables), bytes_read=prod(layout.shape) * received.element_size())
    left = len(found) - len(mine)
    remark = f"torch computes what {left} of {len(found)} tables make of it" if left else ""
    return Exchanged(tables, others, layout, cut, work, cast, remark)


def _alike(columns: list[Columns], kind: Kind) -> list[Columns]:
    """The largest set of tables that one op takes, in the order of their columns."""
    groups: dict[Hashable, list[Columns]] = {}
    for c in columns:
        assert c.node is not None
        if (key := kind(c.node)) is not None:
            groups.setdefault(key, []).append(c)
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=lambda c: c.start if isinstance(c.start, int) else 0)


def _columns_of(reader: Reader, reads: Reads) -> list[Columns]:
    """The tables whose columns `reader` reads: as one of equal pieces, as a slice, or whole."""
    user, layout = reader.user, reader.layout
    if user.target is aten.slice.Tensor and len(layout.dims) == 2 and not layout.fixed:
        bounds = slice_bounds(user, layout.shape[1])
        if bounds is None or bounds[0] != 1:
            return []
        _, start, width = bounds
        found = [(reads(n, user), n) for n in user.users]
        return [Columns(node, start, width, layout, n) for node, n in found if node is not None]
    node = reads(user, reader.view)
    if len(layout.dims) == 3 and not layout.dims[1]:  # rows that are expanded to those of a bag
        layout = Layout((layout.dims[0], layout.dims[2]), layout.fixed)
    if node is None or len(layout.dims) != 2 or len(layout.fixed) > 1:
        return []
    width = layout.shape[1]
    if not layout.fixed:
        return [Columns(node, 0, width, layout, user)]
    (digit, index), *_ = layout.fixed
    layout = Layout((layout.dims[0], merge((digit, *layout.dims[1]))))
    return [Columns(node, index * width, width, layout, user)]


def _all_columns(tables: list[Columns], layout: Layout) -> list[Columns] | Reject:
    """The tables, and between them columns without a table, so that no column is left."""
    found: list[Columns] = []
    end: Size = 0
    for c in [*tables, Columns(None, layout.shape[1], 0, layout)]:
        gap = c.start - end
        if c.layout != layout or not (same_size(gap, 0) or (isinstance(gap, int) and gap > 0)):
            return Reject(Reason.LAYOUT, "the tables' gradients are no columns one behind the other")
        if not same_size(gap, 0):
            found.append(Columns(None, end, gap, layout))
        if c.node is not None:
            found.append(c)
        end = c.start + c.width
    return found


def _read_besides(reader: Reader, mine: set[fx.Node | None]) -> bool:
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
        letters, columns = "sbc", _columns(anchor, shapes, batch, context.world)
        grad = emitter.reshape(anchor.input, (prod(have),))
    return grad, [emitter.size(c) for c in columns], letters


def has_last_offset(grad: fx.Node, offsets: fx.Node) -> bool:
    """Whether the offsets have an entry for the end of the last bag."""
    bags, starts = (hint(tensor(n).shape[0]) for n in (grad, offsets))  # type: ignore[union-attr]
    return bags is not None and starts == bags + 1


def _columns(anchor: Anchor, shapes: Shapes, batch: Digits, world: int) -> list[Size]:
    """The number of columns of each rank's tables, from the flat runs that are sent to the ranks."""
    bags = prod(d.size for d in batch)
    runs = [exact_quotient(shapes.size(s), bags) for s in anchor.input_splits]
    if len(runs) != world or any(r is None for r in runs):
        raise CannotEmit("uneven parts that are no flat runs of bags")
    return [r for r in runs if r is not None]


def without_lookups(
    emitter: Emitter, found: Exchanged, index: torch.dtype, offset: torch.dtype, last: bool
) -> tuple[fx.Node, fx.Node]:
    """The indices and offsets of empty bags, in the dtypes `index` and `offset`. `last`: the offsets have an
    entry for the end of the last bag."""
    count = emitter.size(found.layout.shape[0] + int(last))
    return emitter.full([0], 0, emitter.anchor, index), emitter.full([count], 0, emitter.anchor, offset)
