"""embedding_bag -> all_to_all: pooled rows are stored in the layout that the next op reads.

The index of a pooled element has the digits `b` (bag of one destination), `t` (table) and `d` (column). The
exchange replaces the destination in the batch by the source `s`. The fused op stores in the order of digits
that the users of the collective read, so that their rearrangement becomes a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import CannotEmit, Emitter
from autofuse.passes.graph.follow import (
    Shapes,
    argument,
    aten,
    dtype_of,
    expression,
    follow,
    is_cast,
    is_view,
)
from autofuse.passes.graph.layout import (
    Cut,
    Digit,
    Layout,
    Size,
    common_digits,
    compose,
    cut_out,
    exact_quotient,
    leading_digit,
    merge,
    prod,
    same_size,
)
from autofuse.passes.graph.paths import outside_reader
from autofuse.passes.reasons import Reason, Reject

from .bags import (
    SUM,
    Bag,
    check_bags,
    flat,
    gpus_pool,
    lookups_of_rows,
    read_pooled,
    reads_table,
    replace_extras,
)
from .match import Context, Found, Match, Work, check_dtype, replace_result
from .readers import find_cast_readers, find_readers, reread

PATTERN = "embedding_bag_all_to_all"


@dataclass(frozen=True)
class Sent:
    """What a rank sends: `parts` of the columns, which bags pool or which torch computes.

    Attributes:
        parts: nodes `[B, D_t]`.
        bags: those of them that the op pools; all of one mode, with the same options and dtypes. The op takes
            the rows of the others as they are.
        layout: the layout of what is sent relative to `[B, columns]`. Dims of digits: 0 is the batch, 1 the
            column within a part, -1 the part. With parts of several widths, 1 is the column over all parts.
        wire: the dtype that is sent.
    """

    parts: tuple[fx.Node, ...]
    bags: dict[fx.Node, Bag]
    layout: Layout
    wire: torch.dtype


def match_embedding(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    if any(not same_size(expression(s), expression(anchor.input_splits[0])) for s in anchor.input_splits):
        return Reject(Reason.NO_COMPUTE, "what is sent has uneven parts")
    sent = _find_sent(anchor, shapes)
    if isinstance(sent, Reject):
        return sent
    if (reject := check_dtype(sent.wire) or sends_nothing(anchor.output_splits)) is not None:
        return reject
    leading = leading_digit(sent.layout.dims[0], context.world)
    if leading is None:
        return Reject(Reason.LAYOUT, "the batch is not cut into one run of bags a rank")
    shape = (shapes.of(sent.parts[0]) or (0,))[0]
    cut = cut_out(Layout((merge([Digit(0, 1, shape)]),)), leading[0])
    if cut is None or cut.outer != 1:
        return Reject(Reason.LAYOUT, "the destination is not the leading digit of the batch")
    read: Size = 0
    for pooled, bag in sent.bags.items():
        lookups, itemsize = prod(shapes.known(bag.indices)), bag.weight.meta["val"].element_size()
        read = read + lookups * shapes.known(pooled)[-1] * itemsize
    inputs = [n for part in sent.parts for n in _inputs(part, sent.bags.get(part))]
    return Match(
        PATTERN,
        Work(count=len(sent.parts), bytes_read=read),
        context.shapes,
        partial(_rewrite, anchor, context, sent, cut),
        tuple(inputs),
        remark=_remark(sent),
    )


def _remark(sent: Sent) -> str:
    parts, left = len(sent.parts), len(sent.parts) - len(sent.bags)
    return f"torch computes the rows of {left} of {parts} tables" if left else ""


def sends_nothing(splits: Sequence[int | fx.Node]) -> Reject | None:
    """That one of the ranks has no tables: the program of that rank has no bags to fuse, so that no rank may
    fuse the exchange."""
    empty = [r for r, size in enumerate(splits) if same_size(expression(size), 0)]
    return Reject(Reason.NO_COMPUTE, f"rank {empty[0]} of the group has no tables") if empty else None


def _inputs(part: fx.Node, bag: Bag | None) -> list[fx.Node]:
    if bag is None:
        return [part]
    return [n for n in (bag.weight, bag.indices, bag.offsets, bag.per_sample_weights) if n is not None]


def _find_sent(anchor: Anchor, shapes: Shapes) -> Sent | Reject:
    """What is sent, if rows of tables are among it.

    The tables of a rank are its own. So whatever they are, the rank must fuse the exchange if its peers can:
    what the op cannot pool, torch pools.
    """
    wire = dtype_of(anchor.input)
    assert wire is not None
    followed = _follow(anchor.input, shapes, wire, beside=False)
    if followed is None:
        followed = _follow(anchor.input, shapes, wire, beside=True)
    if followed is None:
        return Reject(Reason.NO_COMPUTE, "no embedding bags feed it")
    parts, layout = followed
    bags = {part: bag for part in parts if (bag := read_pooled(part)) is not None}
    if outside_reader(anchor, parts) is not None:
        bags = {}
    return Sent(tuple(parts), _pooled_by_the_op(parts, bags, wire), layout, wire)


def _pooled_by_the_op(
    parts: Sequence[fx.Node], bags: dict[fx.Node, Bag], wire: torch.dtype
) -> dict[fx.Node, Bag]:
    """The largest set of bags that one op pools while it takes the rows of the other parts."""
    groups: dict[tuple[object, ...], dict[fx.Node, Bag]] = {}
    for part, bag in bags.items():
        groups.setdefault(bag.shared, {})[part] = bag

    def can_pool(group: dict[fx.Node, Bag]) -> bool:
        first, alike = next(iter(group.values())), list(group.values())
        if check_bags(alike, wire) is not None:
            return False
        if first.indices.meta["val"].is_cuda and not gpus_pool(alike):
            return False
        rest = [part for part in parts if part not in group]
        if not rest:
            return True
        # A row is a bag of one index, which must be no padding, and its dtype that of the tables.
        dtype = dtype_of(first.weight)
        keeps_bits = dtype == wire or all(dtype_of(part) == dtype for part in rest)
        return keeps_bits and first.padding_idx < 0 and first.per_sample_weights is None

    return max(filter(can_pool, groups.values()), key=len, default={})


def _follow(
    root: fx.Node, shapes: Shapes, wire: torch.dtype, beside: bool
) -> tuple[list[fx.Node], Layout] | None:
    """The parts that `root` consists of, and its layout relative to `[B, columns]`; None if no bags are among
    them. `beside`: parts may also be other nodes that are joined with pooled rows."""

    def is_part(n: fx.Node) -> bool:
        if read_pooled(n) is not None:
            return True
        if not beside or len(shapes.of(n) or ()) != 2:
            return False
        if any(len(joined(u)) > 1 and has_bag(u) for u in n.users):
            return True
        return not (is_view(n) or is_cast(n)) and reads_table(n)

    def joined(n: fx.Node) -> list[fx.Node]:
        joins = n.target in (aten.cat.default, aten.stack.default)
        return [p for p in n.args[0] if isinstance(p, fx.Node)] if joins else []

    def has_bag(n: fx.Node) -> bool:
        return any(read_pooled(p) is not None or reads_table(p) for p in joined(n))

    def ragged(n: fx.Node) -> bool:
        """Whether `n` concatenates the columns of parts of several widths."""
        if n.target is not aten.cat.default or argument(n, 1, "dim", 0) not in (1, -1):
            return False
        parts = [p for p in joined(n) if is_part(p)]
        widths = {s[1] for p in parts if (s := shapes.of(p)) is not None}
        return len(parts) == len(n.args[0]) and len(widths) > 1

    followed = follow(root, lambda n: is_part(n) or ragged(n), shapes, through=wire)
    if followed is None or followed.layout.fixed:
        return None
    leaves: Sequence[fx.Node] = followed.leaves
    if len(leaves) == 1 and ragged(leaves[0]):
        leaves = leaves[0].args[0]
    return list(leaves), followed.layout


def _rewrite(anchor: Anchor, context: Context, sent: Sent, cut: Cut, emitter: Emitter) -> None:
    shapes, layout = context.shapes, sent.layout
    widths = [shapes.known(p)[-1] for p in sent.parts]
    equal = all(same_size(w, widths[0]) for w in widths)
    tables: Size = len(widths)
    part = cut.rest.shape[0]
    columns: list[Size] = [sum(widths)] * context.world
    if not anchor.even:
        per_part = [exact_quotient(shapes.size(s), part) for s in anchor.output_splits]
        if len(layout.dims) != 1 or any(p is None for p in per_part):
            raise CannotEmit("uneven parts that are no flat runs of bags")
        columns = [p for p in per_part if p is not None]
    source, batch = (cut.digit,), cut.rest.dims[0]
    table, column = merge([Digit(-1, 1, tables)]), merge([Digit(1, 1, widths[0])])
    if not equal:
        table, column = (), merge([Digit(1, 1, sum(widths))])
    # Dims from the outermost: s source rank, b bag of a source, t table, d column of a table; c: t and d as
    # one. Keys: orders in which a reader may read. Values: the layout in which the op stores.
    names = {"bst": (batch, source, table), "sbt": (source, batch, table)}
    if _sends_tables_first(layout):
        names["stb"] = (source, table, batch)
    order = "sbt" if not anchor.even else _order_read(anchor, shapes, layout, names, column)
    letters, dims = {
        "bst": ("bsc", (batch, merge((*source, *table, *column)))),
        "sbt": ("sbc", (merge((*source, *batch, *table, *column)),)),
        "stb": ("stbd", (source, table, batch, column)),
    }[order]
    fused = emitter.call(
        torch.ops.autofuse.embedding_bag_all_to_all.default,
        *_pooled(emitter, sent, shapes),
        sent.wire,
        [emitter.size(c) for c in columns],
        *(letters, context.group, context.order, context.site),
    )
    if not anchor.even:
        shape = shapes.known(anchor.node)
        replace_result(emitter, anchor, emitter.reshape(fused, shape))
    else:
        # Layouts relative to the bags; in the result, the source stands in the place of the destination.
        have = Layout(dims)
        for reader in find_readers(anchor, shapes):
            want = compose(reader.layout, layout)
            if want is None:
                raise CannotEmit(f"{reader.view.name} is no view of pooled tables")
            reread(emitter, fused, have, [replace(reader, layout=want)])
        replace_result(emitter, anchor, emitter.rebuild(fused, have, layout, shapes.of(anchor.node)))
    for bag in sent.bags.values():
        replace_extras(emitter, bag)


def _pooled(emitter: Emitter, sent: Sent, shapes: Shapes) -> tuple[object, ...]:
    """The first arguments of the op: tables, indices, offsets, weights and options. In a part that torch
    computes, bag `b` is the row `b`."""
    mode, last, padding = SUM, False, -1
    dtype, of_indices, of_offsets = sent.wire, torch.int64, torch.int64
    for bag in sent.bags.values():
        mode, last, padding = bag.mode, bag.include_last_offset, bag.padding_idx
        of = bag.weight, bag.indices, bag.offsets or bag.indices
        dtype, of_indices, of_offsets = (n.meta["val"].dtype for n in of)
    batch = shapes.known(sent.parts[0])[0]

    @cache
    def numbers(count: Size, dtype: torch.dtype) -> fx.Node:
        """`0, 1, ..., count - 1`"""
        return emitter.cast(emitter.numbers(emitter.size(count), sent.parts[0]), dtype)

    def table(part: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        bag = sent.bags.get(part)
        if bag is not None and bag.offsets is not None:
            return bag.weight, bag.indices, bag.offsets
        if bag is not None:
            return bag.weight, *lookups_of_rows(emitter, bag.indices, numbers(batch, of_offsets), bag.length)
        bounds = numbers(batch + int(last), of_offsets)
        return emitter.cast(part, dtype), numbers(batch, of_indices), bounds

    tables, indices, offsets = map(list, zip(*map(table, sent.parts), strict=True))

    def samples(bag: Bag, given: fx.Node) -> fx.Node:
        return flat(emitter, emitter.cast(given, dtype)) if bag.length else given

    weights = [samples(b, w) for b in sent.bags.values() if (w := b.per_sample_weights) is not None]
    return tables, indices, offsets, weights, mode, last, padding


def _sends_tables_first(layout: Layout) -> bool:
    """Whether the bags of a destination follow each other table by table. All ranks send so, or none: they
    read what they receive in one layout. So they have equally many tables, of equal width."""
    dims = [d.dim for d in layout.digits]
    return -1 in dims and 0 in dims[dims.index(-1) :]


def _order_read(
    anchor: Anchor, shapes: Shapes, layout: Layout, names: dict[str, tuple], column: tuple[Digit, ...]
) -> str:
    """The order of source, table and batch in which the first user of the collective reads, if it is one of
    `names`."""
    readers, _ = find_cast_readers(anchor, shapes)
    for view in (c for r in readers if (c := compose(r.layout, layout)) is not None):
        for name, digits in names.items():
            flat = tuple(d for group in (*digits, column) for d in group)
            refined = common_digits(flat, view.digits) if not view.fixed else None
            if refined is not None and refined[0] == refined[1]:
                return name
    return "sbt"
