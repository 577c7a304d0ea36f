"""Fits the constants of a device table to measured times, with the formulas of the cost model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from autofuse.least_squares import SMALL, nearest
from autofuse.passes.choice.cost_model import Model, Numbers, Task
from autofuse.passes.choice.device_table import DeviceTable

Part: TypeAlias = Literal["fused", "apart", "compute", "collective"]

PRIOR = 0.05
"""Weight of the constant that the fit starts from, in units of one measurement that is off by as much. A
constant that no measurement depends on keeps its value; two constants that explain a measurement together
share it."""


@dataclass(frozen=True)
class Sample:
    """A measured time: `us` is the time of `part` for all `tasks` together."""

    part: Part
    tasks: tuple[Task, ...]
    us: float


def predict(model: Model, sample: Sample) -> float:
    """The prediction of the cost model for a sample, in microseconds."""
    parts: Mapping[Part, Callable[[Task], float]] = {
        "fused": lambda task: model.fused(task, Numbers()),
        "apart": lambda task: model.apart(task, Numbers()),
        "compute": lambda task: model.compute(task, Numbers(), fused=False),
        "collective": model.collective,
    }
    return sum(parts[sample.part](task) for task in sample.tasks)


def errors(table: DeviceTable, samples: Sequence[Sample], cores: int = 1) -> list[float]:
    """The ratio of predicted and measured time of each sample."""
    model = Model(table, cores)
    return [predict(model, sample) / sample.us for sample in samples]


def fit(table: DeviceTable, samples: Sequence[Sample], cores: int = 1) -> DeviceTable:
    """The table whose predictions are nearest to `samples`, by the mean of squared logarithms of the ratios.

    It starts from the constants of `table`, which also regularise it. `cores`: of the machine where the
    samples were taken.
    """
    keys = list(table.constants)
    start = torch.tensor([math.log(table.constants[key]) for key in keys], dtype=torch.float64)

    def at(logs: torch.Tensor) -> DeviceTable:
        return replace(table, constants=dict(zip(keys, logs.exp().tolist(), strict=True)))

    def residuals(logs: torch.Tensor) -> torch.Tensor:
        return torch.tensor(errors(at(logs), samples, cores), dtype=torch.float64).log()

    def slopes(logs: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return torch.stack([(residuals(logs + step) - r) / SMALL for step in _steps(len(keys))], 1)

    logs = nearest(residuals, slopes, start, torch.full_like(start, PRIOR))
    # More digits would suggest a precision that the measurements do not have.
    return replace(table, constants={key: float(f"{value:.4g}") for key, value in at(logs).constants.items()})


def _steps(count: int) -> torch.Tensor:
    """A small step along each constant."""
    return SMALL * torch.eye(count, dtype=torch.float64)
