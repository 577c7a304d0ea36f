"""Measures all ways to run a problem on the GPUs of a group, on all its ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from autofuse.lowering.gpu.memory.workspace import GpuWorkspace

from .choose import keep, points_of
from .kernel import Problem
from .points import Point
from .timer import Call, time_all
from .timing import QUICK, Effort, calls_for, captured, matmul_us

log = logging.getLogger(__name__)

Trials: TypeAlias = Callable[[GpuWorkspace, Any], Mapping[str, Call]]
"""Calls of a problem on random operands, by way."""


def measure(workspace: GpuWorkspace, problem: Problem, trials: Trials) -> Point:
    """Microseconds of every way, as `time_ways` has them. All ranks call it together."""
    roughly_us = matmul_us(problem.m, problem.k, problem.n)
    return Point.of(problem, time_ways(workspace, trials(workspace, problem), roughly_us))


def measure_once(workspace: GpuWorkspace, problem: Problem, trials: Trials) -> None:
    """Measures a problem, rounded, unless that was done; keeps the result. Not while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return
    rounded = problem.rounded()
    if rounded is None or any(p.is_fresh(rounded) for p in points_of(workspace)):
        return
    keep(workspace, measure(workspace, rounded, trials))


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
