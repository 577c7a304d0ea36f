"""Corrects predictions by measured points: a prediction is multiplied by the factor between measured and
predicted time of the points near it.

The points of one weight (K, N, ranks) are a curve along the tokens: the logarithm of the factor, straight
between neighbours, and level beyond the ends. The correction is the average of the curves of the nearest
weights, and of a factor of 1 for the formula. A curve counts less the farther its weight is away. At a point
the result is the measured time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

from .kernel import Problem, Way, ways_of
from .model import Model, shipped
from .points import Point, Points

FADES = 1.5
"""Doublings of the sizes, in total, over which a point's weight falls to 1 / e."""
DOUBT = 0.1
"""Weight of the prediction itself. The weight of a point is 0.51 at a distance of 1 doubling, 0.13 at 2."""
STALE = 1.0
"""Doublings that are added to the distance of a time that was measured with another source of its kernel, on
another GPU, or under another name of the op (`Problem.measured_as`)."""
RANKS = 2.0
"""A doubling of the ranks counts as so many doublings of the sizes."""
SIBLING = 1.0
"""Doublings that are added to the distance of a weight where only other configurations of the kernel were
measured."""
MOST_WEIGHTS = 8
"""How many of the nearest weights correct a prediction. This bounds the time of a choice."""
_AT = 1e-3
"""A problem counts as measured at a point if their distance is less than this."""

Weight: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Predicted:
    """Predicted microseconds of a way. measured: the time was measured at this very problem, with the present
    sources of the kernels."""

    way: str
    us: float
    measured: bool = False


@dataclass(frozen=True)
class _Time:
    """A measured time of a way. tokens: the logarithm to base 2 of their number."""

    tokens: float
    us: float
    at: Point


@dataclass
class _Curves:
    """The measured times of each way at one op and weight, in the order of tokens."""

    times: dict[str, list[_Time]] = field(default_factory=dict)


class Predictor:
    """The time of every way to run a problem, from a model and measured points."""

    def __init__(self, model: Model, points: Points) -> None:
        self.model, self.points = model, points
        self._curves: dict[str, dict[Weight, _Curves]] = {}
        seen: set[tuple[object, ...]] = set()
        for point in points:
            at = point.op, point.m, point.k, point.n, point.world
            curves = self._curves.setdefault(point.op, {})
            of = curves.setdefault((point.k, point.n, point.world), _Curves())
            for way, us in point.times:
                if (*at, way) not in seen:  # the points of this kind of GPU come first
                    seen.add((*at, way))
                    of.times.setdefault(way, []).append(_Time(math.log2(point.m), us, point))
        for curves in self._curves.values():
            for of in curves.values():
                for times in of.times.values():
                    times.sort(key=lambda time: time.tokens)
        self.times = lru_cache(maxsize=4096)(self._times)

    def _times(self, problem: Problem) -> tuple[Predicted, ...]:
        """All ways to run a problem, the fastest first."""
        near = self._near(problem)
        found = [self._predicted(way, problem, near) for way in ways_of(problem).values()]
        return tuple(sorted(found, key=lambda each: (each.us, each.way)))

    def _near(self, problem: Problem) -> Sequence[tuple[float, _Curves]]:
        own = problem.measured_as
        found = [
            (
                _apart(k, problem.k) + _apart(n, problem.n) + RANKS * _apart(world, problem.world)
                + STALE * (op != own),
                of,
            )
            for op, curves in self._curves.items()
            if op == own or problem.is_kin(op)
            for (k, n, world), of in curves.items()
        ]  # fmt: skip
        return sorted(found, key=itemgetter(0))[:MOST_WEIGHTS]

    def _predicted(self, way: Way, problem: Problem, near: Sequence[tuple[float, _Curves]]) -> Predicted:
        tokens = math.log2(problem.m)
        total, weights, measured = 0.0, DOUBT, False
        for apart, curves in near:
            own = curves.times.get(way.name)
            found = (
                self._like(curves, tokens, way, problem)
                if own is None
                else self._along(own, tokens, way, problem)
            )
            if found is None:
                continue
            distance, error = found[0] + apart, found[1]
            measured = measured or distance < _AT
            weight = math.exp(-distance / FADES) / max(distance, _AT)
            total, weights = total + weight * error, weights + weight
            if distance < _AT:  # nothing else counts
                total, weights = error, 1.0
                break
        us = self.model.us(way, problem) * math.exp(total / weights)
        return Predicted(way.name, us, measured)

    def _like(self, curves: _Curves, tokens: float, way: Way, problem: Problem) -> tuple[float, float] | None:
        """The average of `_along` over other configurations of the kernel; None if none was measured."""
        ways = ways_of(problem)
        alike = [
            self._along(times, tokens, ways[name], problem)
            for name, times in curves.times.items()
            if name in ways and way.fused and _family(name) == _family(way.name)
        ]
        if not alike:
            return None
        distances, errors = zip(*alike, strict=True)
        return SIBLING + min(distances), sum(errors) / len(errors)

    def _along(
        self, times: Sequence[_Time], tokens: float, way: Way, problem: Problem
    ) -> tuple[float, float]:
        """The distance to the nearest measured tokens, and the logarithm of measured over predicted time,
        interpolated between the neighbours."""
        above = bisect_left(times, tokens - _AT, key=lambda time: time.tokens)
        if above < len(times) and times[above].tokens <= tokens + _AT:
            low = high = times[above]
        else:
            low, high = times[max(0, above - 1)], times[min(above, len(times) - 1)]
        apart = max(0.0, low.tokens - tokens, tokens - high.tokens)
        part = (tokens - low.tokens) / (high.tokens - low.tokens) if high.tokens > low.tokens else 0.0
        part = min(1.0, max(0.0, part))
        error = (1 - part) * self._error(low, way, problem) + part * self._error(high, way, problem)
        stale = any(time.at.gpu or time.at.is_stale(way) for time in (low, high))
        return apart + STALE * stale, error

    def _error(self, time: _Time, way: Way, problem: Problem) -> float:
        model = shipped(time.at.gpu) if time.at.gpu else self.model
        if model is None:
            return 0.0
        measured = problem.at(time.at.op, *time.at.sizes)
        return math.log(time.us / model.us(way, measured))


def _family(way: str) -> tuple[str, bool]:
    """The kernel of a way, and whether copy engines move its data. Ways with the same two share a formula."""
    return way.split(" ")[0], "copied=1" in way


def _apart(a: int, b: int) -> float:
    """Doublings between two sizes."""
    return abs(math.log2(a / b))
