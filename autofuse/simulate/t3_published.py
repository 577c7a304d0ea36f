"""The numbers in the text of the T3 paper, and the same numbers out of the simulation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from autofuse.lowering.simulate.collectives import ring_reduce_scatter
from autofuse.lowering.simulate.machines import T3
from autofuse.progress import Progress, silent

from .t3 import SubLayer, Times, geomean, matmul_alone, run
from .tables import Row, columns

TRAINING_SHARE, PROMPT_SHARE, NOT_SLICED = 0.34, 0.43, 0.425
"""Parts of the time of a model on 16 GPUs: communication in training and in the prompt phase, and operations
that tensor parallelism does not slice ("40-45 %"). The paper has no other time of the other operations."""
LARGE_SHARES = 0.46, 0.44


@dataclass(frozen=True)
class Split:
    """A matmul and an all_reduce on parts of the 80 CUs, each alone."""

    whole: float
    all_reduce: float
    parts: dict[tuple[int, int], tuple[float, float]]
    """By CUs of the matmul and of the all_reduce: microseconds of both."""

    def gain(self, matmul: float, all_reduce: float) -> float:
        return (self.whole + self.all_reduce) / max(matmul, all_reduce)


def split(times: Times) -> Split:
    """The all_reduce is the reduce_scatter of a kernel a step, and an all_gather by copy engines."""
    case, parts = times.case, {}
    for cus in (8, 16):
        rest = T3.processors - cus
        machine = replace(T3, processors=rest, operations=T3.operations * rest / T3.processors)
        few = ring_reduce_scatter(replace(T3, processors=cus), case.world, case.chunk)
        parts[rest, cus] = matmul_alone(case, machine).us, few.us + times.all_gather
    return Split(times.matmul, times.reduce_scatter + times.all_gather, parts)


def run_all(cases: Sequence[SubLayer], progress: Progress = silent) -> list[Times]:
    """The times of all cases, in parallel. FC-1 has the matmul of FC-2, and is not run again."""
    distinct = [case for case in cases if case.name != "FC-1"]
    found: dict[tuple[str, str, int], Times] = {}
    with ProcessPoolExecutor(min(len(distinct), os.cpu_count() or 1)) as pool:
        for times in pool.map(run, distinct):
            case = times.case
            found[case.model, case.name, case.world] = times
            progress(case.label, len(found), len(distinct))
    return [
        replace(found[case.model, "FC-2" if case.name == "FC-1" else case.name, case.world], case=case)
        for case in cases
    ]


def splits(small: Sequence[Times]) -> list[Split]:
    """The four sub-layers of the paper's figure 6."""
    chosen = [t for t in small if t.case.world == 8 and t.case.name in ("OP", "FC-2")]
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as pool:
        return list(pool.map(split, chosen))


def end_to_end(
    times: Sequence[Times], share: float, way: str, prompt: bool, smallest: float = 0.0
) -> list[float]:
    """The speed-up of every model and number of ranks. `share`: the part of communication on 16 GPUs (32, of
    the large models); `smallest`: the part that is not sliced."""
    chosen = [t for t in times if not prompt or t.case.name in ("OP", "FC-2")]
    gains = []
    for model in dict.fromkeys(t.case.model for t in chosen):
        worlds = sorted({t.case.world for t in chosen if t.case.model == model}, reverse=True)
        total = 0.0
        for world in worlds:
            mine = [t for t in chosen if (t.case.model, t.case.world) == (model, world)]
            if not total:
                total = whole = sum(t.reduce_scatter + t.all_gather for t in mine) / share
            else:  # on half of the GPUs all that is sliced takes twice as long
                whole = total + total * (1 - share - smallest)
            saved = sum(t.sequential * (1 - 1 / t.gains[way]) for t in mine)
            gains.append(whole / (whole - saved))
    return gains


def rows(small: Sequence[Times], large: Sequence[Times], cut: Sequence[Split]) -> list[Row]:
    """All numbers."""
    found: list[Row] = []

    def mean(name: str, published: float, values: Iterable[float], role: str = "tested") -> None:
        found.append(Row(name, published, 100 * (geomean(values) - 1), role=role))

    def most(name: str, published: float, values: Iterable[float], role: str = "tested") -> None:
        found.append(Row(name, published, 100 * (max(values) - 1), role=role))

    def gains(way: str, times: Sequence[Times] = small) -> list[float]:
        return [t.gains[way] for t in times]

    mean("ideal overlap, mean", 35, gains("ideal"), "fitted")
    most("ideal overlap, most", 50, gains("ideal"))
    found.append(Row("ideal overlap, T-NLG FC-1 TP16", 50, _one(small, "T-NLG FC-1 TP16", "ideal")))
    found.append(Row("ideal overlap, Mega-GPT-2 OP TP16", 15, _one(small, "Mega-GPT-2 OP TP16", "ideal")))
    near = [t.gains["ideal, sums near memory"] / t.gains["ideal"] for t in small]
    most("sums near memory add to ideal, most", 4, near)
    mean("T3, mean", 20, gains("T3"))
    most("T3, most", 39, gains("T3"))
    mean("T3-MCA, mean", 30, gains("T3-MCA"))
    most("T3-MCA, most", 47, gains("T3-MCA"))
    over = [t.t3 + t.all_gather for t in small]
    ratio = [a / (t.mca + t.all_gather) for a, t in zip(over, small, strict=True)]
    mean("T3-MCA over T3, mean", 13, ratio)
    most("T3-MCA over T3, most", 29, ratio)
    mean("large models, T3-MCA, mean", 29, gains("T3-MCA", large))
    most("large models, T3-MCA, most", 35, gains("T3-MCA", large))
    found += _memory(small)
    found += _cut(cut)
    for phase, share, prompt, wanted in (
        ("training", TRAINING_SHARE, False, (7, 9, 10, 12)),
        ("prompt", PROMPT_SHARE, True, (9, 12, 12, 15)),
    ):
        for i, way in enumerate(("T3", "T3-MCA")):
            values = end_to_end(small, share, way, prompt, NOT_SLICED)
            mean(f"{phase}, {way}, mean", wanted[2 * i], values, "estimated")
            most(f"{phase}, {way}, most", wanted[2 * i + 1], values, "estimated")
    for phase, share, prompt, published in (
        ("training", LARGE_SHARES[0], False, 12),
        ("prompt", LARGE_SHARES[1], True, 14),
    ):
        values = end_to_end(large, share, "T3-MCA", prompt)
        most(f"large models, {phase}, T3-MCA, most", published, values, "estimated")
    return found


def _one(times: Sequence[Times], label: str, way: str) -> float:
    return 100 * (next(t.gains[way] for t in times if t.case.label == label) - 1)


def _memory(small: Sequence[Times]) -> list[Row]:
    """What near-memory sums and the way past the cache save."""
    by_world: dict[str, Callable[[Times], bool]] = {
        "": lambda t: True,
        ", TP8": lambda t: t.case.world == 8,
        ", TP16": lambda t: t.case.world == 16,
    }
    found = []
    for (where, wanted), published in zip(list(by_world.items())[1:], (7, 3), strict=True):
        saved = geomean(t.reduce_scatter / t.reduce_scatter_near for t in small if wanted(t))
        role = "fitted" if published == 7 else "tested"
        found.append(
            Row(f"reduce_scatter with sums near memory{where}", published, 100 * (saved - 1), role=role)
        )
    before_after = [t.accesses("all") for t in small]
    less = [after / before for before, after in before_after]
    found.append(Row("memory accesses saved, mean", 22, 100 * (1 - geomean(less))))
    found.append(Row("memory accesses saved, most", 36, 100 * (1 - min(less))))
    for what, title, unit, numbers in (
        ("sum reads", "reads of the reduce_scatter", "x", (2.4, 2.5, 2.2)),
        ("writes", "writes of both", "%", (10.0, 14.0, 7.0)),
        ("matmul reads", "reads of the matmul", "x", (1.56, 1.2, 2.0)),
    ):
        for (where, wanted), number in zip(by_world.items(), numbers, strict=True):
            factor = geomean(b / a for b, a in (t.accesses(what) for t in small if wanted(t)))
            value = factor if unit == "x" else 100 * (factor - 1)
            found.append(Row(f"{title}, less by{where}", number, value, unit))
    return found


def _cut(cut: Sequence[Split]) -> list[Row]:
    found = []
    for key, published in (((72, 8), (41, None, 1.18)), ((64, 16), (7, 21, 1.49))):
        slower = geomean(s.parts[key][1] / s.all_reduce for s in cut)
        role = "fitted" if key == (72, 8) else "tested"
        name = f"{key[0]}-{key[1]} CUs"
        found.append(Row(f"{name}: all_reduce slower", published[0] or 0, 100 * (slower - 1), role=role))
        if published[1] is not None:
            matmul = geomean(s.parts[key][0] / s.whole for s in cut)
            found.append(Row(f"{name}: matmul slower", published[1], 100 * (matmul - 1)))
        gain = geomean(s.gain(*s.parts[key]) for s in cut)
        found.append(Row(f"{name}: overlap without contention", published[2] or 0, gain, "x"))
    ideal = geomean(s.gain(s.whole, s.all_reduce) for s in cut)
    found.append(Row("all CUs for both: overlap without contention", 1.67, ideal, "x"))
    return found


def by_sub_layer(times: Sequence[Times]) -> str:
    """Microseconds and speed-ups of every sub-layer."""
    table = [["sub-layer", "matmul", "RS", "AG", "T3", "T3-MCA", "ideal %", "T3 %", "T3-MCA %", "threshold"]]
    for t in times:
        gains = [f"{100 * (t.gains[way] - 1):.1f}" for way in ("ideal", "T3", "T3-MCA")]
        us = [f"{us:.0f}" for us in (t.matmul, t.reduce_scatter, t.all_gather, t.t3, t.mca)]
        table.append([t.case.label, *us, *gains, f"{t.threshold:g}"])
    return columns(table)
