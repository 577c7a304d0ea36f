"""The expert ops on GPUs, as `FusedOp.cuda` calls them: check sizes, choose a way, run it.

`FusedOp.gpu_gap` has found no gap in the arguments. For sizes that the kernels do not have NotImplemented is
returned, and the reference runs. Only arguments decide that are equal on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.choose import way_of
from autofuse.lowering.gpu.dense.ways import CUBLAS_NCCL, DTYPES
from autofuse.lowering.gpu.memory.workspace import current, workspace_of
from autofuse.lowering.ops.all_to_all_expert_matmul import AllToAllExpertMatmul
from autofuse.lowering.ops.expert_matmul_all_to_all import ExpertMatmulAllToAll
from autofuse.lowering.reference.expert_rows import check_capacity

from .dropless import dropless_combine, dropless_dispatch, dropless_problem_of
from .fixed import at_once, combine, dispatch, layouts, of_sum, problem_of
from .measure import measure_experts_once
from .unfused import can_group, combine_unfused, dispatch_unfused
from .ways import COMBINE, DISPATCH, ExpertProblem


def run_combine(args: ExpertMatmulAllToAll) -> Any:
    """expert_matmul_all_to_all; NotImplemented for what is left to the reference."""
    return _run(combine_call(args))


def run_dispatch(args: AllToAllExpertMatmul) -> Any:
    """all_to_all_expert_matmul; NotImplemented for what is left to the reference."""
    return _run(dispatch_call(args))


def _run(call: GpuCall | None) -> Any:
    if call is None:
        return NotImplemented
    with current(call.workspace.device):
        if config.measure and isinstance(call.problem, ExpertProblem):
            measure_experts_once(call.workspace, call.problem)
        capturing = torch.cuda.is_current_stream_capturing()
        way, _ = way_of(call.problem, call.workspace, call.variant, capturing)
        found = None if way == CUBLAS_NCCL else call.run(way)
        if found is None and call.unfused is not None:
            found = call.unfused()
    return NotImplemented if found is None else found


def combine_call(args: ExpertMatmulAllToAll) -> GpuCall | None:
    """One batch of experts as the kernels take it; None for sizes and dtypes that they do not have."""
    x, w, outer, order, site = args.x, args.w, args.outer, args.order, args.site
    if args.input_splits:
        return _dropless_combine_call(args)
    if not all(_usable(xi, w) for xi in x):
        return None
    workspace = workspace_of(args.group_name, x[0])
    a = [xi.contiguous() for xi in x]
    check_capacity(a[0].shape, 1, outer, workspace.world, COMBINE)
    problem = of_sum(problem_of(COMBINE, a[0], w[0], workspace, outer), a, w)
    biases = _biases(args.bias, w)

    def run(way: str) -> list[Tensor] | None:
        out = combine(workspace, way, problem, a, w, biases[0], order, site)
        return None if out is None else [out]

    return GpuCall(workspace, problem, run, (layouts(w), biases[0] is None, order))


def _dropless_combine_call(args: ExpertMatmulAllToAll) -> GpuCall | None:
    """Of rows that fill the send buffer. Nothing but these checks may depend on how many a rank has."""
    x, w, site, group_name = args.x, args.w, args.site, args.group_name
    output_splits, input_splits = args.output_splits, args.input_splits
    if not all(_alike(xi, w) for xi in x) or x[0].shape[0] != sum(input_splits):
        return None
    workspace = workspace_of(group_name, x[0])
    a = [xi.contiguous() for xi in x]
    ends, places = _vector(args.offsets, torch.int32), _vector(args.positions, torch.int64)
    problem = of_sum(dropless_problem_of(COMBINE, a[0], w[0], workspace), a, w)
    biases = _biases(args.bias, w)

    def run(way: str) -> list[Tensor] | None:
        out = dropless_combine(
            workspace, way, problem, a, w, biases[0], ends, places, output_splits, input_splits, site
        )
        return None if out is None else [out]

    def unfused() -> list[Tensor]:
        assert ends is not None
        splits = output_splits, input_splits
        return [combine_unfused(a, w, biases[0], ends, places, *splits, group_name)]

    variant = layouts(w), biases[0] is None
    grouped = ends is not None and can_group(problem)
    return GpuCall(workspace, problem, run, variant, unfused if grouped else None)


def dispatch_call(args: AllToAllExpertMatmul) -> GpuCall | None:
    """Batched experts as the kernels take them; None for sizes and dtypes that they do not have."""
    x, w, outer, keep_exchanged, site = args.x, args.w, args.outer, args.keep_exchanged, args.site
    if args.input_splits:
        return _dropless_dispatch_call(args)
    if not _usable(x, w):
        return None
    workspace = workspace_of(args.group_name, x)
    world, count, rows, k = x.shape
    if (world, count) != (workspace.world, w[0].shape[0]):
        raise ValueError(
            f"{DISPATCH}: expected x [{workspace.world}, {w[0].shape[0]}, rows, K], got {list(x.shape)}"
        )
    check_capacity((count, rows * world, k), 1, outer, world, DISPATCH)
    parts = x.contiguous()
    biases = _biases(args.bias, w)
    count = at_once(w, biases)
    problem = problem_of(DISPATCH, parts, w[0], workspace, outer, count)

    def run(way: str) -> list[Tensor] | None:
        return dispatch(workspace, way, problem, parts, w, biases, keep_exchanged, site)

    variant = w[0].stride(), biases[0] is None, keep_exchanged or len(w) > count
    return GpuCall(workspace, problem, run, variant)


def _dropless_dispatch_call(args: AllToAllExpertMatmul) -> GpuCall | None:
    """Of rows that are all of those that arrive."""
    x, w, site, group_name, keep_exchanged = args.x, args.w, args.site, args.group_name, args.keep_exchanged
    output_splits, input_splits = args.output_splits, args.input_splits
    if not _alike(x, w):
        return None
    if args.positions is not None and args.positions.shape[0] != sum(output_splits):
        return None
    workspace = workspace_of(group_name, x)
    parts, places = x.contiguous(), _vector(args.positions, torch.int64)
    ends = _vector(args.offsets, torch.int32)
    assert ends is not None
    biases = _biases(args.bias, w)
    count = at_once(w, biases)
    problem = dropless_problem_of(DISPATCH, parts, w[0], workspace, count)
    if not all(can_group(dropless_problem_of(DISPATCH, parts, wi, workspace)) for wi in w[count:]):
        return None

    def run(way: str) -> list[Tensor] | None:
        return dropless_dispatch(
            workspace, way, problem, parts, w, biases, ends, places, output_splits, input_splits,
            keep_exchanged, site,
        )  # fmt: skip

    def unfused() -> list[Tensor]:
        splits = output_splits, input_splits
        return dispatch_unfused(parts, w, biases, ends, places, *splits, keep_exchanged, group_name)

    variant = w[0].stride(), biases[0] is None, keep_exchanged or len(w) > count
    return GpuCall(workspace, problem, run, variant, unfused if can_group(problem) else None)


def _vector(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None or (t.dtype is dtype and t.is_contiguous()) else t.to(dtype).contiguous()


def _alike(x: Tensor, w: list[Tensor]) -> bool:
    return x.dtype in DTYPES and all(wi.dtype is x.dtype for wi in w)


def _usable(x: Tensor, w: list[Tensor]) -> bool:
    return _alike(x, w) and 0 not in x.shape


def _biases(bias: list[Tensor], w: list[Tensor]) -> list[Tensor | None]:
    """`[E, N]` or none a weight."""
    count = w[0].shape[0]
    return [b.reshape(count, -1).contiguous() if b.numel() else None for b in bias] or [None] * len(w)
