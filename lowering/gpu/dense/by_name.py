"""Dense calls in a way that is named, for benchmarks: eager, on random or on real operands."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.choose import Point
from autofuse.lowering.gpu.choice.choose import chosen as chosen_way
from autofuse.lowering.gpu.choice.choose import keep as keep_point
from autofuse.lowering.gpu.memory.workspace import workspace_for

from .run import problem_of
from .run import run as run_way
from .ways import Problem, fused, is_copied, ways


def names(
    op: str, m: int, k: int, n: int, dtype: torch.dtype, world: int, unfused: bool = False
) -> list[str]:
    """The fused ways that can run a call of `[m, k] @ [k, n]` on every rank; m rows in all, of a gather too.

    unfused: and what they replace.
    """
    problem = Problem(op, m, k, n, world, dtype, _programs())
    return list(ways(problem)) if unfused else fused(problem)


def alone(m: int, k: int, n: int, dtype: torch.dtype) -> list[str]:
    """Two ways of each kernel to run all_gather_matmul on one rank in which nothing is left but the matmul.

    Copy engines would move the parts, of which there are none.
    """
    found: dict[type, list[str]] = {}
    for name, config in ways(Problem("all_gather_matmul", m, k, n, 1, dtype, _programs())).items():
        if is_copied(config):
            found.setdefault(type(config), []).append(name)
    return [name for of_kernel in found.values() for name in of_kernel[:2]]


def _programs() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def chosen(op: str, m: int, k: int, n: int, dtype: torch.dtype, group_name: str) -> str:
    """What policy `auto` takes. All ranks of the group ask together the first time."""
    workspace = workspace_for(group_name, torch.device("cuda", torch.cuda.current_device()))
    return chosen_way(Problem(op, m, k, n, workspace.world, dtype, workspace.programs), workspace)


def keep(
    op: str, m: int, k: int, n: int, dtype: torch.dtype, group_name: str, times: dict[str, float]
) -> None:
    """Let `auto` decide by these microseconds of ways, here and, on rank 0, in the user's own table."""
    workspace = workspace_for(group_name, torch.device("cuda", torch.cuda.current_device()))
    point = Point.of(Problem(op, m, k, n, workspace.world, dtype), times)
    keep_point(workspace, point)


def run(
    name: str, op: str, x: Tensor, w: Tensor, group_name: str, order: str = "direct", programs: int = 0
) -> Tensor:
    """The op's first result.

    x: [M, K], of a gather this rank's part [M / W, K]; w: [K, N]; programs: how many run at once, 0 for all.
    """
    workspace = workspace_for(group_name, x.device)
    problem = problem_of(op, x, w, workspace)
    if programs:
        problem = replace(problem, programs=programs)
    return run_way(workspace, name, problem, x, w, order, "by name")
