"""reduce_update_gather on GPUs: the hosts agree, then a way runs.

Hosts compare through shared memory which tensors have gradients, and all other values that must be equal.
They wait for no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse.lowering import agreement
from autofuse.lowering.buckets import Buckets
from autofuse.lowering.gpu.choice.calls import Calls, GpuCall, once, remember, run_call
from autofuse.lowering.gpu.choice.choose import is_first, times_of
from autofuse.lowering.gpu.choice.kernel import Way, ways_of
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.choice.points import shipped
from autofuse.lowering.gpu.memory.allocation import apart
from autofuse.lowering.gpu.memory.told import values_of_all
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, current, workspace_of
from autofuse.lowering.gpu.operands import aligned
from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather
from autofuse.lowering.reference.update import check, math_dtype, tell, update_by_reference
from autofuse.lowering.update_rules import RULES

from .again import TOLD, Step, step_kind
from .tables import bucket_words, longest_run, rates_of, tensor_words, unit_of
from .ways import DTYPES, OP, Clipping, UpdateProblem, kept_of, kernel_of


@cache
def is_measured(kind: str) -> bool:
    """Whether measured points of the kernel are shipped. If not, no step takes it, and the reference runs."""
    ways = (way for point in shipped("") if point.op.startswith(OP) for way, _ in point.times)
    return any(way.split(" ")[0] == kind for way in ways)


def run_update(args: ReduceUpdateGather) -> Any:
    """Runs the op. Returns NotImplemented where the reference has to run it.

    Raises Disagreement on all ranks if the ranks disagree, as the reference does.
    """
    if not args.params or args.world == 1 or not is_measured(kernel_of(args.rule, args.wants_norm).kind):
        return NotImplemented
    if torch.cuda.is_current_stream_capturing() and not args.numbers.is_cuda:
        return NotImplemented  # replays would go on with the numbers of this update
    call = update_call(args)
    if call is None:
        return update_by_reference(args, agreed=True)
    # What may be captured later must have run before, in a way that can be.
    if args.numbers.is_cuda or is_first(call.problem, call.workspace, call.variant):
        found = call.run(_fastest_kernel(call))
        return call.replaced() if found is None else found
    return run_call(call)


def _fastest_kernel(call: GpuCall) -> Way:
    ways = ways_of(call.problem)
    return next(way for t in times_of(call.problem, call.workspace) if (way := ways[t.name]).fused)


def update_call(args: ReduceUpdateGather) -> GpuCall | None:
    """The call for the kernel, after the ranks have agreed on it; None if the kernel does not support it."""
    workspace, buckets = workspace_of(args.group_name, args.params[0]), args.buckets
    with current(workspace.device):
        capturing = torch.cuda.is_current_stream_capturing()
        told = () if capturing else agree(workspace, args, buckets)
        problem = problem_of(workspace, args, buckets)
        return None if problem is None else call_of(workspace, problem, args, buckets, told)


def agree(workspace: GpuWorkspace, args: ReduceUpdateGather, buckets: Buckets) -> list[int]:
    """Lets the ranks agree on a step, and returns the message of this rank. Raises Disagreement on all ranks
    if they cannot go on; no tensor has changed then."""
    check(args, buckets, math_dtype(args.params))
    codes = [agreement.code(p, g) for p, g in zip(args.params, args.grads, strict=True)]
    mine = tell(args, buckets, codes)
    problem = agreement.problem(OP, values_of_all(workspace, OP, args.site, TOLD, mine), args.names)
    if problem:
        raise agreement.Disagreement(problem)
    return mine


def problem_of(workspace: GpuWorkspace, args: ReduceUpdateGather, buckets: Buckets) -> UpdateProblem | None:
    """The call as the kernel takes it; None if it does not. The same on all ranks, since they agree."""
    grads, params = {g.dtype for g in args.grads if g is not None}, {p.dtype for p in args.params}
    if len(grads) != 1 or len(params) != 1:
        return None
    dtypes = grads.pop(), params.pop()
    if not {*dtypes} <= {*DTYPES}:
        return None
    return UpdateProblem(
        buckets.offsets[-1], longest_run(buckets), args.rule, dtypes, len(args.states), workspace.world,
        workspace.programs, clips=args.wants_norm,
    )  # fmt: skip


def call_of(
    workspace: GpuWorkspace, problem: UpdateProblem, args: ReduceUpdateGather, buckets: Buckets,
    told: Sequence[int],
) -> GpuCall:  # fmt: skip
    """The call in all its ways. told: the message of this rank to the others."""

    def run(way: Way) -> Tensor | None:
        return _run(workspace, problem, buckets, told, way, args)

    return GpuCall(
        OP, args, workspace, problem, run, variant=unit_of(buckets), changed=(*args.params, *args.states),
        unfused=lambda: update_by_reference(args, agreed=True),
    )  # fmt: skip


def _run(
    workspace: GpuWorkspace, problem: UpdateProblem, buckets: Buckets, told: Sequence[int], way: Way,
    args: ReduceUpdateGather,
) -> Tensor | None:  # fmt: skip
    """Makes the step in a kernel; None if it cannot be captured."""
    rule, mean, own = RULES[args.rule], args.reduce_op == "avg", len(RULES[args.rule].states)
    unit, capturing = unit_of(buckets), torch.cuda.is_current_stream_capturing()
    table = table_of(workspace, buckets, capturing)
    sizes = kept_of(way.config, problem, buckets.owned(workspace.rank), len(args.params))
    how = unit, mean, len(args.states), args.numbers.is_cuda
    kind = OP, way.name, args.site, problem, sizes, *how, capturing
    launcher = once(
        workspace, kind, lambda: Launcher(workspace, way, OP, args.site, problem, (problem, unit, sizes))
    )
    if table is None or launcher.enter() is None:
        return None
    params = [aligned(p) for p in args.params]
    grads = [None if g is None else aligned(g) for g in args.grads]
    values, rows = (b"", range(len(params))) if args.numbers.is_cuda else rates_of(args.numbers)
    words = tensor_words(buckets, workspace.rank, grads, params, rows)
    # In one piece: a captured graph has one place for what it writes anew.
    placed, count = workspace.descriptors.place(values + words, capturing), len(values) // 8
    rates = args.numbers.float().contiguous() if not count else placed[:count].view(torch.float32)
    states = [s.detach() for s in args.states]
    result, clipping = torch.empty(0, device=args.device), list[Clipping]()
    if problem.clips:
        result = torch.empty((), device=args.device)
        check = partial(_check, result) if args.error_if_nonfinite else _nothing
        clipping.append(Clipping(result, args.max_norm, check))
    kept = (sizes.new(args.device), sizes) if sizes.words else ()
    try:
        launcher.launch(
            placed[count:], table, rates, states[:own], states[own] if len(states) > own else None,
            problem.longest, problem.dtypes, unit, rule.code, mean, *kept, *clipping,
        )  # fmt: skip
    finally:
        launcher.leave()
    pairs = [*zip(args.params, params, strict=True), *zip(args.grads, grads, strict=True)]
    like = step_kind(args)
    if launcher.is_short and like is not None and all(t is not None and t is used for t, used in pairs):
        long = partial(_run, workspace, problem, buckets, told, way)
        remember(workspace, like, Step(workspace, launcher, args, told, words, rows, table, sizes, long))
    for p, used, g in zip(args.params, params, args.grads, strict=True):
        if g is not None and used is not p:
            p.detach().copy_(used)
    changed = [p for p, g in zip(args.params, args.grads, strict=True) if g is not None]
    torch.autograd.graph.increment_version([*changed, *args.states])
    return result


def _check(norm: Tensor) -> None:
    """Waits for the norm, which is the same on all ranks. RuntimeError if it is not finite."""
    found = float(norm)
    if not math.isfinite(found):
        raise agreement.not_finite(OP, found)


def _nothing() -> None:
    """The check of a step that takes any norm."""


def table_of(workspace: GpuWorkspace, buckets: Buckets, capturing: bool) -> Tensor | None:
    """The words of buckets on the device; None while a graph is captured, if they are not there yet. They are
    kept as long as the group, since graphs read them."""
    known = _tables.setdefault(workspace, {})
    if buckets not in known and not capturing:
        known[buckets] = apart(workspace.device, lambda: bucket_words(buckets).to(workspace.device))
    return known.get(buckets)


_tables: WeakKeyDictionary[GpuWorkspace, dict[Buckets, Tensor]] = WeakKeyDictionary()

CALLS: Calls = {OP: update_call}
