"""The expert ops on GPUs, as `FusedOp.cuda` calls them: check, choose a way, run it.

Of arguments only such decide that are equal on all ranks. What is left out returns NotImplemented, and the
reference runs: other dims than the rows, listed experts, epilogues.
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
from autofuse.lowering.gpu.support import MOST_TERMS
from autofuse.lowering.reference.expert_rows import check_capacity

from .dropless import dropless_combine, dropless_dispatch, dropless_problem_of
from .fixed import at_once, combine, dispatch, layouts, of_sum, problem_of
from .measure import measure_experts_once
from .unfused import can_group, combine_unfused, dispatch_unfused
from .ways import COMBINE, DISPATCH, ExpertProblem


def run_combine(*args: Any) -> Any:
    """expert_matmul_all_to_all, with its arguments."""
    return _run(combine_call(*args))


def run_dispatch(*args: Any) -> Any:
    """all_to_all_expert_matmul, with its arguments."""
    return _run(dispatch_call(*args))


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


def combine_call(
    x: list[Tensor],
    w: list[Tensor],
    bias: list[Tensor],
    operands: list[Tensor],
    product: str,
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> GpuCall | None:
    """One batch of experts, whose rows are cut, as the kernels take it; None for what they do not have."""
    if experts or len(x) > MOST_TERMS or product != "mm" or keep_product:
        return None
    if any(b.numel() for b in bias[1:]):
        return None
    if input_splits:
        return _dropless_combine_call(
            x, w, bias, offsets, positions, output_splits, input_splits, group_name, site
        )
    if dim != 1 or not all(_usable(xi, w) for xi in x):
        return None
    workspace = workspace_of(group_name, x[0])
    a = [xi.contiguous() for xi in x]
    check_capacity(a[0].shape, 1, outer, workspace.world, COMBINE)
    problem = of_sum(problem_of(COMBINE, a[0], w[0], workspace, outer), a, w)
    biases = _biases(bias, w)

    def run(way: str) -> list[Tensor] | None:
        out = combine(workspace, way, problem, a, w, biases[0], order, site)
        return None if out is None else [out]

    return GpuCall(workspace, problem, run, (layouts(w), biases[0] is None, order))


def _dropless_combine_call(
    x: list[Tensor],
    w: list[Tensor],
    bias: list[Tensor],
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    group_name: str,
    site: str,
) -> GpuCall | None:
    """Of rows that fill the send buffer. Nothing but these checks may depend on how many a rank has."""
    rows = x[0].shape[0]
    if not all(_alike(xi, w) for xi in x) or rows != sum(input_splits):
        return None
    if offsets is None and rows % w[0].shape[0]:
        return None
    workspace = workspace_of(group_name, x[0])
    a = [xi.contiguous() for xi in x]
    ends, places = _vector(offsets, torch.int32), _vector(positions, torch.int64)
    problem = of_sum(dropless_problem_of(COMBINE, a[0], w[0], workspace), a, w)
    biases = _biases(bias, w)

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


def dispatch_call(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    dim: int,
    outer: int,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> GpuCall | None:
    """Batched experts, whose rows are cut, as the kernels take them; None for what they do not have."""
    if input_splits and not experts:
        return _dropless_dispatch_call(
            x, w, bias, offsets, positions, output_splits, input_splits, keep_exchanged, group_name, site
        )
    if experts or dim != 1 or not _usable(x, w):
        return None
    workspace = workspace_of(group_name, x)
    world, count, rows, k = x.shape
    if (world, count) != (workspace.world, w[0].shape[0]):
        raise ValueError(
            f"{DISPATCH}: expected x [{workspace.world}, {w[0].shape[0]}, rows, K], got {list(x.shape)}"
        )
    check_capacity((count, rows * world, k), 1, outer, world, DISPATCH)
    parts = x.contiguous()
    biases = _biases(bias, w)
    count = at_once(w, biases)
    problem = problem_of(DISPATCH, parts, w[0], workspace, outer, count)

    def run(way: str) -> list[Tensor] | None:
        return dispatch(workspace, way, problem, parts, w, biases, keep_exchanged, site)

    variant = w[0].stride(), biases[0] is None, keep_exchanged or len(w) > count
    return GpuCall(workspace, problem, run, variant)


def _dropless_dispatch_call(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    keep_exchanged: bool,
    group_name: str,
    site: str,
) -> GpuCall | None:
    """Of rows that are all of those that arrive."""
    if not _alike(x, w) or offsets is None:
        return None
    if positions is not None and positions.shape[0] != sum(output_splits):
        return None
    workspace = workspace_of(group_name, x)
    parts, places = x.contiguous(), _vector(positions, torch.int64)
    ends = _vector(offsets, torch.int32)
    assert ends is not None
    biases = _biases(bias, w)
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
