"""Judges the choice of ways at weights without points, by measured times; needs no GPU.

One weight (K and N over all ranks) is left out at a time, at all numbers of ranks. The constants are fitted
to the points of all other weights, and these points also correct the predictions. The choice is judged at
every point that was left out, by the measured time of the chosen way over the measured time of the best way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autofuse.bench.gpu.measured import DENSE, problem_at, samples_at, weight_of
from autofuse.bench.gpu.table import grid
from autofuse.fit_ways import fit
from autofuse.lowering.gpu.choice import model
from autofuse.lowering.gpu.choice.correction import RANKS, Predictor
from autofuse.lowering.gpu.choice.gpu import Gpu
from autofuse.lowering.gpu.choice.kernel import Problem, replaced, ways_of
from autofuse.lowering.gpu.choice.model import Model
from autofuse.lowering.gpu.choice.points import Point, Points, shipped

Chooser = Callable[[Problem, Mapping[str, float]], str]
"""From a problem, and the measured times of its ways, to one of them; it looks at the names alone."""
Form = Callable[[Gpu, Points], Chooser]
"""A form of model, as it is made of the points that are not left out."""

LEAST_WAYS = 3
"""Points of fewer ways are fitted to, and judged by none: nobody knows which way is the best there."""


@dataclass(frozen=True)
class Judged:
    """A point that was left out. ratio: the measured time of `way`, the chosen one, over that of the best."""

    point: Point
    way: str
    ratio: float


def judge(form: Form, gpu: Gpu, points: Points, ops: Sequence[str] = DENSE) -> list[Judged]:
    """All points of `ops` with enough ways, of this kind of GPU. Those of other kinds correct as they do in a
    choice."""
    found = []
    judged = [p for p in points if p.op in ops and not p.gpu]
    for weight in dict.fromkeys(map(weight_of, judged)):
        asked = [p for p in judged if weight_of(p) == weight and _is_whole(p)]
        if not asked:
            continue
        chooser = form(gpu, tuple(p for p in points if p.op in ops and weight_of(p) != weight))
        for point in asked:
            problem = problem_at(point)
            assert problem is not None
            times = {way: us for way, us in point.times if way in ways_of(problem)}
            way = chooser(problem, times)
            found.append(Judged(point, way, times[way] / min(times.values())))
    return found


def _is_whole(point: Point) -> bool:
    """Whether ways of ours were measured beside those of torch."""
    problem = problem_at(point)
    if problem is None or len(point.times) < LEAST_WAYS:
        return False
    ways = ways_of(problem)
    return sum(ways[way].fused for way, _ in point.times if way in ways) >= LEAST_WAYS - 1


@cache
def _fitted(gpu: Gpu, points: Points, factors: bool) -> Model:
    """The model that is fitted to `points`. Kept, since several forms ask for the same one.

    The search begins at the shipped model, which was fitted to a few points more.
    """
    return fit(gpu, samples_at(gpu, points), factors, near=model.shipped(gpu.name))


def predicted(factors: bool = True, corrected: bool = True) -> Form:
    """Formulas; with a factor for every configuration, and corrected by points, as choice has it."""

    def form(gpu: Gpu, points: Points) -> Chooser:
        predictor = Predictor(_fitted(gpu, points, factors), points if corrected else ())

        def chosen(problem: Problem, times: Mapping[str, float]) -> str:
            return next(each.way for each in predictor.times(problem) if each.way in times)

        return chosen

    return form


def nearest(reach: float) -> Form:
    """The fastest way at the nearest point within so many doublings; else what the op replaces."""

    def form(gpu: Gpu, points: Points) -> Chooser:
        whole = [p for p in points if _is_whole(p)]

        def chosen(problem: Problem, times: Mapping[str, float]) -> str:
            near = sorted(
                ((_apart(p, problem), p) for p in whole if p.op == problem.op), key=lambda item: item[0]
            )
            for distance, point in near:
                here = [way for way, _ in point.times if way in times]
                if distance <= reach and here:
                    return here[0]
            return replaced(problem).name

        return chosen

    return form


def _apart(p: Point, problem: Problem) -> float:
    sizes = zip((p.m, p.k, p.n), (problem.m, problem.k, problem.n), strict=True)
    return sum(abs(math.log2(a / b)) for a, b in sizes) + RANKS * abs(math.log2(p.world / problem.world))


FORMS: Mapping[str, Form] = {
    "nearest point within 2 doublings": nearest(2.0),
    "nearest point": nearest(math.inf),
    "formulas": predicted(factors=False, corrected=False),
    "formulas, factors": predicted(corrected=False),
    "formulas, points": predicted(factors=False),
    "formulas, factors, points": predicted(),
}
"""The last one is what choice does."""


def summary(found: Sequence[Judged]) -> tuple[float, float, float]:
    """Geometric mean, 95th percentile and worst of the ratios."""
    ratios = sorted(each.ratio for each in found)
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    return mean, ratios[math.ceil(0.95 * len(ratios)) - 1], ratios[-1]


def report() -> str:
    """All kinds of GPUs that have shipped constants, as markdown."""
    models = ((kind, model.shipped(kind)) for kind in model.kinds())
    return "\n\n".join(
        f"## {kind}\n\n{_of_kind(found.gpu, shipped(kind))}" for kind, found in models if found is not None
    )


def _of_kind(gpu: Gpu, points: Points) -> str:
    """Every form; of what choice does also ops, and the worst points."""
    rows: list[tuple[str, ...]] = [("form", "points", "geometric mean", "95th percentile", "worst")]
    found: list[Judged] = []
    for name, form in FORMS.items():
        found = judge(form, gpu, points)
        rows.append((name, *_cells(found)))
    return "\n\n".join([grid(rows), grid([*_by_op(found)]), grid([*_worst(found)])])


def _cells(found: Sequence[Judged]) -> tuple[str, ...]:
    return (str(len(found)), *(f"{each:.3f}" for each in summary(found)))


def _by_op(found: Sequence[Judged]) -> Iterator[tuple[str, ...]]:
    yield "op", "ranks", "points", "geometric mean", "95th percentile", "worst"
    for op, world in sorted({(each.point.op, each.point.world) for each in found}):
        yield op, str(world), *_cells([e for e in found if (e.point.op, e.point.world) == (op, world)])


def _worst(found: Sequence[Judged]) -> Iterator[tuple[str, ...]]:
    yield "op", "ranks", "tokens", "K", "N", "chosen", "us", "best", "us", "ratio"
    for each in sorted(found, key=lambda each: -each.ratio)[:8]:
        p = each.point
        best, us = min(p.times, key=lambda item: item[1])
        sizes = (p.op, *map(str, (p.world, p.m, p.k, p.n)))
        yield *sizes, each.way, f"{dict(p.times)[each.way]:.1f}", best, f"{us:.1f}", f"{each.ratio:.2f}"
