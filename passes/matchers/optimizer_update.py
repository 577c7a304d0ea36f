"""all_reduce -> update of a parameter and its states, as an optimizer written in tensor ops has it."""

from __future__ import annotations

from functools import partial

import torch

from autofuse.lowering.update_rules import RULES
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import tensor
from autofuse.passes.graph.functional import call_on_copies
from autofuse.passes.reasons import Reason, Reject

from .match import Context, Found, Match, Work, replace_result
from .update_rule import Update, changed, check_update, find_update, numbers_of, updated_by_views

PATTERN = "all_reduce_update"


def match_update(anchor: Anchor, context: Context) -> Found:
    becomes = changed(anchor)
    by_views = [] if becomes else updated_by_views(anchor)
    if by_views:
        names = ", ".join(node.name for node in by_views[:2]) + (", ..." if len(by_views) > 2 else "")
        why = f"{names} are updated by views of what is reduced: one buffer of several tensors"
        return Reject(Reason.UNSUPPORTED_VARIANT, why)
    if not becomes:
        return Reject(Reason.NO_COMPUTE, "no tensor is updated by what is reduced")
    reject = check_update(anchor, context, becomes)
    if reject is not None:
        return reject
    found = find_update(anchor, becomes)
    if isinstance(found, Reject):
        return found
    inputs = (anchor.input, *found.changed, *found.scalars.values())
    given = tensor(anchor.input)
    assert given is not None
    # Measured: what changes is read and written as fast as bags read half as much. A direction is, too.
    tensors = len(found.changed) + RULES[found.rule].by_norms
    work = Work(bytes_read=tensors * given.numel() * given.element_size())
    return Match(PATTERN, work, context.shapes, partial(_rewrite, anchor, context, found), inputs)


def _rewrite(anchor: Anchor, context: Context, found: Update, emitter: Emitter) -> None:
    like = found.changed
    param, *states = like
    total, becomes = call_on_copies(
        emitter,
        torch.ops.autofuse.all_reduce_update.default,
        {
            "params": [param],
            "states": states,
            "grad": anchor.input,
            "numbers": numbers_of(emitter, found),
            "rule": found.rule,
            "reduce_op": anchor.reduce_op,
            "keep_sum": found.keep,
            "group_name": context.group,
            "order": context.order,
            "site": context.site,
        },
    )
    for base, value in found.changed.items():
        emitter.replace(value, becomes[base])
    if found.keep:
        replace_result(emitter, anchor, total)
