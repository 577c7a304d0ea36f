"""all_to_all -> embedding_bag backward: gradients of pooled rows are sent to the ranks that hold the
tables."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import argument, aten, dtype_of
from autofuse.passes.reasons import Reject

from .bags import MAX, SUM
from .embedding_columns import Exchanged, has_last_offset, match_columns, sent, without_lookups
from .match import Context, Found, Match, check_dtype, values

PATTERN = "all_to_all_embedding_bag_backward"


def match_embedding_backward(anchor: Anchor, context: Context) -> Found:
    found = match_columns(anchor, context, _is_backward, _kind, "embedding bag's backward")
    if isinstance(found, Reject):
        return found
    inputs = [i for n in found.nodes for i in (*n.args[1:3], argument(n, 10, "per_sample_weights"))]
    return Match(
        PATTERN,
        found.work,
        context.shapes,
        partial(_rewrite, anchor, context, found),
        (anchor.input, *(n for n in inputs if isinstance(n, fx.Node))),
        arguments=_arguments(anchor, context, found),
        remark=found.remark,
    )


def _arguments(anchor: Anchor, context: Context, found: Exchanged) -> AllToAllEmbeddingBagBackward:
    """The arguments of the fused op before the rewrite, which finds out columns and layout."""
    nodes, options = found.nodes, _options(anchor, found.nodes)
    (grad,) = values([anchor.input])
    return AllToAllEmbeddingBagBackward(
        grad,
        values(n.args[1] for n in nodes),
        values(n.args[2] for n in nodes),
        values(w for n in nodes if (w := argument(n, 10, "per_sample_weights")) is not None),
        [n.args[6] for n in nodes],
        [t.width for t in found.tables],
        options.mode,
        options.last,
        options.padding,
        options.dtype,
        [_is_sparse(n) for n in nodes],
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


def _options(anchor: Anchor, nodes: list[fx.Node]) -> _Options:
    first = next(iter(nodes), None)
    if first is None:
        return _Options(SUM, False, -1, anchor.node.meta["val"].dtype, torch.int64, torch.int64)
    return _Options(
        argument(first, 8, "mode"),
        has_last_offset(first.args[0], first.args[2]),
        argument(first, 11, "padding_idx", -1),
        *(n.meta["val"].dtype for n in (first, *first.args[1:3])),
    )


def _is_backward(n: fx.Node, grad: fx.Node) -> bool:
    return n.target is aten._embedding_bag_backward.default and n.args[0] is grad


def _is_sparse(n: fx.Node) -> bool:
    return bool(argument(n, 9, "sparse"))


def _kind(n: fx.Node) -> Hashable | None:
    weights = argument(n, 10, "per_sample_weights")
    if argument(n, 7, "scale_grad_by_freq") or argument(n, 8, "mode") == MAX:
        return None
    if check_dtype(dtype_of(n)) is not None or (_is_sparse(n) and n.args[1].meta["val"].is_cuda):
        return None
    types = (dtype_of(a) for a in (n, *n.args[1:3]))
    last = has_last_offset(n.args[0], n.args[2])
    return argument(n, 8, "mode"), last, argument(n, 11, "padding_idx", -1), weights is None, *types


def _rewrite(anchor: Anchor, context: Context, found: Exchanged, emitter: Emitter) -> None:
    grad, columns, layout = sent(anchor, context, found, emitter)
    options = _options(anchor, found.nodes)
    nodes = [t.node for t in found.tables]
    of_samples = next((w for n in found.nodes if (w := argument(n, 10, "per_sample_weights"))), None)

    def bags(n: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        if n is None:
            return without_lookups(emitter, found, options.index, options.offset, options.last)
        return n.args[1], n.args[2]

    def samples(n: fx.Node | None) -> fx.Node:
        return emitter.full([0], 0, of_samples) if n is None else argument(n, 10, "per_sample_weights")

    indices, offsets = map(list, zip(*map(bags, nodes), strict=True))
    fused = emitter.call(
        torch.ops.autofuse.all_to_all_embedding_bag_backward.default,
        *(grad, indices, offsets),
        [] if of_samples is None else [*map(samples, nodes)],
        [0 if n is None else n.args[6] for n in nodes],
        [emitter.size(t.width) for t in found.tables],
        *(options.mode, options.last, options.padding, options.dtype),
        [n is not None and _is_sparse(n) for n in nodes],
        columns,
        *(layout, bool(found.others), context.group, context.order, context.site),
    )
    if found.others:
        found.reread(emitter, emitter.item(fused, len(nodes)))
    for i, n in enumerate(nodes):
        if n is not None:
            emitter.replace(n, emitter.item(fused, i))
