"""Predictions for every measured cell on H200, and how far off they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median

from autofuse.lowering.simulate.machines import H200, nccl_us
from autofuse.lowering.simulate.problems import alone, on_gpus
from autofuse.progress import Progress, silent

from .h200 import Cell
from .tables import columns

FITTED = ("llama70b.o_proj", "llama70b.down_proj", "mixtral-8x7b even", "mixtral-8x7b zipf", "2048x64")
"""Labels of the shapes that constants were fitted to. All others were held out."""
WORTH_US, WORTH = 2.0, 0.05
"""An exposed part below so many microseconds is not compared. Below this part of the compute it lies within
the spread of the measured compute, and is counted apart."""


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of a cell."""

    cell: Cell
    compute: float
    apart: float
    fused: float


@dataclass(frozen=True)
class Errors:
    """Relative errors of the time, and of the time minus compute alone."""

    whole: tuple[float, ...]
    exposed: tuple[float, ...]
    large: tuple[float, ...]
    """Errors of the exposed parts above WORTH."""

    def cells(self) -> list[str]:
        found = [str(len(self.whole))]
        for values in (self.whole, self.large):
            found += [f"{100 * median(values):.0f}", f"{100 * max(values):.0f}"] if values else ["-", "-"]
        return [*found, f"{100 * median(self.exposed):.0f}" if self.exposed else "-"]


def predict(cell: Cell) -> Prediction:
    problem = cell.problem
    compute = alone(problem, H200)
    collective = nccl_us(problem.collective, cell.world, problem.moved, H200.network)
    return Prediction(cell, compute, compute + collective, on_gpus(problem, H200))


def predict_all(chosen: Sequence[Cell], progress: Progress = silent) -> list[Prediction]:
    found = []
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as pool:
        for prediction in pool.map(predict, chosen):
            found.append(prediction)
            progress(prediction.cell.name, len(found), len(chosen))
    return found


def errors(predictions: Iterable[Prediction], kind: str) -> Errors:
    """The errors of `compute`, `apart` or `fused`, where measured."""
    whole: list[float] = []
    exposed: list[float] = []
    large: list[float] = []
    for p in predictions:
        measured = getattr(p.cell, f"{kind}_us")
        if measured is None or ("embedding" in p.cell.op and kind != "fused"):
            continue  # torch's pooling is not what is simulated
        whole.append(abs(getattr(p, kind) / measured - 1))
        if kind == "compute" or p.cell.compute_us is None or "embedding" in p.cell.op:
            continue
        rest = measured - p.cell.compute_us
        if rest > WORTH_US:
            error = abs((getattr(p, kind) - p.compute) / rest - 1)
            exposed.append(error)
            if rest > WORTH * p.cell.compute_us:
                large.append(error)
    return Errors(tuple(whole), tuple(exposed), tuple(large))


def held_out(cell: Cell) -> bool:
    return cell.label not in FITTED


def report(predictions: Sequence[Prediction]) -> str:
    """A table of errors of compute, collectives apart and fused ops, and one by op and number of ranks.

    Held-out cells and fitted ones have rows of their own.
    """
    head = ["", "cells", "median %", "worst %", "exposed > 5 %: median %", "worst %", "exposed: median %"]
    table = [head]
    for title, wanted in (("held out", True), ("fitted", False)):
        mine = [p for p in predictions if held_out(p.cell) is wanted]
        for kind in ("compute", "apart", "fused"):
            table.append([f"{title}: {kind}", *errors(mine, kind).cells()])
    parts = [columns(table)]
    table = [["held out, fused", *head[1:]]]
    for op in dict.fromkeys(p.cell.op for p in predictions):
        for world in sorted({p.cell.world for p in predictions if p.cell.op == op}):
            mine = [p for p in predictions if (p.cell.op, p.cell.world) == (op, world) and held_out(p.cell)]
            found = errors(mine, "fused")
            if found.whole:
                table.append([f"{op} on {world}", *found.cells()])
    return "\n\n".join([*parts, columns(table)])


def by_cell(predictions: Sequence[Prediction], wanted: Callable[[Cell], bool] = lambda cell: True) -> str:
    table = [["cell", "compute", "measured", "apart", "measured", "fused", "measured"]]
    for p in predictions:
        if wanted(p.cell):
            numbers = [
                text
                for kind in ("compute", "apart", "fused")
                for text in (f"{getattr(p, kind):.1f}", _text(getattr(p.cell, f"{kind}_us")))
            ]
            table.append([p.cell.name, *numbers])
    return columns(table)


def _text(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def to_json(predictions: Sequence[Prediction]) -> str:
    """All predictions beside their measured times."""
    rows = [
        {**asdict(p.cell), "predicted": {k: round(getattr(p, k), 1) for k in ("compute", "apart", "fused")}}
        for p in predictions
    ]
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
