"""`autofuse tune --device cuda`: times the ways of the dense ops, and goes on where it was stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autofuse.cli.gpu_ranks import OPS, extents
from autofuse.lowering.gpu.choice.choose import points_of
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.choice.timer import slowest
from autofuse.lowering.gpu.dense.measure import tune_problem
from autofuse.lowering.gpu.dense.ways import DenseProblem
from autofuse.lowering.gpu.memory.workspace import workspace_for

HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 18432)
MULTIPLES = (1, 3.5, 4)
"""K over all ranks by the hidden size: of the output of attention, and of the second matmul of an MLP."""
LAYERS = tuple(f"{int(hidden * multiple)},{hidden}" for hidden in HIDDEN for multiple in MULTIPLES)
LAYER_OPS = OPS[:3]
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
LAYER_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
SEED = 0


def problems(
    sizes: Sequence[str], tokens: Sequence[int], dtypes: Sequence[str], world: int, ops: Sequence[str] = OPS
) -> list[DenseProblem]:
    """The problems of a rank at layers `K,N`. Numbers of tokens that ranks cannot share out are left out.

    ValueError for a size that `world` does not divide.
    """
    return [
        DenseProblem(op, *extents(op, m, size, world), world, getattr(torch, dtype))
        for op in ops
        for m in tokens
        if op not in ("matmul_reduce_scatter", "all_gather_matmul") or m % world == 0
        for size in sizes
        for dtype in dtypes
    ]


def mixed(found: list[DenseProblem]) -> list[DenseProblem]:
    """In an order in which the first ones are spread over all sizes; the same on all ranks."""
    random.Random(SEED).shuffle(found)
    return found


def tune_ways(
    found: Sequence[DenseProblem], seconds: float, again: bool, worth: bool, told: Callable[[str], None]
) -> str:
    """Measures the problems until `seconds` have passed; all ranks call it together. Returns a summary.

    again: also those whose point says that it was measured with the kernels as they are. worth: only ways
    that may be the fastest, and torch's. Each point is written at once.
    """
    group = dist.group.WORLD
    assert group is not None
    workspace = workspace_for(group.group_name, torch.device("cuda", torch.cuda.current_device()))
    begun, measured = time.monotonic(), 0
    wanted = [each for each in found if again or not _is_known(each, points_of(workspace))]
    for number, problem in enumerate(wanted, 1):
        if slowest(time.monotonic() - begun, group) > seconds:
            break
        point, _ = tune_problem(problem.op, problem.m, problem.k, problem.n, problem.dtype, worth)
        best = ", ".join(f"{us:.1f} us, {way}" for way, us in point.times[:1]) or "not measured"
        sizes = f"m={problem.m} k={problem.k} n={problem.n}"
        told(f"{number}/{len(wanted)}, {time.monotonic() - begun:.0f} s: {problem.op} {sizes}: {best}")
        measured += 1
        torch.cuda.empty_cache()  # sizes differ: what is kept for one is of no use for another
    left = len(wanted) - measured
    known = len(found) - len(wanted)
    return f"{measured} measured, {known} known before, {left} left" + (": run it again" if left else "")


def _is_known(problem: DenseProblem, points: Sequence[Point]) -> bool:
    return any(point.sources and point.is_fresh(problem) for point in points)
