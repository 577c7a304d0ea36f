"""all_to_all -> embedding_bag backward: gradients of pooled rows are sent to the ranks that hold the
tables."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import argument, aten, dtype_of
from autofuse.passes.reasons import Reason, Reject

from .embedding_columns import Exchanged, has_last_offset, match_columns, sent
from .match import Context, Found, Match, values
from .readers import reread

PATTERN = "all_to_all_embedding_bag_backward"


def match_embedding_backward(anchor: Anchor, context: Context) -> Found:
    found = match_columns(anchor, context, _is_backward, "embedding bag's backward")
    if isinstance(found, Reject):
        return found
    reject = _check(found.nodes)
    if reject is not None:
        return reject
    inputs = [i for n in found.nodes for i in (*n.args[1:3], argument(n, 10, "per_sample_weights"))]
    dtype = dtype_of(found.nodes[0])
    assert dtype is not None
    return Match(
        PATTERN,
        found.work,
        context.shapes,
        partial(_rewrite, anchor, context, found, dtype),
        (anchor.input, *(n for n in inputs if isinstance(n, fx.Node))),
        arguments=_arguments(anchor, context, found, dtype),
    )


def _arguments(
    anchor: Anchor, context: Context, found: Exchanged, dtype: torch.dtype
) -> AllToAllEmbeddingBagBackward:
    """The arguments of the fused op before the rewrite, which finds out columns and layout."""
    nodes, first = found.nodes, found.nodes[0]
    (grad,) = values([anchor.input])
    return AllToAllEmbeddingBagBackward(
        grad,
        values(n.args[1] for n in nodes),
        values(n.args[2] for n in nodes),
        values(w for n in nodes if (w := argument(n, 10, "per_sample_weights")) is not None),
        [n.args[6] for n in nodes],
        [t.width for t in found.tables],
        argument(first, 8, "mode"),
        has_last_offset(first.args[0], first.args[2]),
        argument(first, 11, "padding_idx", -1),
        dtype,
        [_is_sparse(n) for n in nodes],
        [],
        "bsc",
        bool(found.others),
        *context.common,
    )


def _is_backward(n: fx.Node, grad: fx.Node) -> bool:
    return n.target is aten._embedding_bag_backward.default and n.args[0] is grad


def _is_sparse(n: fx.Node) -> bool:
    return bool(argument(n, 9, "sparse"))


def _shared(n: fx.Node) -> tuple[object, ...]:
    """Options and dtypes that must be equal for all tables of one op."""
    weights = argument(n, 10, "per_sample_weights")
    return (
        argument(n, 8, "mode"),
        argument(n, 11, "padding_idx", -1),
        weights is None,
        *(dtype_of(n.args[i]) for i in (1, 2)),
    )


def _check(nodes: list[fx.Node]) -> Reject | None:
    for n in nodes:
        if argument(n, 7, "scale_grad_by_freq"):
            return Reject(Reason.UNSUPPORTED_VARIANT, f"{n.name} makes frequency-scaled gradients")
        if argument(n, 8, "mode") == 2:
            return Reject(Reason.UNSUPPORTED_VARIANT, f"{n.name} is of max pooling")
    if any(_shared(n) != _shared(nodes[0]) for n in nodes):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the tables differ in mode, options or dtypes")
    return None


def _rewrite(
    anchor: Anchor, context: Context, found: Exchanged, dtype: torch.dtype, emitter: Emitter
) -> None:
    grad, columns, layout = sent(anchor, context, found, emitter)
    nodes, first = found.nodes, found.nodes[0]
    weights = [w for n in nodes if isinstance(w := argument(n, 10, "per_sample_weights"), fx.Node)]
    last = has_last_offset(first.args[0], first.args[2])
    fused = emitter.call(
        torch.ops.autofuse.all_to_all_embedding_bag_backward.default,
        grad,
        [n.args[1] for n in nodes],
        [n.args[2] for n in nodes],
        weights,
        [n.args[6] for n in nodes],
        [emitter.size(t.width) for t in found.tables],
        *(argument(first, 8, "mode"), last, argument(first, 11, "padding_idx", -1), dtype),
        [_is_sparse(n) for n in nodes],
        columns,
        *(layout, bool(found.others), context.group, context.order, context.site),
    )
    if found.others:
        reread(emitter, emitter.item(fused, len(nodes)), found.layout, found.others)
    for i, n in enumerate(nodes):
        emitter.replace(n, emitter.item(fused, i))
