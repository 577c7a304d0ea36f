"""all_to_all -> embedding_bag backward: the gradient of pooled rows goes back to the ranks of the tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from .anchors import Anchor, hint
from .emit import CannotEmit, Emitter
from .layout import Cut, Digit, Digits, Layout, Size, cut_out, exact_quotient, merge, product, same_size
from .match import Context, Found, Match, Reader, Work, check_dtype, find_readers, only_cast, reread
from .product import Reject
from .report import Reason
from .trace import Shapes, argument, aten, dtype_of, expression, slice_bounds, tensor

PATTERN = "all_to_all_embedding_bag_backward"


@dataclass(frozen=True)
class TableGrad:
    """One `_embedding_bag_backward`: it reads columns `[start, start + width)` of the exchanged `[B, C]`."""

    node: fx.Node
    start: Size
    width: Size
    layout: Layout

    @property
    def sparse(self) -> bool:
        return bool(argument(self.node, 9, "sparse"))

    @property
    def shared(self) -> tuple[object, ...]:
        """What must be the same for all tables of one op."""
        n = self.node
        weights = argument(n, 10, "per_sample_weights")
        return (
            argument(n, 8, "mode"),
            argument(n, 11, "padding_idx", -1),
            weights is None,
            *(dtype_of(n.args[i]) for i in (1, 2)),
        )


def match_embedding_backward(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    received = tensor(anchor.node)
    assert received is not None
    if any(not same_size(expression(s), expression(anchor.output_splits[0])) for s in anchor.output_splits):
        return Reject(Reason.NO_COMPUTE, "what is received has uneven parts")
    readers = find_readers(anchor, shapes)
    cast = only_cast(readers)
    if cast is not None:
        readers = find_readers(anchor, shapes, through=cast)
    found = [(r, g) for r in readers for g in _table_grads(r)]
    if not found:
        return Reject(Reason.NO_COMPUTE, "no embedding bag's backward reads what is exchanged")
    grads = sorted((g for _, g in found), key=lambda g: g.start if isinstance(g.start, int) else 0)
    layout = grads[0].layout
    reject = _check(grads, layout, received)
    if reject is not None:
        return reject
    cut = cut_out(layout, Digit(0, shapes.size(anchor.output_splits[0]), context.world))
    if cut is None or cut.dim != 0 or cut.outer != 1:
        return Reject(Reason.LAYOUT, "the batch is not made of one run of bags a rank")
    consumed = {r.user for r, _ in found}
    others = [r for r in readers if r.user not in consumed]
    others += [r for r in readers if r.user in consumed and _read_besides(r, {g.node for g in grads})]
    if others and cast is not None:
        return Reject(Reason.EXTRA_USERS, f"{others[0].user.name} reads the gradient after its cast")
    inputs = [n for g in grads for n in (*g.node.args[1:3], argument(g.node, 10, "per_sample_weights"))]
    assert anchor.input is not None
    dtype = dtype_of(grads[0].node)
    assert dtype is not None
    read = product(layout.shape) * received.element_size()
    return Match(
        PATTERN,
        Work(count=len(grads), bytes_read=read),
        context.shapes,
        partial(_rewrite, anchor, context, grads, others, layout, cut, dtype),
        (anchor.input, *(n for n in inputs if isinstance(n, fx.Node))),
        not_on_gpus="gradients are sparse" if any(g.sparse for g in grads) else "",
    )


def _table_grads(reader: Reader) -> list[TableGrad]:
    """The tables whose gradient `reader` reads, as a piece of equal pieces, as a slice, or whole."""
    user, layout = reader.user, reader.layout
    if user.target is aten.slice.Tensor and len(layout.dims) == 2 and not layout.fixed:
        bounds = slice_bounds(user, layout.shape[1])
        if bounds is None or bounds[0] != 1:
            return []
        _, start, width = bounds
        return [TableGrad(n, start, width, layout) for n in user.users if _is_backward(n, user)]
    if not _is_backward(user, reader.view) or len(layout.dims) != 2 or len(layout.fixed) > 1:
        return []
    width = layout.shape[1]
    if not layout.fixed:
        return [TableGrad(user, 0, width, layout)]
    (digit, index), *_ = layout.fixed
    return [TableGrad(user, index * width, width, Layout((layout.dims[0], merge((digit, *layout.dims[1])))))]


def _is_backward(n: fx.Node, grad: fx.Node) -> bool:
    return n.target is aten._embedding_bag_backward.default and n.args[0] is grad


def _check(grads: list[TableGrad], layout: Layout, received: torch.Tensor) -> Reject | None:
    for g in grads:
        if argument(g.node, 7, "scale_grad_by_freq"):
            return Reject(Reason.UNSUPPORTED_VARIANT, f"{g.node.name} makes frequency-scaled gradients")
        if argument(g.node, 8, "mode") == 2:
            return Reject(Reason.UNSUPPORTED_VARIANT, f"{g.node.name} is of max pooling")
    if any(g.shared != grads[0].shared for g in grads):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the tables differ in mode, options or dtypes")
    end: Size = 0
    for g in grads:
        if not same_size(g.start, end) or g.layout != layout:
            return Reject(Reason.LAYOUT, "the tables' gradients are no consecutive columns")
        end = g.start + g.width
    if not same_size(end, layout.shape[1]):
        return Reject(Reason.LAYOUT, "some columns of the exchanged gradient belong to no table")
    return check_dtype(received.dtype)


def _read_besides(reader: Reader, mine: set[fx.Node]) -> bool:
    """Does somebody besides the fused backward read the slice of this reader?"""
    return reader.user.target is aten.slice.Tensor and any(u not in mine for u in reader.user.users)


def _rewrite(
    anchor: Anchor,
    context: Context,
    grads: list[TableGrad],
    others: list[Reader],
    layout: Layout,
    cut: Cut,
    dtype: torch.dtype,
    emitter: Emitter,
) -> None:
    shapes = context.shapes
    assert anchor.input is not None
    have = shapes.of(anchor.input)
    assert have is not None
    batch, own = cut.rest.dims
    width = layout.shape[1]
    columns: list[Size] = [width] * context.world
    if anchor.even:
        letters, want = "bsc", Layout((batch, merge((cut.digit, *own))))
        grad = emitter.rebuild(anchor.input, Layout.of(have), want)
    else:
        letters, columns = "sbc", _columns(anchor, shapes, batch, width, context.world)
        grad = emitter.reshape(anchor.input, (product(have),))
    first = grads[0].node
    bags, starts = (hint(tensor(n).shape[0]) for n in (first.args[0], first.args[2]))  # type: ignore[union-attr]
    last = bags is not None and starts == bags + 1
    weights = [w for g in grads if isinstance(w := argument(g.node, 10, "per_sample_weights"), fx.Node)]
    fused = emitter.call(
        torch.ops.autofuse.all_to_all_embedding_bag_backward.default,
        grad,
        [g.node.args[1] for g in grads],
        [g.node.args[2] for g in grads],
        weights,
        [g.node.args[6] for g in grads],
        [emitter.size(g.width) for g in grads],
        *(argument(first, 8, "mode"), last, argument(first, 11, "padding_idx", -1), dtype),
        [g.sparse for g in grads],
        [emitter.size(c) for c in columns],
        *(letters, bool(others), context.group, context.order, context.site),
    )
    if others:
        whole = emitter.item(fused, len(grads))
        reread(emitter, whole, layout, others)
    for i, g in enumerate(grads):
        emitter.replace(g.node, emitter.item(fused, i))


def _columns(anchor: Anchor, shapes: Shapes, batch: Digits, width: Size, world: int) -> list[Size]:
    """Columns of every rank's tables, from the flat runs that are sent to them."""
    bags = product(d.size for d in batch)
    runs = [exact_quotient(shapes.size(s), bags) for s in anchor.input_splits]
    if len(runs) != world or any(r is None for r in runs):
        raise CannotEmit("uneven parts that are no flat runs of bags")
    return [r for r in runs if r is not None]
