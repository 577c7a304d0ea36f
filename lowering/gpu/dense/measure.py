"""Random operands of dense problems, for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from autofuse.lowering.gpu.choice.choose import keep
from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.choice.measure import measure
from autofuse.lowering.gpu.choice.points import Point, own_file
from autofuse.lowering.gpu.choice.timer import Call
from autofuse.lowering.gpu.choice.timing import copies_of
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for

from .plain import run
from .ways import GATHER, DenseProblem


def trials(workspace: GpuWorkspace, problem: DenseProblem) -> Mapping[str, Call]:
    """A call of every way; weights by turns, so that none is found in the L2 cache."""
    device, dtype = workspace.device, problem.dtype
    own = torch.Generator(device)  # the program draws the numbers that it would have drawn
    rows = problem.chunk if problem.op == GATHER else problem.m
    x = torch.randn(rows, problem.k, device=device, dtype=dtype, generator=own)
    weights = [
        torch.randn(problem.k, problem.n, device=device, dtype=dtype, generator=own)
        for _ in range(copies_of(problem.k * problem.n * 2))
    ]

    def call(way: str) -> Call:
        return lambda i: run(workspace, way, problem, x, weights[i % len(weights)], "direct", "measure")

    return {way: call(way) for way in ways_of(problem)}


def tune_problem(
    op: str, m: int, k: int, n: int, dtype: torch.dtype, worth: bool = False
) -> tuple[Point, Path]:
    """Measures `[m, k] @ [k, n]` of every rank of the world; `worth` as `measure` has it.

    Rank 0 adds the point, if anything could be measured, to the user's own file, whose path is returned, too.
    """
    group = torch.distributed.group.WORLD
    assert group is not None
    workspace = workspace_for(group.group_name, torch.device("cuda", torch.cuda.current_device()))
    problem = DenseProblem(op, m, k, n, workspace.world, dtype, workspace.programs)
    point = measure(workspace, problem, trials, worth)
    return point, keep(workspace, point) if point.times else own_file(workspace.device)
