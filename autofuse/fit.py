"""Fits the constants of a device table to measured times, with the formulas of the cost model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from autofuse.passes.choice.cost_model import Model, Numbers, Task
from autofuse.passes.choice.device_table import DeviceTable

Part: TypeAlias = Literal["fused", "apart", "compute", "collective"]

PRIOR = 0.05
"""Weight of the constant that the fit starts from, in units of one measurement that is off by as much. A
constant that no measurement depends on keeps its value; two constants that explain a measurement together
share it."""
FAR_OFF = 0.3
"""Errors of the logarithm beyond this count linearly, so that one disturbed measurement has little weight."""
MOST_STEPS = 60
_SMALL = 1e-4


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

    Damped Gauss-Newton on the logarithms of the constants, so that all stay positive. It starts from the
    constants of `table`, which also regularise it. `cores`: of the machine where the samples were taken.
    """
    keys = list(table.constants)
    start = torch.tensor([math.log(table.constants[key]) for key in keys], dtype=torch.float64)

    def at(logs: torch.Tensor) -> DeviceTable:
        return replace(table, constants=dict(zip(keys, logs.exp().tolist(), strict=True)))

    def residuals(logs: torch.Tensor) -> torch.Tensor:
        return torch.tensor(errors(at(logs), samples, cores), dtype=torch.float64).log()

    def cost(r: torch.Tensor, logs: torch.Tensor) -> float:
        huber = torch.nn.functional.huber_loss(r, torch.zeros_like(r), reduction="sum", delta=FAR_OFF)
        return float(huber + PRIOR**2 / 2 * (logs - start).square().sum())

    logs, damping = start, 1e-2
    r = residuals(logs)
    best = cost(r, logs)
    for _ in range(MOST_STEPS):
        slopes = torch.stack([(residuals(logs + step) - r) / _SMALL for step in _steps(len(keys))], 1)
        weights = (FAR_OFF / r.abs().clamp(min=FAR_OFF)).sqrt()
        rows = [weights[:, None] * slopes, PRIOR * torch.eye(len(keys), dtype=torch.float64)]
        right = [-weights * r, PRIOR * (start - logs)]
        improved = False
        while not improved and damping < 1e6:
            a = torch.cat([*rows, damping * torch.eye(len(keys), dtype=torch.float64)])
            b = torch.cat([*right, torch.zeros(len(keys), dtype=torch.float64)])
            step = torch.linalg.lstsq(a, b[:, None]).solution[:, 0].clamp(-1, 1)
            new = residuals(logs + step)
            value = cost(new, logs + step)
            improved = value < best
            damping = damping / 5 if improved else damping * 5
        if not improved:
            break
        gained = best - value
        logs, r, best = logs + step, new, value
        if gained < 1e-6 * best:
            break
    # More digits would suggest a precision that the measurements do not have.
    return replace(table, constants={key: float(f"{value:.4g}") for key, value in at(logs).constants.items()})


def _steps(count: int) -> torch.Tensor:
    """A small step along each constant."""
    return _SMALL * torch.eye(count, dtype=torch.float64)
