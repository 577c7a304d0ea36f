"""Fits the constants that predict the ways of GPUs to measured points, and judges what would be chosen.

`autofuse bench dense --holdout` leaves out one weight at a time, fits the constants to all others, corrects
by the points of all others, and lets the prediction choose at the points that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from autofuse.least_squares import SMALL, nearest
from autofuse.lowering.gpu.choice.gpu import Gpu
from autofuse.lowering.gpu.choice.kernel import Problem, Way, ways_of
from autofuse.lowering.gpu.choice.model import Model, factor_of
from autofuse.lowering.gpu.choice.work import Constants, Start, Work

PRIOR = 0.06
"""Weight of where a fit begins: of a constant that is off by its spread, in units of a measurement."""
ELSEWHERE = 0.3
"""Weight of a measurement on another kind of GPU, beside one on the kind that is fitted."""
SPREAD = 0.1
"""Of the logarithm of a configuration's factor."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A measured time of a way. gpu: where it was measured; None: on the kind that is fitted."""

    problem: Problem
    way: Way
    us: float
    gpu: Gpu | None = None

    @cached_property
    def works(self) -> Sequence[Work]:
        return self.way.work(self.problem)

    @cached_property
    def factor(self) -> str:
        return factor_of(self.problem.op, self.way.name, self.works)

    def predicted(self, model: Model) -> float:
        """Microseconds, with the constants of `model`."""
        return model.us_of(self.works, self.factor, model.gpu if self.gpu is None else self.gpu)


def samples_of(
    measured: Iterable[tuple[Problem, Mapping[str, float]]], gpu: Gpu | None = None
) -> list[Sample]:
    """Of ways that exist today."""
    found = []
    for problem, times in measured:
        ways = ways_of(problem)
        found += [Sample(problem, ways[name], us, gpu) for name, us in times.items() if name in ways]
    return found


def completed(gpu: Gpu, own: Sequence[Sample], others: Iterable[Sample]) -> list[Sample]:
    """The samples of a kind of GPU, and those of kernels on other kinds with numbers of ranks that it lacks.

    Constants that are fitted to one number of ranks tell little of another. A kind that has no sample of a
    model takes the constants of another kind as they are.
    """
    begin = Model(gpu)

    def models(sample: Sample) -> set[str]:
        return {*_uses(gpu, sample, begin)}

    covered = {(model, sample.problem.world) for sample in own for model in models(sample)}
    known = {model for model, _ in covered}

    def lacks(sample: Sample) -> bool:
        of = models(sample)
        return of <= known and any((model, sample.problem.world) not in covered for model in of)

    return [*own, *(sample for sample in others if sample.way.fused and lacks(sample))]


def fit(
    gpu: Gpu,
    samples: Sequence[Sample],
    factors: bool = True,
    begin: Model | None = None,
    near: Model | None = None,
) -> Model:
    """The model with the least squared logarithms of predicted over measured times, summed over the samples.

    Works that share constants, directly or through others, are fitted together, and so are the ways of a
    problem that does not know all of its sizes: only their ratios count. factors: whether configurations get
    factors, too. begin: where constants are held. near: a model that was fitted to nearly the same samples,
    from which the search begins.
    """
    first = Model(gpu) if begin is None else begin
    uses = [_uses(sample.gpu or gpu, sample, first) for sample in samples]
    together: dict[Problem, set[str]] = {}
    for sample, use in zip(samples, uses, strict=True):
        if not sample.problem.is_whole:
            together.setdefault(sample.problem, set()).update(use)
    constants: dict[str, Constants] = {}
    found: dict[str, float] = {}
    for group in _groups([*map(set, uses), *together.values()]):
        chosen = [(sample, use) for sample, use in zip(samples, uses, strict=True) if group & use.keys()]
        fitted = _Fit(gpu, chosen, factors).run(near)
        constants |= fitted.constants
        found |= fitted.factors
    return Model(gpu, dict(sorted(constants.items())), dict(sorted(found.items())))


Uses = dict[str, Start]
"""The constants that a prediction asks for, by model."""


def _uses(gpu: Gpu, sample: Sample, begin: Model) -> Uses:
    found: Uses = {}

    def asked(model: str, start: Start) -> Constants:
        constants = begin.of(model, start)
        found[model] = {name: (constants[name], spread) for name, (_, spread) in start.items()}
        return constants

    for work in sample.works:
        work.us(asked, gpu)
    return found


def _groups(uses: Sequence[set[str]]) -> list[set[str]]:
    """Models that are used together."""
    groups: list[set[str]] = []
    for use in uses:
        joined = {*use}
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


@dataclass
class _Fit:
    """A fit of constants that are used together, and of the factors of their ways."""

    gpu: Gpu
    chosen: Sequence[tuple[Sample, Uses]]
    factors: bool
    names: list[tuple[str, str]] = field(default_factory=list)
    """Model and constant."""
    ways: list[str] = field(default_factory=list)

    @cached_property
    def weights(self) -> Tensor:
        """Of the samples."""
        return _tensor(1.0 if sample.gpu is None else ELSEWHERE for sample, _ in self.chosen)

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """The rows of the samples that use the constants of a model."""
        found: dict[str, list[int]] = {}
        for row, (_, use) in enumerate(self.chosen):
            for model in use:
                found.setdefault(model, []).append(row)
        return found

    @cached_property
    def alike(self) -> list[list[int]]:
        """The rows of each problem that does not know all of its sizes."""
        found: dict[Problem, list[int]] = {}
        for row, (sample, _) in enumerate(self.chosen):
            if not sample.problem.is_whole:
                found.setdefault(sample.problem, []).append(row)
        return [*found.values()]

    def run(self, near: Model | None) -> Model:
        starts = {model: start for _, use in self.chosen for model, start in use.items()}
        self.names = [(model, name) for model in sorted(starts) for name in starts[model]]
        if self.factors:
            self.ways = sorted({sample.factor for sample, _ in self.chosen})
        firsts = [starts[model][name] for model, name in self.names]
        begin = [math.log(first) for first, _ in firsts] + [0.0] * len(self.ways)
        spreads = [spread for _, spread in firsts] + [SPREAD] * len(self.ways)
        measured = _tensor(math.log(sample.us) for sample, _ in self.chosen)

        def residuals(logs: Tensor) -> Tensor:
            model = self._at(logs)
            return self._compared(
                _tensor(math.log(sample.predicted(model)) for sample, _ in self.chosen) - measured
            )

        guess = None if near is None else self._logs_of(near, begin)
        return self._at(nearest(residuals, self._slopes, _tensor(begin), PRIOR / _tensor(spreads), guess))

    def _logs_of(self, model: Model, begin: Sequence[float]) -> Tensor:
        """Of its constants and factors; of those that it lacks as in `begin`."""
        constants = (model.constants.get(of, {}).get(name) for of, name in self.names)
        values = [*constants, *(model.factors.get(way) for way in self.ways)]
        return _tensor(
            first if value is None else math.log(value) for value, first in zip(values, begin, strict=True)
        )

    def _at(self, logs: Tensor) -> Model:
        values = logs.exp().tolist()
        constants: dict[str, dict[str, float]] = {}
        for (model, name), value in zip(self.names, values, strict=False):
            constants.setdefault(model, {})[name] = value
        factors = dict(zip(self.ways, values[len(self.names) :], strict=True))
        return Model(self.gpu, constants, factors)

    def _slopes(self, logs: Tensor, r: Tensor) -> Tensor:
        """Only of constants that a sample uses. Backwards: some constants count up to 1, and begin there."""
        found = torch.zeros(len(self.chosen), len(logs), dtype=torch.float64)
        model = self._at(logs)
        samples = [sample for sample, _ in self.chosen]
        here = [sample.predicted(model) for sample in samples]
        for column, (of, _) in enumerate(self.names):
            step = logs.clone()
            step[column] -= SMALL
            stepped, rows = self._at(step), self.users[of]
            found[rows, column] = _tensor(
                math.log(here[row] / samples[row].predicted(stepped)) / SMALL for row in rows
            )
        columns = {way: len(self.names) + i for i, way in enumerate(self.ways)}
        if columns:
            found[range(len(samples)), [columns[sample.factor] for sample in samples]] = 1.0
        return self._compared(found)

    def _compared(self, logs: Tensor) -> Tensor:
        """Weighted. Where a problem does not know all of its sizes, without what its ways share."""
        for rows in self.alike:
            logs[rows] -= logs[rows].mean(0)
        return logs * (self.weights if logs.dim() == 1 else self.weights[:, None])


def _tensor(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
