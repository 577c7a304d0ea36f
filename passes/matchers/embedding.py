"""embedding_bag -> all_to_all: pooled rows are stored in the layout that the next op reads.

The index of a pooled element has the digits `b` (bag of one destination), `t` (table) and `d` (column). The
exchange replaces the destination in the batch by the source `s`. The fused op stores in the order of digits
that the users of the collective read, so that their rearrangement becomes a view.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import CannotEmit, Emitter
from autofuse.passes.graph.follow import Shapes, argument, aten, dtype_of, expression, follow, tensor
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
    same_size,
)
from autofuse.passes.graph.paths import outside_reader
from autofuse.passes.reasons import Reason, Reject

from .match import Context, Found, Match, Work, check_dtype, replace_result
from .readers import find_cast_readers, find_readers, reread

PATTERN = "embedding_bag_all_to_all"
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
_MEAN, _MAX = 1, 2


@dataclass(frozen=True)
class Bag:
    """The arguments of one `_embedding_bag`."""

    node: fx.Node
    pooled: fx.Node
    weight: fx.Node
    indices: fx.Node
    offsets: fx.Node
    mode: int
    per_sample_weights: fx.Node | None
    include_last_offset: bool
    padding_idx: int

    @property
    def shared(self) -> tuple[object, ...]:
        """Options and dtypes that must be equal for all tables of one op."""
        return (
            self.mode,
            self.include_last_offset,
            self.padding_idx,
            self.per_sample_weights is None,
            *(dtype_of(n) for n in (self.weight, self.indices, self.offsets)),
        )


def read_bag(pooled: fx.Node) -> Bag | None:
    """The bag whose pooled rows are `pooled`; None if `pooled` is something else."""
    if pooled.target is not operator.getitem or pooled.args[1] != 0:
        return None
    n = pooled.args[0]
    if not isinstance(n, fx.Node) or n.target not in _BAGS:
        return None
    weight, indices, offsets = n.args[:3]
    return Bag(
        n,
        pooled,
        weight,
        indices,
        offsets,
        mode=argument(n, 4, "mode", 0),
        per_sample_weights=argument(n, 6, "per_sample_weights"),
        include_last_offset=bool(argument(n, 7, "include_last_offset", False)),
        padding_idx=argument(n, 8, "padding_idx", -1),
    )


def match_embedding(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    if any(not same_size(expression(s), expression(anchor.input_splits[0])) for s in anchor.input_splits):
        return Reject(Reason.NO_COMPUTE, "what is sent has uneven parts")
    followed = _follow_bags(anchor.input, shapes)
    if isinstance(followed, Reject):
        return followed
    bags, layout, wire = followed
    first = bags[0]
    reject = check_bags(bags, wire)
    if reject is not None:
        return reject
    outside = outside_reader(anchor, [b.pooled for b in bags])
    if outside is not None:
        return Reject(Reason.EXTRA_USERS, f"{outside.name} reads pooled rows before the exchange")
    leading = leading_digit(layout.dims[0], context.world)
    if leading is None:
        return Reject(Reason.LAYOUT, "the batch is not cut into one run of bags a rank")
    pooled_shape = (shapes.of(first.pooled) or (0,))[0]
    cut = cut_out(Layout((merge([Digit(0, 1, pooled_shape)]),)), leading[0])
    if cut is None or cut.outer != 1:
        return Reject(Reason.LAYOUT, "the destination is not the leading digit of the batch")
    columns = [d[-1] for b in bags if (d := shapes.of(b.pooled)) is not None]
    itemsize = first.weight.meta["val"].element_size()
    lookups = shapes.of(first.indices)
    read = sum(c for c in columns) * (lookups[0] if lookups else 0) * itemsize
    inputs = [
        n for b in bags for n in (b.weight, b.indices, b.offsets, b.per_sample_weights) if n is not None
    ]
    return Match(
        PATTERN,
        Work(count=len(bags), bytes_read=read),
        context.shapes,
        partial(_rewrite, anchor, context, bags, layout, cut, wire),
        tuple(inputs),
        not_on_gpus=_not_on_gpus(first, bags),
    )


def _not_on_gpus(first: Bag, bags: list[Bag]) -> str:
    """Why GPU kernels do not take the bags; empty if they do.

    torch's backward on GPUs reads bag sizes that equal those of `_bag_sizes` only without padding in means
    and without a last offset.
    """
    if not _trained(bags):
        return ""
    if first.mode == _MEAN and first.padding_idx >= 0:
        return "a mean with padding is trained"
    return "the offsets of what is trained have an entry too many" if first.include_last_offset else ""


def _trained(bags: list[Bag]) -> list[fx.Node]:
    """The results of the bags, other than the pooled rows, that the backward reads."""
    return [u for b in bags for u in b.node.users if u.args[1] != 0 and u.users]


def _follow_bags(root: fx.Node, shapes: Shapes) -> tuple[list[Bag], Layout, torch.dtype] | Reject:
    """The bags that `root` consists of, its layout relative to `[B, columns]`, and the dtype that is sent.

    Dims of digits: 0 is the batch, 1 the column within a table, -1 the table. With tables of several widths,
    1 is the column over all tables.
    """
    wire = dtype_of(root)
    assert wire is not None

    def ragged(n: fx.Node) -> bool:
        """Whether `n` concatenates the columns of tables of several widths."""
        if n.target is not aten.cat.default or argument(n, 1, "dim", 0) not in (1, -1):
            return False
        parts = [p for p in n.args[0] if isinstance(p, fx.Node) and read_bag(p) is not None]
        widths = {s[1] for p in parts if (s := shapes.of(p)) is not None}
        return len(parts) == len(n.args[0]) and len(widths) > 1

    followed = follow(root, lambda n: read_bag(n) is not None or ragged(n), shapes, through=wire)
    if followed is None or followed.layout.fixed:
        return Reject(Reason.NO_COMPUTE, "no embedding bags feed it")
    leaves: Sequence[fx.Node] = followed.leaves
    if len(leaves) == 1 and ragged(leaves[0]):
        leaves = leaves[0].args[0]
    bags = [b for n in leaves if (b := read_bag(n)) is not None]
    assert len(bags) == len(leaves)
    return bags, followed.layout, wire


def check_bags(bags: list[Bag], wire: torch.dtype) -> Reject | None:
    """Why no fused op pools the bags and sends them in the dtype `wire`; None if one does."""
    first = bags[0]
    if any(b.shared != first.shared for b in bags):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the tables differ in mode, options or dtypes")
    if check_dtype(wire) is not None or check_dtype(dtype_of(first.weight)) is not None:
        return Reject(Reason.DTYPE, f"{dtype_of(first.weight)} tables, {wire} on the wire")
    trained = _trained(bags)
    if first.mode == _MAX and trained:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"max pooling keeps {trained[0].name} for backward")
    return None


def _rewrite(
    anchor: Anchor,
    context: Context,
    bags: list[Bag],
    layout: Layout,
    cut: Cut,
    wire: torch.dtype,
    emitter: Emitter,
) -> None:
    shapes = context.shapes
    first = bags[0]
    widths = [shapes.known(b.pooled)[-1] for b in bags]
    equal = all(same_size(w, widths[0]) for w in widths)
    tables: Size = len(bags)
    part = cut.rest.shape[0]
    columns: list[Size] = [sum(widths)] * context.world
    if not anchor.even:
        per_part = [exact_quotient(expression(s), part) for s in anchor.output_splits]
        if len(layout.dims) != 1 or any(p is None for p in per_part):
            raise CannotEmit("uneven parts that are no flat runs of bags")
        columns = [p for p in per_part if p is not None]
    source, batch = (cut.digit,), cut.rest.dims[0]
    table, column = merge([Digit(-1, 1, tables)]), merge([Digit(1, 1, widths[0])])
    if not equal:
        table, column = (), merge([Digit(1, 1, sum(widths))])
    # Dims from the outermost: s source rank, b bag of a source, t table, d column of a table; c: t and d as
    # one. Keys: orders in which a reader may read. Values: the layout in which the op stores.
    names = {"bst": (batch, source, table), "sbt": (source, batch, table), "stb": (source, table, batch)}
    order = "sbt" if not anchor.even else _order_read(anchor, shapes, layout, names, column)
    letters, dims = {
        "bst": ("bsc", (batch, merge((*source, *table, *column)))),
        "sbt": ("sbc", (merge((*source, *batch, *table, *column)),)),
        "stb": ("stbd", (source, table, batch, column)),
    }[order]
    fused = emitter.call(
        torch.ops.autofuse.embedding_bag_all_to_all.default,
        [b.weight for b in bags],
        [b.indices for b in bags],
        [b.offsets for b in bags],
        [b.per_sample_weights for b in bags if b.per_sample_weights is not None],
        *(first.mode, first.include_last_offset, first.padding_idx, wire),
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
    for bag in bags:
        replace_extras(emitter, bag)


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


def replace_extras(emitter: Emitter, bag: Bag) -> None:
    """Compute the other results of a bag that the backward reads: offset2bag, bag sizes, zeros."""
    for user in list(bag.node.users):
        index = user.args[1]
        if index == 0 or not user.users:
            continue
        if index == 2:
            emitter.replace(user, _bag_sizes(emitter, bag))
        elif same_size(expression(tensor(user).shape[0]), 0):  # type: ignore[union-attr]
            emitter.replace(user, emitter.call(aten.slice.Tensor, bag.offsets, 0, 0, 0))
        elif index == 1:
            emitter.replace(user, _bag_of_lookups(emitter, bag))
        else:
            emitter.replace(user, _full(emitter, bag.offsets, _bag_count(emitter, bag), 0))


def _starts(emitter: Emitter, bag: Bag) -> fx.Node:
    if not bag.include_last_offset:
        return bag.offsets
    return emitter.call(aten.slice.Tensor, bag.offsets, 0, 0, -1)


def _bag_count(emitter: Emitter, bag: Bag) -> int | fx.Node:
    return emitter.size(expression(tensor(_starts(emitter, bag)).shape[0]))  # type: ignore[union-attr]


def _full(emitter: Emitter, like: fx.Node, size: int | fx.Node, fill: int | fx.Node) -> fx.Node:
    """Vector of `size` entries `fill`. Inductor decomposes new_full and zeros_like before this stage."""
    val = tensor(like)
    assert val is not None
    options = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
    return emitter.call(aten.full.default, [size], fill, **options)


def _bag_sizes(emitter: Emitter, bag: Bag) -> fx.Node:
    """The number of lookups of every bag. In a mean, padding is not counted."""
    ends = emitter.call(aten.slice.Tensor, bag.offsets, 0, 1, 2**63 - 1)
    if not bag.include_last_offset:
        lookups = emitter.size(expression(tensor(bag.indices).shape[0]))  # type: ignore[union-attr]
        count = _full(emitter, bag.offsets, 1, lookups)
        ends = emitter.call(aten.cat.default, [ends, count])
    starts = _starts(emitter, bag)
    if bag.mode != _MEAN or bag.padding_idx < 0:
        return emitter.call(aten.sub.Tensor, ends, starts)
    before = _used_before(emitter, bag)
    first, last = (emitter.call(aten.index.Tensor, before, [n]) for n in (starts, ends))
    return _as_offsets(emitter, bag, emitter.call(aten.sub.Tensor, last, first))


def _used_before(emitter: Emitter, bag: Bag) -> fx.Node:
    """Entry `i` of `[n + 1]`: how many of the first `i` lookups are not padding."""
    val = tensor(bag.indices)
    assert val is not None
    used = emitter.call(aten.cumsum.default, emitter.call(aten.ne.Scalar, bag.indices, bag.padding_idx), 0)
    options = {"dtype": torch.int64, "device": val.device, "pin_memory": False}
    return emitter.call(aten.cat.default, [emitter.call(aten.full.default, [1], 0, **options), used])


def _bag_of_lookups(emitter: Emitter, bag: Bag) -> fx.Node:
    """The bag of every lookup: the number of bags that start at or before the lookup, less one."""
    val = tensor(bag.indices)
    assert val is not None
    lookups = emitter.numbers(emitter.size(expression(val.shape[0])), bag.indices)
    started = emitter.call(aten.searchsorted.Tensor, _starts(emitter, bag), lookups, right=True)
    return _as_offsets(emitter, bag, emitter.call(aten.sub.Tensor, started, 1))


def _as_offsets(emitter: Emitter, bag: Bag, node: fx.Node) -> fx.Node:
    """Cast an int64 node to the dtype of the offsets."""
    dtype = dtype_of(bag.offsets)
    if dtype == torch.int64:
        return node
    return emitter.call(torch.ops.prims.convert_element_type.default, node, dtype)
