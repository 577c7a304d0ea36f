"""all_to_all -> embedding_bag backward: gradients of pooled rows are sent to the ranks that hold the
tables."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import fx

from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import dtype_of
from autofuse.passes.reasons import Reject

from .bags import MAX, SUM, flat, lookups_of_rows
from .embedding_columns import Exchanged, match_columns, sent, without_lookups
from .match import Context, Found, Match, check_dtype, values
from .table_gradients import TableGradient, gradient_from, read_gradient

PATTERN = "all_to_all_embedding_bag_backward"


def match_embedding_backward(anchor: Anchor, context: Context) -> Found:
    found = match_columns(anchor, context, gradient_from, _kind, "embedding bag's backward")
    if isinstance(found, Reject):
        return found
    inputs = [i for g in _gradients(found) for i in (g.indices, g.offsets, g.per_sample_weights)]
    return Match(
        PATTERN,
        found.work,
        context.shapes,
        partial(_rewrite, anchor, context, found),
        (anchor.input, *(n for n in inputs if isinstance(n, fx.Node))),
        arguments=_arguments(anchor, context, found),
        remark=found.remark,
    )


def _gradients(found: Exchanged) -> list[TableGradient]:
    return [g for n in found.nodes if (g := read_gradient(n)) is not None]


def _arguments(anchor: Anchor, context: Context, found: Exchanged) -> AllToAllEmbeddingBagBackward:
    """The arguments of the fused op before the rewrite, which finds out columns and layout."""
    gradients = _gradients(found)
    options = _options(anchor, gradients)
    (grad,) = values([anchor.input])
    return AllToAllEmbeddingBagBackward(
        grad,
        values(g.indices for g in gradients),
        values(g.offsets or g.indices for g in gradients),
        values(g.per_sample_weights for g in gradients if g.per_sample_weights is not None),
        [g.rows for g in gradients],
        [t.width for t in found.tables],
        options.mode,
        options.last,
        options.padding,
        options.dtype,
        [g.sparse for g in gradients],
        [],
        "bsc",
        bool(found.others),
        *context.common,
    )


@dataclass(frozen=True)
class _Options:
    """What the tables of an op have in common."""

    mode: int
    last: bool
    padding: int
    dtype: torch.dtype
    index: torch.dtype
    offset: torch.dtype


def _options(anchor: Anchor, gradients: list[TableGradient]) -> _Options:
    first = next(iter(gradients), None)
    if first is None:
        return _Options(SUM, False, -1, anchor.node.meta["val"].dtype, torch.int64, torch.int64)
    types = (n.meta["val"].dtype for n in (first.node, first.indices, first.offsets or first.indices))
    return _Options(first.mode, first.include_last_offset, first.padding_idx, *types)


def _kind(n: fx.Node) -> Hashable | None:
    g = read_gradient(n)
    if g is None or g.by_frequency or g.mode == MAX:
        return None
    if check_dtype(dtype_of(n)) is not None or (g.sparse and g.indices.meta["val"].is_cuda):
        return None
    types = (dtype_of(a) for a in (n, g.indices, g.offsets or g.indices))
    return g.mode, g.include_last_offset, g.padding_idx, g.per_sample_weights is None, *types


def _rewrite(anchor: Anchor, context: Context, found: Exchanged, emitter: Emitter) -> None:
    grad, columns, layout = sent(anchor, context, found, emitter)
    gradients = [None if t.node is None else read_gradient(t.node) for t in found.tables]
    known = [g for g in gradients if g is not None]
    options = _options(anchor, known)
    of_samples = next((g.per_sample_weights for g in known if g.per_sample_weights is not None), None)

    @cache
    def numbers() -> fx.Node:
        """The number of each bag."""
        return emitter.cast(emitter.numbers(emitter.size(found.layout.shape[0]), grad), options.offset)

    def bags(g: TableGradient | None) -> tuple[fx.Node, fx.Node]:
        if g is None:
            return without_lookups(emitter, found, options.index, options.offset, options.last)
        if g.offsets is not None:
            return g.indices, g.offsets
        return lookups_of_rows(emitter, g.indices, numbers(), g.length)

    def samples(g: TableGradient | None) -> fx.Node | None:
        if g is None or g.per_sample_weights is None:
            return emitter.full([0], 0, of_samples, options.dtype)
        if not g.length:
            return g.per_sample_weights
        return flat(emitter, emitter.cast(g.per_sample_weights, options.dtype))

    indices, offsets = map(list, zip(*map(bags, gradients), strict=True))
    fused = emitter.call(
        torch.ops.autofuse.all_to_all_embedding_bag_backward.default,
        *(grad, indices, offsets),
        [] if of_samples is None else [*map(samples, gradients)],
        [0 if g is None else g.rows for g in gradients],
        [emitter.size(t.width) for t in found.tables],
        *(options.mode, options.last, options.padding, options.dtype),
        [g is not None and g.sparse for g in gradients],
        columns,
        *(layout, bool(found.others), context.group, context.order, context.site),
    )
    if found.others:
        found.reread(emitter, emitter.item(fused, len(gradients)))
    for i, g in enumerate(gradients):
        if g is not None:
            emitter.replace(g.node, emitter.item(fused, i))
