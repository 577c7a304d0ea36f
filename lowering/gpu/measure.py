"""Measures all ways to run a dense call on the GPUs of a group, on all its ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .choice import Point, keep, points_of
from .dense import run
from .ways import Problem, ways
from .workspace import GpuWorkspace, workspace_for

COLD_BYTES = 192 << 20
"""Weights rotate among so many bytes, so that none is found in the L2 cache."""

WORK_US = 3000.0
"""About how long a timing takes, of which there are `TIMINGS`."""

TIMINGS = 5


def measure(workspace: GpuWorkspace, problem: Problem) -> Point:
    """Microseconds of every way, on the slowest rank, replayed from CUDA graphs. All ranks call it together.

    A way for which a rank has not enough memory is left out on all.
    """
    device, dtype = workspace.device, problem.dtype
    rows = problem.m // (problem.world if problem.op == "all_gather_matmul" else 1)
    x = torch.randn(rows, problem.k, device=device, dtype=dtype)
    count = max(2, -(-COLD_BYTES // (problem.k * problem.n * 2)))
    weights = [torch.randn(problem.k, problem.n, device=device, dtype=dtype) for _ in range(count)]

    def call(way: str) -> Callable[[int], object]:
        return lambda i: run(workspace, way, problem, x, weights[i % count], "direct", "measure")

    times: dict[str, float] = {}
    for way in ways(problem):
        found = _time(workspace, call(way))
        if found is not None:
            times[way] = found
    return Point.of(problem, times)


def _time(workspace: GpuWorkspace, run: Callable[[int], object]) -> float | None:
    seen: list[float] = []
    failed = 0.0
    try:
        for i in range(3):
            run(i)
        torch.cuda.synchronize(workspace.device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(0)
        end.record()
        torch.cuda.synchronize(workspace.device)
        once = start.elapsed_time(end) * 1e3
    except torch.OutOfMemoryError:
        failed, once = 1.0, 0.0
    failed, once = _slowest(workspace, [failed, once])
    if failed:
        return None
    calls = max(2, min(20, int(WORK_US / max(once, 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    graph.replay()
    for _ in range(TIMINGS):
        _slowest(workspace, [0.0])  # all begin together
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(workspace.device)
        seen.append(start.elapsed_time(end) * 1e3 / calls)
    workspace.check()
    return round(_slowest(workspace, [statistics.median(seen)])[0], 2)


def _slowest(workspace: GpuWorkspace, values: list[float]) -> list[float]:
    worst: Tensor = torch.tensor(values, device=workspace.device)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX, group=workspace.group)
    return [float(v) for v in worst.tolist()]


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
