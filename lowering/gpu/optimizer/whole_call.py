"""all_reduce_update on GPUs. The hosts send each other nothing: the graphs of all ranks call it alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.buckets import Buckets
from autofuse.lowering.gpu.choice.calls import Calls, GpuCall, once, run_call
from autofuse.lowering.gpu.choice.kernel import Way
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_of
from autofuse.lowering.gpu.operands import aligned
from autofuse.lowering.ops.all_reduce_update import OP, AllReduceUpdate
from autofuse.lowering.update_rules import RULES

from .call import table_of
from .tables import unit_of
from .whole_tables import rows_of_numbers, whole_words
from .whole_ways import DTYPES, WholeUpdateProblem


def run_whole_update(args: AllReduceUpdate) -> Any:
    """Runs the op. Returns NotImplemented where the reference has to run it."""
    return run_call(whole_update_call(args))


def whole_update_call(args: AllReduceUpdate) -> GpuCall | None:
    """The call for the kernels; None if the reference has to run the op. args: without a gap (`gpu_gap`).

    Only dtypes and sizes decide, so that all ranks decide alike."""
    if not args.grads or any(state.dtype != torch.float32 for state in args.states):
        return None
    dtypes = args.grads[0].dtype, args.params[0].dtype
    if not {*dtypes} <= {*DTYPES}:
        return None
    buckets, workspace = args.buckets, workspace_of(args.group_name, args.grads[0])
    elements = buckets.offsets[-1]
    if not elements or workspace.world == 1:
        return None
    count = sum(-(-n // buckets.bucket) for n in buckets.numels)
    problem = WholeUpdateProblem(
        elements, count, len(args.grads), args.rule, dtypes, workspace.world, workspace.programs
    )

    def run(way: Way) -> tuple[Tensor, Tensor] | None:
        return _run(workspace, problem, buckets, way, args)

    return GpuCall(
        OP, args, workspace, problem, run, variant=unit_of(buckets), changed=(*args.params, *args.states)
    )


def _run(
    workspace: GpuWorkspace, problem: WholeUpdateProblem, buckets: Buckets, way: Way, args: AllReduceUpdate
) -> tuple[Tensor, Tensor] | None:
    """Makes the update in a kernel; None if it cannot be captured."""
    unit, capturing = unit_of(buckets), torch.cuda.is_current_stream_capturing()
    mean, on_device = args.reduce_op == "avg", _is_there(args.numbers)
    table = table_of(workspace, buckets, capturing)
    variant = problem, unit, mean
    kind = OP, way.name, args.site, *variant, on_device, capturing
    launcher = once(workspace, kind, lambda: Launcher(workspace, way, OP, args.site, problem, variant))
    if table is None or launcher.enter() is None:
        return None
    # Copies of what kernels do not take as it lies; they live until the launch is on its way.
    changed = [*args.params, *args.states]
    taken, grads = [aligned(t) for t in changed], [aligned(g) for g in args.grads]
    count, sums = len(grads), args.room_for_sums()
    values = b"" if on_device else rows_of_numbers(args.numbers)
    words = whole_words(buckets, grads, taken[:count], taken[count:], args.rows, sums, args.keep_sums)
    # One descriptor: during a capture there is one place for descriptors that are not known yet.
    placed, ahead = workspace.descriptors.place(values + words, capturing), len(values) // 8
    rates = args.numbers.float().contiguous() if on_device else placed[:ahead].view(torch.float32)
    try:
        launcher.launch(
            placed[ahead:], table, rates, problem.buckets, problem.dtypes, unit, RULES[args.rule].code, mean
        )
    finally:
        launcher.leave()
    for t, used in zip(changed, taken, strict=True):
        if used is not t:
            t.detach().copy_(used)
    torch.autograd.graph.increment_version(changed)
    return args.numbers.new_empty(0, dtype=torch.float64), sums


def _is_there(numbers: Tensor) -> bool:
    """Whether the kernel can read them: those of a graph that has a rate or a step as a tensor on the GPU."""
    return numbers.is_cuda


CALLS: Calls = {OP: whole_update_call}
