"""The time of a way on one kind of GPU: the formulas of its work, with fitted constants.

`constants/<gpu>.json` has the constants of the kinds of GPUs that were measured. Any other kind takes the
constants of H200. Rates are fractions of the peaks that a GPU reports, so they scale with the GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from .gpu import Gpu, described, gpu_name
from .kernel import Problem, Way
from .work import Constants, Start, Work

_AND = " and "
_SHIPPED = Path(__file__).with_name("constants")

MEASURED = "h200"
"""Kinds of GPUs that were never measured use the constants of this kind."""


@dataclass(frozen=True, eq=False)
class Model:
    """The time of a way on `gpu`.

    constants: those of each formula, by `Work.model`. factors: measured time of a configuration over the time
    of its formula, by `factor_of`.
    """

    gpu: Gpu
    constants: Mapping[str, Constants] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def us(self, way: Way, problem: Problem) -> float:
        """Microseconds of a call in a way, before any measured point corrects them."""
        works = way.work(problem)
        return self.us_of(works, factor_of(problem.op, way.name, works), self.gpu)

    def us_of(self, works: Sequence[Work], factor: str, gpu: Gpu) -> float:
        """Microseconds of works on a GPU. factor: the key of the factor of their configuration."""
        return sum(work.us(self.of, gpu) for work in works) * self.factors.get(factor, 1.0)

    def of(self, model: str, start: Start) -> Constants:
        """The constants of a formula; if it was never fitted, those with which a fit begins."""
        found = self.constants.get(model)
        return {name: first for name, (first, _) in start.items()} if found is None else found

    def to_json(self) -> str:
        data = {"gpu": asdict(self.gpu), "constants": self.constants, "factors": self.factors}
        return json.dumps(_rounded(data), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Model:
        data = json.loads(text)
        return cls(Gpu(**data["gpu"]), data["constants"], data["factors"])


def factor_of(op: str, way: str, works: Sequence[Work]) -> str:
    """The key of the factor of a way. It names the formulas of the works, since a factor was fitted together
    with their constants. A way with several matmuls has the factor of the way with one."""
    return f"{op}: {way}: {_AND.join(dict.fromkeys(work.model for work in works))}"


def _models_of(factor: str) -> list[str]:
    return factor.rpartition(": ")[2].split(_AND)


def path_of(gpu: str) -> Path:
    """The file that ships the constants of a kind of GPU."""
    return _SHIPPED / f"{gpu}.json"


def kinds() -> list[str]:
    """The kinds of GPUs that were measured."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


@cache
def shipped(gpu: str = MEASURED) -> Model | None:
    """The model of a kind of GPU that was measured; None for other kinds. For works that were never measured
    there it has the constants of another kind, with the factors that belong to them."""
    path = path_of(gpu)
    if not path.exists():
        return None
    own = Model.from_json(path.read_text())
    constants, factors = dict(own.constants), dict(own.factors)
    for other in kinds():
        found = Model.from_json(path_of(other).read_text())
        taken = {model: of for model, of in found.constants.items() if model not in constants}
        factors |= {name: of for name, of in found.factors.items() if taken.keys() >= {*_models_of(name)}}
        constants |= taken
    return replace(own, constants=constants, factors=factors)


def model_of(gpu: Gpu) -> Model:
    """The model of a GPU. A kind that was never measured takes the constants of the kind `MEASURED`."""
    return shipped(gpu.name) or replace(measured(), gpu=gpu)


def measured() -> Model:
    """The model of the kind of GPU that was measured most."""
    found = shipped()
    assert found is not None
    return found


def gpu_of(device: torch.device) -> Gpu:
    """The properties of a device: those with which its kind was measured, else those that it reports."""
    found = shipped(gpu_name(device))
    return described(device) if found is None else found.gpu


def _rounded(value: object) -> object:
    """More digits would suggest a precision that the measurements do not have."""
    if isinstance(value, Mapping):
        return {key: _rounded(of) for key, of in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value
