"""Measures all ways to run an expert op on the GPUs of a group, on all its ranks together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.gpu.choice.choose import Point, keep, points_of
from autofuse.lowering.gpu.choice.timer import Call
from autofuse.lowering.gpu.choice.timing import copies_of, matmul_us
from autofuse.lowering.gpu.dense.measure import time_ways
from autofuse.lowering.gpu.dense.ways import CUBLAS_NCCL
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for
from autofuse.lowering.ops import all_to_all_expert_matmul, expert_matmul_all_to_all
from autofuse.lowering.ops.all_to_all_expert_matmul import AllToAllExpertMatmul
from autofuse.lowering.ops.expert_matmul_all_to_all import ExpertMatmulAllToAll

from .fixed import combine, dispatch
from .ways import COMBINE, ExpertProblem, expert_ways


def inputs_of(problem: ExpertProblem, device: torch.device) -> tuple[Tensor, list[list[Tensor]]]:
    """Random: what the op is given, and its weights by turns, so that none is found in the L2 cache."""
    p = problem
    shape = (p.experts, p.rows, p.k)
    if p.op != COMBINE:
        shape = (p.world, p.experts, p.rows // p.world, p.k)  # type: ignore[assignment]
    weights = [
        [torch.randn(p.experts, p.k, p.columns, device=device, dtype=p.dtype) for _ in range(p.weights)]
        for _ in range(copies_of(p.k * p.n * 2))
    ]
    return torch.randn(shape, device=device, dtype=p.dtype), weights


def run(workspace: GpuWorkspace, way: str, problem: ExpertProblem, x: Tensor, w: list[Tensor]) -> Tensor:
    """The first result of a call without a bias, in any way."""
    found: Tensor | None = None
    if way != CUBLAS_NCCL and problem.op == COMBINE:
        found = combine(workspace, way, problem, [x], w, None, "direct", "measure")
    elif way != CUBLAS_NCCL:
        outputs = dispatch(workspace, way, problem, x, w, [None] * len(w), False, "measure")
        found = outputs[0] if outputs else None
    return found if found is not None else unfused(workspace, problem, x, w)


def unfused(workspace: GpuWorkspace, problem: ExpertProblem, x: Tensor, w: list[Tensor]) -> Tensor:
    """What the op replaces."""
    how: tuple[Any, ...] = (
        0,
        None,
        None,
        [],
        [],
        1,
        problem.outer,
        False,
        workspace.group_name,
        "direct",
        "measure",
    )
    if problem.op == COMBINE:
        return expert_matmul_all_to_all.reference(ExpertMatmulAllToAll([x], w, [], [], "mm", *how))[0]
    return all_to_all_expert_matmul.reference(AllToAllExpertMatmul(x, w, [], *how))[0]


def measure_experts(workspace: GpuWorkspace, problem: ExpertProblem) -> Point:
    """Microseconds of every way, as `time_ways` has them. All ranks call it together."""
    x, weights = inputs_of(problem, workspace.device)

    def call(way: str) -> Call:
        return lambda i: run(workspace, way, problem, x, weights[i % len(weights)])

    calls = {way: call(way) for way in expert_ways(problem)}
    return Point.of(problem, time_ways(workspace, calls, matmul_us(problem.m, problem.k, problem.n)))


def measure_experts_once(workspace: GpuWorkspace, problem: ExpertProblem) -> None:
    """Measures a problem, its runs rounded up to a power of two, unless that was done; keeps the result.

    Not while a graph is captured, nor where experts have several runs for a rank.
    """
    if torch.cuda.is_current_stream_capturing() or problem.outer != 1:
        return
    rows = problem.world * (1 << (problem.run - 1).bit_length())
    rounded = replace(problem, rows=rows, aligned=True)
    if any(p.distance(rounded) == 0 for p in points_of(workspace)):
        return
    keep(workspace, measure_experts(workspace, rounded))


def tune_experts(
    op: str, experts: int, rows: int, k: int, n: int, dtype: torch.dtype, save: bool = True
) -> dict[str, float]:
    """Measures `experts` experts a rank, of `rows` rows each. All ranks of the world call it together.

    With `save` calls like this take the fastest way from now on, here and, from rank 0's own table, later.
    """
    group = dist.group.WORLD
    assert group is not None
    workspace = workspace_for(group.group_name, torch.device("cuda", torch.cuda.current_device()))
    problem = ExpertProblem(op, experts, rows, k, n, workspace.world, dtype, workspace.programs)
    point = measure_experts(workspace, problem)
    if save:
        keep(workspace, point)
    return dict(point.times)
