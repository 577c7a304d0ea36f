"""Measures the ways to run a problem, on the GPUs of all ranks of a group together."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements

from .choose import keep, points_of, predictor_for
from .kernel import Problem, Way, fused_ways, ways_of
from .points import Point
from .timer import Call, slowest, time_all, together
from .timing import QUICK, Effort, calls_for, captured, matmul_us

log = logging.getLogger(__name__)

Trials: TypeAlias = Callable[[GpuWorkspace, Any], Mapping[str, Call]]
"""Returns the calls of a problem by the name of the way, on random operands or on those of a call."""

WORTH = 1.5
"""A way that is predicted to take more than `WORTH` times the time of the fastest is measured on demand only,
unless no constants were fitted to it."""


@dataclass
class _Done:
    """What a group has measured in this process, the same on all its ranks."""

    seconds: float = 0.0
    problems: set[Problem] = field(default_factory=set)
    """The problems that were measured, and those that could not be."""


_done: WeakKeyDictionary[GpuWorkspace, _Done] = WeakKeyDictionary()
agreements.append(_done)


def measure(workspace: GpuWorkspace, problem: Problem, trials: Trials, worth: bool = False) -> Point:
    """Microseconds of every way, as `time_ways` has them; with `worth` of those that may be the fastest, and
    of torch's. All ranks call it together."""
    calls = together(lambda: trials(workspace, problem), workspace.group)
    names = _worth(workspace, problem) if worth else calls.keys()
    return _measured(workspace, problem, {name: call for name, call in calls.items() if name in names})


def measure_once(
    workspace: GpuWorkspace, problem: Problem, trials: Trials, changed: Sequence[Tensor] = (),
    told: Callable[[], Problem] | None = None,
) -> None:  # fmt: skip
    """Measures a problem, rounded, unless that was done, and keeps the result. Does nothing while a graph is
    captured.

    All ranks decide alike whether to measure: they have the points of rank 0, and they count the same time
    against `config.measure_s`. A problem that could not be measured is not tried again. changed: tensors that
    the calls change in place; afterwards they have their old values. told: as of a `GpuCall`; such a problem
    is measured at one size alone.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    rounded, done = problem.rounded(), _done.setdefault(workspace, _Done())
    if rounded is None or rounded in done.problems or done.seconds >= config.measure_s:
        return
    done.problems.add(rounded)
    if not fused_ways(rounded) or any(
        point.is_fresh(rounded if told is None else _with_rows(rounded, point.m))
        for point in points_of(workspace)
    ):
        return
    begin = time.monotonic()
    names = _worth(workspace, rounded)
    try:
        calls, saved = together(
            lambda: (trials(workspace, rounded), [t.clone() for t in changed]), workspace.group
        )
    except RuntimeError as failure:
        log.warning("%s is not measured: %s", problem.op, failure)
        return
    try:
        point = _measured(workspace, rounded, {name: call for name, call in calls.items() if name in names})
    finally:
        with torch.no_grad():
            for t, before in zip(changed, saved, strict=True):
                t.copy_(before)
    if told is not None:
        point = replace(point, m=told().m)
    if point.times:
        _keep(workspace, point)
    lasted = slowest(time.monotonic() - begin, workspace.group)
    done.seconds += lasted
    if workspace.rank == 0:
        print(_progress(point, len(names), lasted, done.seconds), file=sys.stderr)


def _with_rows(problem: Problem, m: int) -> Problem:
    """The same problem with another m."""
    return problem.at(problem.op, m, problem.k, problem.n, problem.world)


def _keep(workspace: GpuWorkspace, point: Point) -> None:
    """Keeps the point on all ranks, and lets rank 0 write it to the user's file. If writing fails, the point
    counts in this process all the same."""
    try:
        keep(workspace, point)
    except (OSError, ValueError) as failure:
        log.warning("what was measured is not written: %s", failure)


def _worth(workspace: GpuWorkspace, problem: Problem) -> set[str]:
    """The ways that may be the fastest, and those of torch."""
    predictor, ways = predictor_for(workspace), ways_of(problem)
    found, fitted = predictor.times(problem), predictor.model.constants
    most = found[0].us * WORTH if problem.is_whole else float("inf")

    def is_worth(way: Way, us: float) -> bool:
        unknown = any(work.model not in fitted for work in way.work(problem))
        return us <= most or unknown or not way.fused

    return {each.way for each in found if is_worth(ways[each.way], each.us)}


def _progress(point: Point, count: int, lasted: float, spent: float) -> str:
    best = ", ".join(f"{way} {us:.1f} us" for way, us in point.times[:1]) or "none could be captured"
    sizes = " ".join(f"{name}={size}" for name, size in zip("mkn", point.sizes, strict=False))
    return (
        f"autofuse measured {count} ways of {point.op} {sizes} in {lasted:.1f} s: {best} "
        f"({spent:.0f} of {config.measure_s:.0f} s)"
    )


def _measured(workspace: GpuWorkspace, problem: Problem, calls: Mapping[str, Call]) -> Point:
    return Point.of(problem, time_ways(workspace, calls, matmul_us(problem.m, problem.k, problem.n)))


def time_ways(workspace: GpuWorkspace, calls: Mapping[str, Call], roughly_us: float) -> dict[str, float]:
    """Microseconds of ways, on the slowest rank, replayed from CUDA graphs. All ranks call it together.

    A way that fails on a rank, as without memory, or that cannot be captured, is left out on all ranks.
    """
    timings = time_all(calls, calls_for(roughly_us), QUICK, finals=Effort(), group=workspace.group)
    workspace.check()
    times = captured(timings)
    for way, timing in timings.items():
        if way not in times:
            log.warning("%s is not measured: %s", way, timing.failed or "it cannot be captured")
    return times
