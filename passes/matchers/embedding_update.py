"""all_to_all -> updates of tables: gradients of pooled rows are sent to the tables and update them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import dtype_of
from autofuse.passes.graph.functional import arguments, call_on_copies, called, new_bases
from autofuse.passes.graph.layout import Size
from autofuse.passes.graph.paths import depends_on
from autofuse.passes.reasons import Reason, Reject

from .bags import SUM
from .embedding_columns import Exchanged, match_columns, sent, without_lookups
from .match import Context, Found, Match, check_dtype

PATTERN = "all_to_all_embedding_bag_update"

Given = dict[str, Any]
"""The arguments of an update by name."""

_NOTHING: Given = {
    "pooling": SUM, "include_last_offset": False, "padding_idx": -1, "state": None, "per_sample_weights": None
}  # fmt: skip
"""What updates have in common where an op has none."""


def match_embedding_update(anchor: Anchor, context: Context) -> Found:
    found = match_columns(anchor, context, _updates, partial(_kind, anchor), "update of a table")
    if isinstance(found, Reject):
        return found
    updates = [_given(n) for n in found.nodes]
    inputs = [i for u in updates for i in _inputs(u)]
    reject = _check(context, updates)
    if reject is not None:
        return reject
    return Match(
        PATTERN,
        found.work,
        context.shapes,
        partial(_rewrite, anchor, context, found),
        (anchor.input, *inputs),
        remark=found.remark,
    )


def _given(n: fx.Node) -> Given:
    given = arguments(n)
    assert given is not None  # else the node has no kind
    return given


def _updates(n: fx.Node, grad: fx.Node) -> fx.Node | None:
    op = torch.ops.autofuse.embedding_bag_update.default
    return n if called(n) is op and n.target is not op and n.kwargs["grad"] is grad else None


def _inputs(u: Given) -> list[fx.Node]:
    return [i for i in u.values() if isinstance(i, fx.Node) and i is not u["grad"]]


def _kind(anchor: Anchor, n: fx.Node) -> Hashable | None:
    u = arguments(n)
    if u is None or check_dtype(dtype_of(u["weight"])) is not None:  # a table that is updated is a view
        return None
    if depends_on(anchor, _inputs(u)) is not None:  # the second update of a table
        return None
    options = (u["pooling"], u["include_last_offset"], u["padding_idx"])
    types = (dtype_of(u[name]) for name in ("weight", "indices", "offsets"))
    return (*options, u["state"] is None, u["per_sample_weights"] is None, *types)


def _check(context: Context, updates: list[Given]) -> Reject | None:
    if isinstance(context.group, fx.Node):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the group is a value of the graph, and tables are updated")
    changed = _changed(updates)
    if len(set(changed)) != len(changed):
        return Reject(Reason.UNSUPPORTED_VARIANT, "one table is updated twice")
    return None


def _changed(updates: list[Given]) -> list[fx.Node]:
    return [u[name] for u in updates for name in ("weight", "state") if u[name] is not None]


def _rewrite(anchor: Anchor, context: Context, found: Exchanged, emitter: Emitter) -> None:
    grad, columns, layout = sent(anchor, context, found, emitter)
    known = {n: _given(n) for n in found.nodes}
    common = next(iter(known.values()), _NOTHING)
    updates = [
        _empty(emitter, found, common, t.width) if t.node is None else known[t.node] for t in found.tables
    ]

    def each(name: str) -> list[fx.Node]:
        return [u[name] for u in updates if u[name] is not None]

    (exchanged,), becomes = call_on_copies(
        emitter,
        torch.ops.autofuse.all_to_all_embedding_bag_update.default,
        {
            "weights": each("weight"),
            "states": each("state"),
            "rates": each("rates"),
            "grad": grad,
            "indices": each("indices"),
            "offsets": each("offsets"),
            "per_sample_weights": each("per_sample_weights"),
            **{name: common[name] for name in ("pooling", "include_last_offset", "padding_idx")},
            "columns": columns,
            "layout": layout,
            "keep_exchanged": bool(found.others),
            "group_name": context.group,
            "order": context.order,
            "site": context.site,
        },
    )
    found.reread(emitter, exchanged)
    for n in found.nodes:
        for base, new in new_bases(n).items():
            emitter.replace(new, becomes[base])


def _empty(emitter: Emitter, found: Exchanged, common: Given, width: Size) -> Given:
    """The update of a table without rows."""
    like, weight, samples = emitter.anchor, common.get("weight"), common["per_sample_weights"]
    index, offset = (dtype_of(common[n]) if n in common else torch.int64 for n in ("indices", "offsets"))
    assert index is not None
    assert offset is not None
    indices, offsets = without_lookups(emitter, found, index, offset, common["include_last_offset"])
    return {
        "weight": emitter.full([0, emitter.size(width)], 0, like if weight is None else weight),
        "state": None if common["state"] is None else emitter.full([0], 0, like, torch.float32),
        "rates": emitter.full([2], 0, like, torch.float32),
        "indices": indices,
        "offsets": offsets,
        "per_sample_weights": None if samples is None else emitter.full([0], 0, samples),
    }
