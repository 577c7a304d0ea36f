"""Embedding bags in a graph: their arguments, and the results that the backward reads besides pooled rows."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import argument, aten, dtype_of, expression, is_cast, is_view, tensor
from autofuse.passes.graph.layout import Size, prod, same_size
from autofuse.passes.reasons import Reason, Reject

from .match import check_dtype

_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
SUM, MEAN, MAX = range(3)
_POOLING_OF = {aten.sum.dim_IntList: SUM, aten.mean.dim: MEAN}
_OF_ROWS = {
    *_POOLING_OF, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor,
    aten.sub.Tensor, aten.neg.default, aten.where.self, aten.masked_fill.Scalar, aten.amax.default,
    aten.relu.default, operator.getitem,
}  # fmt: skip
MOST_STEPS = 8
"""The most ops that lie between rows of a table and what is sent, or between what is received and the
gradient of a table."""


@dataclass(frozen=True)
class Bag:
    """The arguments of one `_embedding_bag`; or rows of an embedding that are pooled as one would pool them.

    length: of rows of an embedding, the number of rows in each bag. There are no offsets, the indices are
    `[bags]` or `[bags, length]`, and weights of samples are like the indices, of any dtype. 0: offsets say
    which of the indices, `[lookups]`, are of a bag.
    """

    node: fx.Node
    pooled: fx.Node
    weight: fx.Node
    indices: fx.Node
    offsets: fx.Node | None
    mode: int
    per_sample_weights: fx.Node | None = None
    include_last_offset: bool = False
    padding_idx: int = -1
    length: Size = 0

    @property
    def extras(self) -> list[fx.Node]:
        """The results, other than the pooled rows, that the backward reads."""
        return [] if self.length else [u for u in self.node.users if u.args[1] != 0 and u.users]

    @property
    def shared(self) -> tuple[object, ...]:
        """Options and dtypes that must be equal for all tables of one op."""
        return (
            self.mode,
            self.include_last_offset,
            self.padding_idx,
            self.per_sample_weights is None,
            *(dtype_of(n) for n in (self.weight, self.indices, self.offsets or self.indices)),
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


def read_pooled(pooled: fx.Node) -> Bag | None:
    """As `read_bag`; also rows `F.embedding(indices, weight)`, `.sum(1)` and `.mean(1)` of them, and
    `(rows * samples.unsqueeze(-1)).sum(1)`."""
    return read_bag(pooled) or _read_rows(pooled)


def _read_rows(pooled: fx.Node) -> Bag | None:
    rows, mode, samples = pooled, SUM, None
    if pooled.target in _POOLING_OF:
        mode = _POOLING_OF[pooled.target]
        rows = pooled.args[0]
        if argument(pooled, 1, "dim") not in ([1], [-2]) or argument(pooled, 2, "keepdim", False):
            return None
        if mode == SUM and len(rows.users) == 1:
            rows, samples = without_samples(rows)
    if not isinstance(rows, fx.Node) or rows.target is not aten.embedding.default:
        return None
    weight, indices = rows.args[:2]
    shape = tensor(indices).shape  # type: ignore[union-attr]
    pools = rows is not pooled
    if len(shape) != 1 + pools or dtype_of(pooled) != dtype_of(weight) or (pools and len(rows.users) > 1):
        return None
    length = expression(shape[1]) if pools else 1
    if same_size(length, 0):
        return None
    return Bag(pooled, pooled, weight, indices, None, mode, samples, length=length)


def without_samples(rows: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """`r: [B, L, D]` and `s: [B, L]` of `r * s.unsqueeze(-1)`; `rows` and None if it is something else."""
    if rows.target is not aten.mul.Tensor:
        return rows, None
    for r, s in (rows.args[:2], rows.args[1::-1]):
        if not (isinstance(r, fx.Node) and isinstance(s, fx.Node)) or s.target is not aten.unsqueeze.default:
            continue
        of_rows, of_samples = (list(tensor(n).shape) for n in (r, s))  # type: ignore[union-attr]
        if s.args[1] in (-1, 2) and len(of_rows) == 3 and of_samples == [*of_rows[:2], 1]:
            return r, s.args[0]
    return rows, None


def lookups_of_rows(
    emitter: Emitter, indices: fx.Node, numbers: fx.Node, length: Size
) -> tuple[fx.Node, fx.Node]:
    """Indices and offsets of bags of `length` rows each. indices: `[bags]` or `[bags, length]`; numbers: 0 to
    `bags - 1`, in the dtype of the offsets."""
    starts = emitter.call(aten.mul.Tensor, numbers, emitter.size(length))
    return flat(emitter, indices), starts


def flat(emitter: Emitter, of_rows: fx.Node) -> fx.Node:
    """`[bags]` or `[bags, length]` as a vector."""
    return emitter.reshape(of_rows, [prod(emitter.shapes.known(of_rows))])


def reads_table(n: fx.Node, left: int = MOST_STEPS) -> bool:
    """Whether rows of a table, or of pooled ones, become `n` by at most `left` ops of one row each."""
    if n.target in (aten.embedding.default, *_BAGS):
        return True
    if left == 0 or not is_of_rows(n):
        return False
    return any(reads_table(source, left - 1) for source in n.all_input_nodes)


def is_of_rows(n: fx.Node) -> bool:
    """Whether the op computes each pooled row from one row, or a few."""
    return n.target in _OF_ROWS or is_cast(n) or is_view(n)


def check_bags(bags: list[Bag], wire: torch.dtype) -> Reject | None:
    """Why no fused op pools the bags and sends them in the dtype `wire`; None if one does."""
    first = bags[0]
    if any(b.shared != first.shared for b in bags):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the tables differ in mode, options or dtypes")
    if check_dtype(wire) is not None or check_dtype(dtype_of(first.weight)) is not None:
        return Reject(Reason.DTYPE, f"{dtype_of(first.weight)} tables, {wire} on the wire")
    kept = trained(bags)
    if first.mode == MAX and kept:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"max pooling keeps {kept[0].name} for backward")
    return None


def trained(bags: list[Bag]) -> list[fx.Node]:
    """The extras of all bags."""
    return [extra for bag in bags for extra in bag.extras]


def gpus_pool(bags: list[Bag]) -> bool:
    """Whether GPU kernels take the bags.

    torch's backward on GPUs reads bag sizes that equal those of `_bag_sizes` only without padding in means
    and without a last offset.
    """
    first = bags[0]
    differs = first.include_last_offset or (first.mode == MEAN and first.padding_idx >= 0)
    return not (differs and trained(bags))


def replace_extras(emitter: Emitter, bag: Bag) -> None:
    """Compute the other results of a bag that the backward reads: offset2bag, bag sizes, zeros."""
    for user in bag.extras:
        index = user.args[1]
        if index == 2:
            emitter.replace(user, _bag_sizes(emitter, bag))
        elif same_size(expression(tensor(user).shape[0]), 0):  # type: ignore[union-attr]
            emitter.replace(user, emitter.call(aten.slice.Tensor, bag.offsets, 0, 0, 0))
        elif index == 1:
            emitter.replace(user, _bag_of_lookups(emitter, bag))
        else:
            emitter.replace(user, emitter.full([_bag_count(emitter, bag)], 0, bag.offsets))


def _starts(emitter: Emitter, bag: Bag) -> fx.Node:
    if not bag.include_last_offset:
        return bag.offsets
    return emitter.call(aten.slice.Tensor, bag.offsets, 0, 0, -1)


def _bag_count(emitter: Emitter, bag: Bag) -> int | fx.Node:
    return emitter.size(expression(tensor(_starts(emitter, bag)).shape[0]))  # type: ignore[union-attr]


def _bag_sizes(emitter: Emitter, bag: Bag) -> fx.Node:
    """The number of lookups of every bag. In a mean, padding is not counted."""
    ends = emitter.call(aten.slice.Tensor, bag.offsets, 0, 1, 2**63 - 1)
    if not bag.include_last_offset:
        lookups = emitter.size(expression(tensor(bag.indices).shape[0]))  # type: ignore[union-attr]
        count = emitter.full([1], lookups, bag.offsets)
        ends = emitter.call(aten.cat.default, [ends, count])
    starts = _starts(emitter, bag)
    if bag.mode != MEAN or bag.padding_idx < 0:
        return emitter.call(aten.sub.Tensor, ends, starts)
    before = _used_before(emitter, bag)
    first, last = (emitter.call(aten.index.Tensor, before, [n]) for n in (starts, ends))
    return emitter.cast(emitter.call(aten.sub.Tensor, last, first), dtype_of(bag.offsets))


def _used_before(emitter: Emitter, bag: Bag) -> fx.Node:
    """Entry `i` of `[n + 1]`: how many of the first `i` lookups are not padding."""
    used = emitter.call(aten.cumsum.default, emitter.call(aten.ne.Scalar, bag.indices, bag.padding_idx), 0)
    return emitter.call(aten.cat.default, [emitter.full([1], 0, bag.indices, torch.int64), used])


def _bag_of_lookups(emitter: Emitter, bag: Bag) -> fx.Node:
    """The bag of every lookup: the number of bags that start at or before the lookup, less one."""
    val = tensor(bag.indices)
    assert val is not None
    lookups = emitter.numbers(emitter.size(expression(val.shape[0])), bag.indices)
    started = emitter.call(aten.searchsorted.Tensor, _starts(emitter, bag), lookups, right=True)
    return emitter.cast(emitter.call(aten.sub.Tensor, started, 1), dtype_of(bag.offsets))
