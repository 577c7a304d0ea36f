"""The dense ops on GPUs, as `FusedOp.cuda` calls them: check, choose a way, run it.

What they do not have returns NotImplemented, and the reference runs. Of arguments only such decide that are
equal on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofuse import config

from .choice import way_of
from .dense import gather, problem_of, reduce
from .measure import measure_once
from .workspace import GpuWorkspace, workspace_for


def _usable(group_name: str, x: Tensor) -> GpuWorkspace | None:
    if x.dtype not in (torch.bfloat16, torch.float16) or 0 in x.shape:
        return None
    with torch.cuda.device(x.device):
        return workspace_for(group_name, x.device)


def run_reduce(
    op: str,
    x: list[Tensor],
    w: list[Tensor],
    product: str,
    reduce_op: str,
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    """matmul_all_reduce and matmul_reduce_scatter of one matmul, without an epilogue."""
    if len(x) != 1 or product != "mm" or keep_product:
        return NotImplemented
    workspace = _usable(group_name, x[0])
    if workspace is None:
        return NotImplemented
    # Kernels are launched on the current device, which need not be that of the operands.
    with torch.cuda.device(workspace.device):
        a, b = x[0].contiguous(), w[0]
        problem = problem_of(op, a, b, workspace, dim, outer)
        if config.measure:
            measure_once(workspace, problem)
        way = way_of(problem, workspace, (b.stride(), reduce_op, order))
        return [reduce(workspace, way, problem, a, b, reduce_op == "avg", order, site)]


def run_gather(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    dim: int,
    outer: int,
    keep_gathered: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    """all_gather_matmul of rows, with a bias [N] or none a weight."""
    biases = [b if b.numel() else None for b in bias] or [None] * len(w)
    if dim != 0 or any(b is not None and b.shape != (wi.shape[1],) for b, wi in zip(biases, w, strict=True)):
        return NotImplemented
    workspace = _usable(group_name, x)
    if workspace is None:
        return NotImplemented
    with torch.cuda.device(workspace.device):
        part = x.contiguous()
        problem = problem_of("all_gather_matmul", part, w[0], workspace, dim, outer)
        if config.measure:
            measure_once(workspace, problem)
        variant = w[0].stride(), keep_gathered or len(w) > 1, biases[0] is None
        way = way_of(problem, workspace, variant)
        return gather(workspace, way, problem, part, w, biases, keep_gathered, site)
