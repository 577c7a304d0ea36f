"""all_to_all -> updates of tables: gradients of pooled rows are sent to the tables and update them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import dtype_of
from autofuse.passes.graph.functional import arguments, call_on_copies, called, new_bases
from autofuse.passes.graph.paths import depends_on
from autofuse.passes.reasons import Reason, Reject

from .embedding_columns import Exchanged, match_columns, sent
from .match import Context, Found, Match, check_dtype
from .readers import reread

PATTERN = "all_to_all_embedding_bag_update"

Given = dict[str, Any]
"""The arguments of an update by name."""


def match_embedding_update(anchor: Anchor, context: Context) -> Found:
    found = match_columns(anchor, context, _is_update, "update of a table")
    if isinstance(found, Reject):
        return found
    known = [arguments(n) for n in found.nodes]
    updates = [u for u in known if u is not None]
    if len(updates) != len(known):
        return Reject(Reason.UNSUPPORTED_VARIANT, "a table that is updated is a view")
    inputs = [i for u in updates for i in u.values() if isinstance(i, fx.Node) and i is not u["grad"]]
    reject = _check(anchor, context, updates, inputs)
    if reject is not None:
        return reject
    return Match(
        PATTERN,
        found.work,
        context.shapes,
        partial(_rewrite, anchor, context, found, updates),
        (anchor.input, *inputs),
    )


def _is_update(n: fx.Node, grad: fx.Node) -> bool:
    op = torch.ops.autofuse.embedding_bag_update.default
    return called(n) is op and n.target is not op and n.kwargs["grad"] is grad


def _shared(u: Given) -> tuple[object, ...]:
    """Options and dtypes that must be equal for all tables of one op."""
    options = (u["pooling"], u["include_last_offset"], u["padding_idx"])
    types = (dtype_of(u[name]) for name in ("weight", "indices", "offsets"))
    return (*options, u["state"] is None, u["per_sample_weights"] is None, *types)


def _check(anchor: Anchor, context: Context, updates: list[Given], inputs: list[fx.Node]) -> Reject | None:
    if any(_shared(u) != _shared(updates[0]) for u in updates):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the tables differ in rule, mode, options or dtypes")
    if isinstance(context.group, fx.Node):
        return Reject(Reason.UNSUPPORTED_VARIANT, "the group is a value of the graph, and tables are updated")
    changed = _changed(updates)
    if len(set(changed)) != len(changed):
        return Reject(Reason.UNSUPPORTED_VARIANT, "one table is updated twice")
    late = depends_on(anchor, inputs)
    if late is not None:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{late.name} is computed from what is exchanged")
    return check_dtype(dtype_of(updates[0]["weight"]))


def _changed(updates: list[Given]) -> list[fx.Node]:
    return [u[name] for u in updates for name in ("weight", "state") if u[name] is not None]


def _rewrite(
    anchor: Anchor, context: Context, found: Exchanged, updates: list[Given], emitter: Emitter
) -> None:
    grad, columns, layout = sent(anchor, context, found, emitter)

    def each(name: str) -> list[fx.Node]:
        return [u[name] for u in updates if u[name] is not None]

    first = updates[0]
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
            **{name: first[name] for name in ("pooling", "include_last_offset", "padding_idx")},
            "columns": columns,
            "layout": layout,
            "keep_exchanged": bool(found.others),
            "group_name": context.group,
            "order": context.order,
            "site": context.site,
        },
    )
    if found.others:
        reread(emitter, exchanged, found.layout, found.others)
    for n in found.nodes:
        for base, new in new_bases(n).items():
            emitter.replace(new, becomes[base])
