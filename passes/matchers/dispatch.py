"""all_to_all -> expert matmul (dispatch), with fixed capacity or dropless: the transpose of combine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from autofuse.lowering.ops.all_to_all_expert_matmul import AllToAllExpertMatmul
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import CannotEmit, Emitter
from autofuse.passes.graph.follow import aten, dtype_of, expression, tensor
from autofuse.passes.graph.layout import (
    Cut,
    Digit,
    Digits,
    Layout,
    Size,
    cut_out,
    exact_quotient,
    is_natural,
    prod,
    same_size,
)
from autofuse.passes.graph.paths import depends_on
from autofuse.passes.reasons import Reason, Reject

from .combine import ANY_ROWS, NOT_PERMUTED, batched, like, parts_of
from .gates import Gate, gate_of
from .match import Context, Found, Match, Work, check_dtype, fill_biases, hand_out, replace_result, values
from .matmuls import grouped_offsets, is_grouped, linear_operands
from .placement import Choice, find_choice, permutes_all
from .readers import Reader, find_readers, reread, takes_rows
from .rows import Rows, split_rows

PATTERN = "all_to_all_expert_matmul"


@dataclass(frozen=True)
class Entry:
    """A matmul of expert `expert`, or of all experts (-1). `layout`: of its activations `X: [E, R, K]`."""

    reader: Reader
    w: fx.Node
    bias: fx.Node | None
    layout: Layout
    expert: int


def match_dispatch(anchor: Anchor, context: Context) -> Found:
    dropless = _match_dropless(anchor, context)
    if isinstance(dropless, Match) or dropless.reason is not Reason.NO_COMPUTE:
        return dropless
    return _match(anchor, context, single=False)


def match_single_dispatch(anchor: Anchor, context: Context) -> Found:
    """One matmul, which is taken as one expert."""
    return _match(anchor, context, single=True)


def _match(anchor: Anchor, context: Context, single: bool) -> Found:
    shapes = context.shapes
    received = shapes.known(anchor.node)
    readers = find_readers(anchor, shapes)
    entries = [e for r in readers if (e := _entry(r, single)) is not None]
    if not entries:
        return Reject(Reason.NO_COMPUTE, "no expert matmul reads what is exchanged")
    reject = check_dtype(dtype_of(anchor.node))
    if reject is not None:
        return reject
    layout = entries[0].layout
    entries = [e for e in entries if e.layout == layout and (e.expert < 0) == (entries[0].expert < 0)]
    experts = 0
    if entries[0].expert >= 0:
        experts = int(layout.shape[0])
        ordered = _by_consumer(entries, experts)
        if ordered is None:
            return Reject(Reason.UNEVEN, f"not each of the {experts} experts has the same number of matmuls")
        entries = ordered
    if not same_size(prod(layout.shape), prod(received)):
        return Reject(Reason.LAYOUT, "the experts read only part of what is exchanged")
    place = _place(anchor, context, layout, received)
    if isinstance(place, Reject):
        return place
    fused = {e.reader for e in entries}
    others = [r for r in readers if r not in fused]
    if isinstance(place, Rows) and _may_be_ranges(place, experts, others, received):
        return Reject(Reason.UNEVEN, ANY_ROWS)
    inputs = [n for e in entries for n in (e.w, e.bias) if n is not None]
    late = depends_on(anchor, inputs)
    if late is not None:
        return Reject(Reason.EXTRA_USERS, f"the weight {late.name} depends on what is exchanged")
    count, rows, inner = layout.shape
    if experts:
        count = 1
    site = (anchor, context, entries, others, layout)
    if isinstance(place, Cut):
        rewrite = partial(_rewrite_even, *site, place, experts)
    else:
        rewrite = partial(_rewrite_rows, *site, place, experts)
    (sent,) = values([anchor.input])
    return Match(
        PATTERN,
        Work(tuple((count * rows, inner, shapes.known(e.w)[-1]) for e in entries), count),
        context.shapes,
        rewrite,
        (anchor.input, *inputs),
        arguments=AllToAllExpertMatmul(
            sent,
            values(e.w for e in entries),
            values(e.bias for e in entries),
            "",
            experts,
            None,
            None,
            *parts_of(place),
            bool(others),
            *context.common,
        ),
    )


def _place(
    anchor: Anchor, context: Context, layout: Layout, received: tuple[Size, ...]
) -> Cut | Rows | Reject:
    """The digit of X that numbers the sources, or whole rows if X consists of whole received rows."""
    order: Layout | None = None
    if not is_natural(layout, received):
        part = exact_quotient(received[0], context.world)
        source = None if part is None else Digit(0, part, context.world)
        cut = None if source is None else cut_out(layout, source)
        own = cut is not None and source in layout.dims[cut.dim] and len(layout.dims[cut.dim]) > 1
        if cut is not None and (own or cut.dim == 2):
            uneven = Reject(Reason.UNEVEN, "the parts are uneven, though they are read as equal ones")
            return cut if anchor.even else uneven
        if _rows_received(layout, received) is None:
            return Reject(Reason.LAYOUT, "the source is no digit of rows or columns, nor are rows read whole")
        order = Layout((layout.dims[0] + layout.dims[1],))
    return split_rows(anchor, layout.shape[2], context.shapes, order)


def _may_be_ranges(place: Rows, experts: int, others: list[Reader], received: tuple[Size, ...]) -> bool:
    """Whether the matmuls may read ranges of any number of rows on other ranks: the experts of a loop, or one
    expert that has all rows on this rank, if other rows are read, too."""
    if experts:
        return place.order is None or prod(received) == 0
    return any(takes_rows(r, received) for r in others)


def _entry(reader: Reader, single: bool) -> Entry | None:
    user, layout = reader.user, reader.layout
    found = linear_operands(user)
    if found is None:
        return None
    x, w, bias = found
    if x is not reader.view or w is reader.view or bias is reader.view:
        return None
    expert = -1
    if user.target in (aten.bmm.default, aten.baddbmm.default):
        if (tensor(user).shape[0] == 1) is not single:  # type: ignore[union-attr]
            return None
    elif single:
        layout = layout.unsqueeze(0)
    elif len(layout.fixed) == 1:
        (digit, expert), *_ = layout.fixed
        layout = Layout(((digit,), *layout.dims))
    else:
        return None
    if layout.fixed:
        return None
    return Entry(reader, w, bias, layout, expert)


def _by_consumer(entries: list[Entry], experts: int) -> list[Entry] | None:
    """The first matmul of every expert, then the second of every expert, ...; None if experts differ."""
    per_expert = [[e for e in entries if e.expert == i] for i in range(experts)]
    counts = {len(p) for p in per_expert}
    if len(counts) != 1:
        return None
    rows = [[p[k] for p in per_expert] for k in range(counts.pop())]
    alike = all(len({tuple(tensor(e.w).shape) for e in row}) == 1 for row in rows)  # type: ignore[union-attr]
    return [e for row in rows for e in row] if alike else None


def _rewrite_even(
    anchor: Anchor,
    context: Context,
    entries: list[Entry],
    others: list[Reader],
    layout: Layout,
    cut: Cut,
    experts: int,
    emitter: Emitter,
) -> None:
    shape = context.shapes.known(anchor.input)
    send = Layout(((cut.digit,), *cut.rest.dims))
    x = emitter.rebuild(anchor.input, Layout.of(shape), send)
    w, bias = _weights(emitter, x, entries, experts)
    fused = emitter.call(
        torch.ops.autofuse.all_to_all_expert_matmul.default,
        *(x, w, bias, "", experts, None, None, [], [], cut.dim, emitter.size(cut.outer), bool(others)),
        *(context.group, context.order, context.site),
    )
    if others:
        reread(emitter, emitter.item(fused, len(entries)), layout, others)
    hand_out(emitter, fused, [e.reader.user for e in entries])


def _weights(
    emitter: Emitter, x: fx.Node, entries: list[Entry], experts: int
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Weights and biases as the fused op takes them."""
    w = [e.w if experts else batched(emitter, e.w) for e in entries]
    biases: list[fx.Node | None] = []
    for e, wi in zip(entries, w, strict=True):
        shape = emitter.shapes.known(wi)
        whole = e.bias is not None and not experts
        biases.append(
            emitter.reshape(e.bias, (shape[0], shape[2])) if whole and e.bias is not None else e.bias
        )
    return w, fill_biases(emitter, x, biases)


def _rewrite_rows(
    anchor: Anchor,
    context: Context,
    entries: list[Entry],
    others: list[Reader],
    layout: Layout,
    place: Rows,
    experts: int,
    emitter: Emitter,
) -> None:
    shape, received = layout.shape, context.shapes.known(anchor.node)
    x = like_rows(emitter, anchor.input, shape[2])
    w, bias = _weights(emitter, x, entries, experts)
    where = None if place.order is None else _chosen(emitter, place.order, received, layout, x)
    splits = ([emitter.size(s) for s in sizes] for sizes in (place.output_splits, place.input_splits))
    fused = emitter.call(
        torch.ops.autofuse.all_to_all_expert_matmul.default,
        *(x, w, bias, "", experts, None, where, *splits, 1, 1, bool(others)),
        *(context.group, context.order, context.site),
    )
    consumers = len(entries) // max(1, experts)
    for i, e in enumerate(entries):
        user = e.reader.user
        result = emitter.item(fused, i // max(1, experts))
        if experts:
            width = emitter.shapes.known(result)[-1]
            each = emitter.reshape(result, (*shape[:2], width))
            result = emitter.call(aten.select.int, each, 0, i % experts)
        emitter.replace(user, like(emitter, result, user))
    if others and place.order is None:
        replace_result(emitter, anchor, like(emitter, emitter.item(fused, consumers), anchor.node))
    elif others:
        reread(emitter, emitter.item(fused, consumers), layout, others)


def like_rows(emitter: Emitter, node: fx.Node, columns: Size) -> fx.Node:
    """`node` as a matrix with `columns` columns."""
    shape = emitter.shapes.known(node)
    if len(shape) == 2 and same_size(shape[1], columns):
        return node
    rows = exact_quotient(prod(shape), columns)
    if rows is None:
        raise CannotEmit(f"{node.name} has no whole rows of {columns}")
    return emitter.reshape(node, (rows, columns))


def _rows_received(layout: Layout, received: tuple[Size, ...]) -> Digits | None:
    """The digits of the received rows, if a row of X is one received row; else None. Of a flat tensor, a row
    is a run of elements."""
    count = exact_quotient(prod(received), layout.shape[2])
    matrix = None if count is None else Layout.of(received).reshape((count, layout.shape[2]))
    return None if matrix is None or matrix.dims[1] != layout.dims[2] else matrix.dims[0]


def _chosen(
    emitter: Emitter, order: Layout, received: tuple[Size, ...], layout: Layout, x: fx.Node
) -> fx.Node:
    """Vector of int64: for row `i` of X, the number of the received row."""
    rows = _rows_received(layout, received)
    assert rows is not None
    count = prod(d.size for d in rows)
    numbers = emitter.numbers(emitter.size(count), x)
    return emitter.rebuild(numbers, Layout((rows,)), order, (count,))


# --- dropless -----------------------------------------------------------------------------------------


def _match_dropless(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    natural = Layout.of(shapes.of(anchor.node) or ())
    every = find_readers(anchor, shapes)
    readers = [r for r in every if r.layout == natural]
    if not readers or len(natural.dims) != 2:
        return Reject(Reason.NO_COMPUTE, "no grouped matmul reads what is exchanged")
    rows = readers[0].view
    choice = find_choice(readers[0].user, rows, shapes)
    if isinstance(choice, Reject):
        return choice
    users = [r.user for r in readers]
    if choice is not None:
        if len(every) != 1:
            return Reject(Reason.EXTRA_USERS, f"what is exchanged is read besides {choice.node.name}")
        rows, users = choice.node, list(choice.node.users)
    positions = None if choice is None else choice.index
    grouped = [u for u in users if is_grouped(u.target) and u.args[0] is rows and u.args[1] is not rows]
    grouped = [u for u in grouped if grouped_offsets(u) is not None]
    if not grouped:
        return Reject(Reason.NO_COMPUTE, "no grouped matmul reads what is exchanged")
    reject = check_dtype(dtype_of(anchor.node))
    if reject is not None:
        return reject
    offsets = grouped_offsets(grouped[0])
    grouped = [u for u in grouped if grouped_offsets(u) is offsets]
    keep = len(users) > len(grouped) or len(every) > len(readers)
    weights = [u.args[1] for u in grouped]
    inputs = [n for n in (*weights, offsets, positions) if isinstance(n, fx.Node)]
    late = depends_on(anchor, inputs)
    if late is not None:
        return Reject(Reason.EXTRA_USERS, f"{late.name} depends on what is exchanged")
    gate = gate_of(grouped, shapes)
    shape = shapes.known(rows)
    count, inner = shape
    sizes = tuple((count, inner, shapes.known(w)[-1]) for w in weights)
    (sent,) = values([anchor.input])
    return Match(
        PATTERN,
        Work(sizes, shapes.known(weights[0])[0]),
        context.shapes,
        partial(_rewrite_dropless, anchor, context, grouped, offsets, choice, rows, keep, gate),
        (anchor.input, *inputs),
        arguments=AllToAllExpertMatmul(
            sent,
            values(weights),
            [],
            "" if gate is None else gate.spelled,
            0,
            tensor(offsets),
            tensor(positions),
            [expression(s) for s in anchor.output_splits],
            [expression(s) for s in anchor.input_splits],
            1,
            1,
            keep,
            *context.common,
        ),
        not_on_gpus="" if positions is None or permutes_all(positions, anchor.node, shapes) else NOT_PERMUTED,
    )


def _rewrite_dropless(
    anchor: Anchor,
    context: Context,
    grouped: list[fx.Node],
    offsets: fx.Node | None,
    choice: Choice | None,
    rows: fx.Node,
    keep: bool,
    gate: Gate | None,
    emitter: Emitter,
) -> None:
    if gate is not None:
        grouped = list(gate.products)
    weights = [u.args[1] for u in grouped]
    splits = (anchor.output_splits, anchor.input_splits)
    received = context.shapes.known(anchor.node)[0]
    positions = None if choice is None else choice.positions(emitter, received)
    name = "" if gate is None else gate.spelled
    args: tuple[object, ...] = (anchor.input, weights, [], name, 0, offsets, positions, *splits, 1, 1, keep)
    op = torch.ops.autofuse.all_to_all_expert_matmul.default
    fused = emitter.call(op, *args, context.group, context.order, context.site)
    made = grouped if gate is None else gate.outputs
    for i, node in enumerate(made):
        result = emitter.item(fused, i)
        result.meta["val"] = node.meta["val"]
        emitter.replace(node, result)
    if keep:
        exchanged = emitter.item(fused, len(made))
        exchanged.meta["val"] = rows.meta["val"]
        if positions is None:
            replace_result(emitter, anchor, exchanged)
        else:
            emitter.replace(rows, exchanged)
