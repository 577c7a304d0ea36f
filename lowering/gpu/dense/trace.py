"""Records the events of all programs of one fused call, with their times."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.gpu.choice.choose import predictor_for
from autofuse.lowering.gpu.choice.correction import Predictor
from autofuse.lowering.gpu.choice.kernel import fused_ways
from autofuse.lowering.gpu.memory.workspace import workspace_for
from autofuse.native_kernels.gpu.memory import EVENTS

from .plain import run
from .ways import GATHER, DenseProblem

WARM_UP = 3

ROWS = 3
"""Most rows of a program."""


def record(op: str, m: int, k: int, n: int, dtype: torch.dtype, order: str) -> Tensor:
    """What every program does in one call on random operands: int64 [rows, EVENTS, 2], see `comm.stamp`.

    A row is a program, or a team of its warps: those of kernels in CUDA C++ do different things at once.

    m, k, n: the matmul of a rank, of a gather with the rows of all. All ranks call it together. ValueError if
    no fused way can run it.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None
    workspace = workspace_for(group.group_name, device)
    problem = DenseProblem(op, m, k, n, workspace.world, dtype, workspace.programs)
    way = _fused_way(problem, predictor_for(workspace))
    x = torch.randn(m // workspace.world if op == GATHER else m, k, device=device, dtype=dtype)
    w = torch.randn(k, n, device=device, dtype=dtype)
    trace = torch.zeros(ROWS * workspace.programs, EVENTS, 2, dtype=torch.int64, device=device)
    for _ in range(WARM_UP):
        run(workspace, way, problem, x, w, order, "trace", trace)
    # Hosts are milliseconds apart. The GPUs meet in a call, and the next one begins on all of them at once.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run(workspace, way, problem, x, w, order, "trace", trace)
        trace.zero_()
        run(workspace, way, problem, x, w, order, "trace", trace)
    graph.replay()
    torch.cuda.synchronize(device)
    workspace.check()
    return trace[trace.any(2).any(1)].cpu()


def _fused_way(problem: DenseProblem, predictor: Predictor) -> str:
    """The fused way that is predicted to be the fastest."""
    ours = fused_ways(problem)
    if not ours:
        raise ValueError(
            f"no fused kernel runs {problem.op} of [{problem.m}, {problem.k}] @ [{problem.k}, {problem.n}] "
            f"on {problem.world} ranks; use bfloat16 or float16, and multiples of 8 for K and N"
        )
    return next(each.way for each in predictor.times(problem) if each.way in ours)
