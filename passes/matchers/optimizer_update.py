"""all_reduce -> update of a parameter and its states, as an optimizer written in tensor ops has it."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from autofuse.lowering.buckets import BUCKET
from autofuse.lowering.ops.all_reduce_update import MOST_BUCKETS, AllReduceUpdate
from autofuse.lowering.update_rules import NUMBERS, RULES
from autofuse.passes.choice.cost_model import Step
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import aten, dtype_of, tensor
from autofuse.passes.graph.functional import call_on_copies
from autofuse.passes.reasons import Reject

from .match import Context, Found, Match, Work, replace_result
from .sum_parts import elements, given_to
from .update_group import Group, group_of_updates
from .update_rule import number_of, numbers_of

PATTERN = "all_reduce_update"

TOO_MANY = f"the kernel for GPUs updates up to {MOST_BUCKETS} buckets of {BUCKET} elements"


def match_update(anchor: Anchor, context: Context) -> Found:
    group = group_of_updates(anchor, context)
    if isinstance(group, Reject):
        return group
    takes = tuple(a.node for a in group.anchors[1:])
    apply = partial(_rewrite, context, group)
    work = _work(group)
    assert work.step is not None
    return Match(
        PATTERN, work, context.shapes, apply, group.inputs, takes=takes,
        arguments=_arguments(context, group),
        not_on_gpus=TOO_MANY if work.step.buckets > MOST_BUCKETS else "",
    )  # fmt: skip


def _arguments(context: Context, group: Group) -> AllReduceUpdate:
    """What is known of them; numbers are not, nor are states needed."""
    params = [tensor(next(iter(update.changed))) for update in group.updates]
    grads = [tensor(gradient.input) for gradient in group.gradients]
    known = [[t for t in tensors if t is not None] for tensors in (params, grads)]
    nothing = torch.empty(0, device="meta")
    return AllReduceUpdate(
        known[0], [], known[1], nothing, [], None if group.limits is None else nothing,
        group.updates[0].rule, group.anchors[0].reduce_op or "", [], context.group, context.order,
        context.site,
    )  # fmt: skip


def _work(group: Group) -> Work:
    changed = sent = 0
    for gradient, update in zip(group.gradients, group.updates, strict=True):
        dtype = dtype_of(gradient.input)
        assert dtype is not None
        nbytes = elements(gradient) * dtype.itemsize
        # Measured: what changes is read and written as fast as bags read half as much. A direction is, too,
        # and sums that are kept until their norm is known.
        tensors = len(update.changed) + RULES[update.rule].by_norms + (group.limits is not None)
        changed += tensors * nbytes
        sent += nbytes
    return Work(count=len(group.anchors), bytes_read=changed, sent=sent, step=_step(group))


def _step(group: Group) -> Step:
    """Of tensors of several dtypes, that of the first: kernels for GPUs take none."""
    grad, param = dtype_of(group.gradients[0].input), dtype_of(next(iter(group.updates[0].changed)))
    assert grad is not None
    assert param is not None
    sizes = [elements(gradient) for gradient in group.gradients]
    buckets = sum(-(-size // BUCKET) for size in sizes)
    return Step(group.updates[0].rule, grad, param, sum(sizes), buckets, len(sizes))


def _rewrite(context: Context, group: Group, emitter: Emitter) -> None:
    params = [next(iter(update.changed)) for update in group.updates]
    states = zip(*([*update.changed][1:] for update in group.updates), strict=True)
    rows = list(dict.fromkeys(update.numbers for update in group.updates))
    numbers = [number for row in rows for number in row]
    kept = group.kept
    (squares, sums), becomes = call_on_copies(
        emitter,
        torch.ops.autofuse.all_reduce_update.default,
        {
            "params": params,
            "states": [state for of_tensors in states for state in of_tensors],
            "grads": [given_to(emitter, gradient) for gradient in group.gradients],
            "numbers": emitter.reshape(numbers_of(emitter, numbers, group.scalars), [len(rows), NUMBERS]),
            "rows": [rows.index(update.numbers) for update in group.updates],
            "limits": None if group.limits is None else numbers_of(emitter, group.limits, group.scalars),
            "rule": group.updates[0].rule,
            "reduce_op": group.anchors[0].reduce_op,
            "keep_sums": [any(g.node is a.node for a in kept) for g in group.gradients],
            "group_name": context.group,
            "order": context.order,
            "site": context.site,
        },
    )
    for update in group.updates:
        for base, value in update.changed.items():
            emitter.replace(value, becomes[base])
    at = 0
    for anchor in kept:
        end = at + elements(anchor)
        part = sums if len(kept) == 1 else emitter.call(aten.slice.Tensor, sums, 0, at, end)
        replace_result(emitter, anchor, emitter.reshape(part, emitter.shapes.known(anchor.node)))
        at = end
    if group.squares:
        _replace_squares(emitter, group, squares)


def _replace_squares(emitter: Emitter, group: Group, found: fx.Node) -> None:
    """Sums of squares that the graph has are read from the op, which has one for each member."""
    for node, terms in group.squares.items():
        total: fx.Node | None = None
        for i, by in terms.items():
            one = emitter.call(aten.slice.Tensor, found, 0, i, i + 1)
            if by != 1.0:
                one = emitter.call(aten.mul.Tensor, one, number_of(emitter, by, group.scalars))
            total = one if total is None else emitter.call(aten.add.Tensor, total, one)
        val = tensor(node)
        assert val is not None
        assert total is not None
        total = emitter.call(aten.reshape.default, total, [])
        emitter.replace(node, emitter.cast(total, val.dtype))
