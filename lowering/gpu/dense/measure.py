"""Measures all ways to run a dense call on the GPUs of a group, on all its ranks together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from autofuse.lowering.gpu.choice.choose import Point, keep, points_of
from autofuse.lowering.gpu.choice.timer import Call, time_all
from autofuse.lowering.gpu.choice.timing import QUICK, Effort, calls_for, captured, copies_of, matmul_us
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for

from .run import run
from .ways import Problem, ways

log = logging.getLogger(__name__)


def measure(workspace: GpuWorkspace, problem: Problem) -> Point:
    """Microseconds of every way, as `time_ways` has them. All ranks call it together."""
    device, dtype = workspace.device, problem.dtype
    rows = problem.m // (problem.world if problem.op == "all_gather_matmul" else 1)
    x = torch.randn(rows, problem.k, device=device, dtype=dtype)
    weights = [
        torch.randn(problem.k, problem.n, device=device, dtype=dtype)
        for _ in range(copies_of(problem.k * problem.n * 2))
    ]

    def call(way: str) -> Call:
        return lambda i: run(workspace, way, problem, x, weights[i % len(weights)], "direct", "measure")

    calls = {way: call(way) for way in ways(problem)}
    return Point.of(problem, time_ways(workspace, calls, matmul_us(problem.m, problem.k, problem.n)))


def time_ways(workspace: GpuWorkspace, calls: Mapping[str, Call], roughly_us: float) -> dict[str, float]:
    """Microseconds of ways, on the slowest rank, replayed from CUDA graphs. All ranks call it together.

    A way that fails on a rank, for want of memory say, or that cannot be captured, is left out on all.
    """
    timings = time_all(calls, calls_for(roughly_us), QUICK, finals=Effort(), group=workspace.group)
    workspace.check()
    times = captured(timings)
    for way, timing in timings.items():
        if way not in times:
            log.warning("%s is not measured: %s", way, timing.failed or "it cannot be captured")
    return times


def measure_once(workspace: GpuWorkspace, problem: Problem) -> None:
    """Measures a problem, its tokens rounded up to a power of two, unless that was done; keeps the result.

    Not while a graph is captured, nor for columns or several stretches of rows.
    """
    m = max(problem.world, 1 << (problem.m - 1).bit_length())
    if torch.cuda.is_current_stream_capturing() or problem.dim or problem.outer != 1:
        return
    rounded = replace(problem, m=m, aligned=True)
    if any(p.distance(rounded) == 0 for p in points_of(workspace)):
        return
    keep(workspace, measure(workspace, rounded))


def tune_problem(op: str, m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Point, Path]:
    """Measures `[m, k] @ [k, n]` of every rank of the world.

    Rank 0 adds the point to the user's own table, whose path is returned, too.
    """
    group = torch.distributed.group.WORLD
    assert group is not None
    workspace = workspace_for(group.group_name, torch.device("cuda", torch.cuda.current_device()))
    point = measure(workspace, Problem(op, m, k, n, workspace.world, dtype, workspace.programs))
    return point, keep(workspace, point)
