"""The expert ops on GPUs, as `FusedOp.cuda` calls them: check, choose a way, run it.

Of arguments only such decide that are equal on all ranks. What is left out returns NotImplemented, and the
reference runs: other dims than the rows, listed experts, sums of terms and epilogues.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.ops.expert_rows import check_capacity

from .choice import way_of
from .dropless import dropless_combine, dropless_dispatch, dropless_problem_of
from .expert_measure import measure_experts_once
from .expert_ways import COMBINE, DISPATCH, ExpertProblem
from .experts import combine, dispatch, problem_of
from .ways import CUBLAS_NCCL, DTYPES
from .workspace import GpuWorkspace, workspace_for


def run_combine(
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
) -> Any:
    """expert_matmul_all_to_all of one batch of experts, whose rows are cut."""
    if experts or len(x) != 1 or product != "mm" or keep_product:
        return NotImplemented
    if input_splits:
        return _combine_dropless(
            x[0], w, bias, offsets, positions, output_splits, input_splits, group_name, site
        )
    if dim != 1 or not _usable(x[0], w):
        return NotImplemented
    device = x[0].device
    with torch.cuda.device(device):
        workspace = workspace_for(group_name, device)
        a = x[0].contiguous()
        check_capacity(a.shape, 1, outer, workspace.world, COMBINE)
        problem = problem_of(COMBINE, a, w[0], workspace, outer)
        biases = _biases(bias, w)
        variant = w[0].stride(), biases[0] is None, order
        way = _way(problem, workspace, variant)
        if way == CUBLAS_NCCL:
            return NotImplemented
        found = combine(workspace, way, problem, a, w[0], biases[0], order, site)
        return NotImplemented if found is None else [found]


def _combine_dropless(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    group_name: str,
    site: str,
) -> Any:
    """Of rows that fill the send buffer. Nothing but these checks may depend on how many a rank has."""
    if not _alike(x, w) or x.shape[0] != sum(input_splits):
        return NotImplemented
    if offsets is None and x.shape[0] % w[0].shape[0]:
        return NotImplemented
    with torch.cuda.device(x.device):
        workspace = workspace_for(group_name, x.device)
        a = x.contiguous()
        problem = dropless_problem_of(COMBINE, a, w[0], workspace)
        biases = _biases(bias, w)
        capturing = torch.cuda.is_current_stream_capturing()
        way, _ = way_of(problem, workspace, (w[0].stride(), biases[0] is None), capturing)
        if way == CUBLAS_NCCL:
            return NotImplemented
        found = dropless_combine(
            workspace, way, problem, a, w[0], biases[0], _vector(offsets, torch.int32),
            _vector(positions, torch.int64), output_splits, input_splits, site,
        )  # fmt: skip
        return NotImplemented if found is None else [found]


def run_dispatch(
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
) -> Any:
    """all_to_all_expert_matmul of batched experts with fixed capacity, whose rows are cut."""
    if input_splits and not experts:
        return _dispatch_dropless(
            x, w, bias, offsets, positions, output_splits, input_splits, keep_exchanged, group_name, site
        )
    if experts or dim != 1 or not _usable(x, w):
        return NotImplemented
    with torch.cuda.device(x.device):
        workspace = workspace_for(group_name, x.device)
        world, count, rows, k = x.shape
        if (world, count) != (workspace.world, w[0].shape[0]):
            raise ValueError(
                f"{DISPATCH}: expected x [{workspace.world}, {w[0].shape[0]}, rows, K], got {list(x.shape)}"
            )
        check_capacity((count, rows * world, k), 1, outer, world, DISPATCH)
        parts = x.contiguous()
        problem = problem_of(DISPATCH, parts, w[0], workspace, outer)
        biases = _biases(bias, w)
        variant = w[0].stride(), biases[0] is None, keep_exchanged or len(w) > 1
        way = _way(problem, workspace, variant)
        if way == CUBLAS_NCCL:
            return NotImplemented
        found = dispatch(workspace, way, problem, parts, w, biases, keep_exchanged, site)
        return NotImplemented if found is None else found


def _dispatch_dropless(
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
) -> Any:
    """Of rows that are all of those that arrive."""
    biases = _biases(bias, w)
    if not _alike(x, w) or offsets is None or any(b is not None for b in biases[1:]):
        return NotImplemented
    if positions is not None and positions.shape[0] != sum(output_splits):
        return NotImplemented
    with torch.cuda.device(x.device):
        workspace = workspace_for(group_name, x.device)
        parts = x.contiguous()
        problem = dropless_problem_of(DISPATCH, parts, w[0], workspace)
        variant = w[0].stride(), biases[0] is None, keep_exchanged or len(w) > 1
        way, _ = way_of(problem, workspace, variant, torch.cuda.is_current_stream_capturing())
        if way == CUBLAS_NCCL:
            return NotImplemented
        ends, places = offsets.to(torch.int32).contiguous(), _vector(positions, torch.int64)
        found = dropless_dispatch(
            workspace, way, problem, parts, w, biases, ends, places, output_splits, input_splits,
            keep_exchanged, site,
        )  # fmt: skip
        return NotImplemented if found is None else found


def _vector(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype).contiguous()


def _alike(x: Tensor, w: list[Tensor]) -> bool:
    return x.dtype in DTYPES and all(wi.dtype is x.dtype for wi in w)


def _usable(x: Tensor, w: list[Tensor]) -> bool:
    return _alike(x, w) and 0 not in x.shape


def _biases(bias: list[Tensor], w: list[Tensor]) -> list[Tensor | None]:
    """`[E, N]` or none a weight."""
    count = w[0].shape[0]
    return [b.reshape(count, -1).contiguous() if b.numel() else None for b in bias] or [None] * len(w)


def _way(problem: ExpertProblem, workspace: GpuWorkspace, variant: tuple[object, ...]) -> str:
    if config.measure:
        measure_experts_once(workspace, problem)
    return way_of(problem, workspace, variant, torch.cuda.is_current_stream_capturing())[0]
