"""Predicted times of a reduction and what lies behind it, under each schedule, and the choice of one.

`gpu_pricing.py` has the times on GPUs. On CPU ranks they are as follows, where W ranks share cores as in
`cost_model.py`. `reduce`, `scatter` and `gather` are ops with the matmul that feeds or reads them, fused if
that is decided or predicted to be faster; `matmuls` are those that would read a gather. `reduced`, `read` and
`written` are the bytes of the sum, of the operands behind it, and of the results, on one rank:

    unchanged   reduce + share * (reduced + read + written) / memory + matmuls
    every       reduce + start + share * (read + written) / memory + matmuls
    owner       reduce, never in one shot, + start + share * ((read + written) / (memory W)
                + (written - reduced) (2 - 1 / W) / link) + matmuls
    split       scatter + share * (reduced + read + written) / (memory W) + gathers + all_reduces of sums over
                rows; all for padded rows, with a copy of what the scattered product is made of

A tail is applied to sums where they arrive, so that nobody reads them again. Owners store what the tail
returns and all ranks copy it, in place of the sum. A stream is split as a whole, so that its clusters are
priced together.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import sympy
import torch

from autofuse.passes.graph.layout import Size

from .choose import Symbols
from .cost_model import Arithmetic, Model, Numbers, Task, Value
from .crossover import Known, Sample, wins
from .device_table import DeviceTable
from .evaluate import at_values

START_US = {"every": 20.0, "owner": 60.0}
"""Of the steps of a tail, on CPU ranks: by docs/benchmarks/schedules.json."""

ERROR = 0.15
"""The predicted ratio of two schedules may be so far from the measured one (tests/passes/test_scheduled.py).
What is not predicted to save more is not taken instead of what stands."""


@dataclass(frozen=True)
class Cluster:
    """A reduction, and what lies behind it.

    Attributes:
        task: the reduction of the product of a matmul; without matmuls the collective alone.
        reduced, read, written: bytes, as above.
        added: of those that are read, the bytes of a matrix that is added to the sum before anything else.
        gathers: of what has been cut, with the matmuls that read it.
        sums: all_reduces of sums over rows that have been cut.
        decided: whether reductions and gathers are fused in any case; else the faster is taken.
        rows, padded: how many rows there are, and how many are computed if they are cut.
    """

    task: Task
    reduced: Size
    read: Size
    written: Size
    gathers: tuple[Task, ...] = ()
    sums: tuple[Task, ...] = ()
    decided: bool = True
    rows: Size = 1
    padded: Size = 1
    added: Size = 0

    def map(self, f: Callable[[Size], Size]) -> Cluster:
        reduced, read, written = map(f, (self.reduced, self.read, self.written))
        gathers, sums = (tuple(task.map(f) for task in tasks) for tasks in (self.gathers, self.sums))
        rows, padded = f(self.rows), f(self.padded)
        return Cluster(
            self.task.map(f), reduced, read, written, gathers, sums, self.decided, rows, padded, f(self.added)
        )  # fmt: skip

    def slices(self) -> Slices:
        """What a rank does under `split`, at sizes in numbers."""

        def longer(task: Task) -> Task:
            if self.padded == self.rows:
                return task
            matmuls = tuple((m * self.padded // self.rows, k, n) for m, k, n in task.matmuls)
            return replace(task, sent=task.sent * self.padded // self.rows, matmuls=matmuls)

        size = getattr(torch, self.task.dtype).itemsize
        made_of = sum(m * k for m, k, _ in self.task.matmuls) * size or self.reduced
        moved = (self.reduced + self.read + self.written) * self.padded / (self.rows * self.task.world)
        return Slices(
            replace(longer(self.task), op="matmul_reduce_scatter"),
            tuple(map(longer, self.gathers)),
            moved,
            0.0 if self.padded == self.rows else 2.0 * made_of,
        )

    @property
    def sizes(self) -> tuple[Size, ...]:
        tasks = (self.task, *self.gathers, *self.sums)
        sizes = (size for task in tasks for size in task.sizes)
        return (*sizes, self.reduced, self.read, self.written, self.rows, self.padded, self.added)


@dataclass(frozen=True)
class Slices:
    """A cluster that is cut: the reduction that scatters and the gathers, of padded rows; `moved`: bytes that
    a rank reads and writes of its slices between them; `copied`: for the padding."""

    scatter: Task
    gathers: tuple[Task, ...]
    moved: float
    copied: float


def predicted(schedule: str, cluster: Cluster, model: Model, arithmetic: Arithmetic) -> Value:
    """Microseconds of a cluster under a schedule."""
    task, world = cluster.task, cluster.task.world
    behind = cluster.read + cluster.written
    share, memory = model.share(world), model.table.constants["memory.rate"]

    def site(task: Task, owners: bool = False) -> Value:
        if not task.matmuls and not task.pooled:
            return model.collective(task)
        fused = model.fused(task, arithmetic, owners)
        if cluster.decided:
            return fused
        apart = model.apart(task, arithmetic)
        return arithmetic.where(fused, apart, fused, apart)

    if schedule == "split":
        slices = cluster.slices()
        times = [site(each) for each in (*slices.gathers, slices.scatter)]
        times += [model.collective(total) for total in cluster.sums]
        return sum(times) + share * (slices.moved + slices.copied) / memory
    time = site(task, owners=schedule == "owner")
    time = time + share * sum(model.compute(gather, arithmetic, fused=False) for gather in cluster.gathers)
    if schedule == "unchanged" or not task.matmuls:  # a collective alone has no tail
        return time + share * (cluster.reduced + behind) / memory
    time = time + START_US[schedule]
    if schedule == "every":
        return time + share * behind / memory
    more = (cluster.written - cluster.reduced) * (2 - 1 / world) / model.link(world)
    return time + share * (behind / (memory * world) + more)


@dataclass(frozen=True)
class Margins:
    """Parts of a time that must be predicted to be saved: at some of the sizes that symbols may have, and at
    all of them. A size in numbers must save both."""

    somewhere: float
    everywhere: float


class Pricing(Hashable, Protocol):
    """Times of clusters on a kind of machine."""

    def margins(self, schedule: str, stands: bool) -> Margins:
        """What a schedule must save of the time of another, which `stands` if nothing is changed."""

    def us(self, schedule: str, cluster: Cluster, arithmetic: Numbers) -> float | None:
        """Microseconds, of sizes in numbers; None if nothing is known."""


@dataclass(frozen=True)
class CpuPricing:
    """By the cost model."""

    table: DeviceTable
    cores: int

    @classmethod
    def here(cls, table: DeviceTable) -> CpuPricing:
        """The number of cores, not the affinity of this process: all ranks must decide alike."""
        return cls(table, os.cpu_count() or 1)

    def margins(self, schedule: str, stands: bool) -> Margins:
        return Margins(ERROR, ERROR) if stands else Margins(0.0, 0.0)

    def us(self, schedule: str, cluster: Cluster, arithmetic: Numbers) -> float | None:
        return float(predicted(schedule, cluster, Model(self.table, self.cores), arithmetic))


def cheapest(
    clusters: Sequence[Cluster], legal: Sequence[str], pricing: Pricing, symbols: Symbols
) -> tuple[str, dict[str, float | None]]:
    """The schedule of all these clusters to take, the same on all ranks, and the predicted time of each at
    the sizes seen while tracing, which does not decide. The first of `legal` is the one that stands."""
    sizes = {size for cluster in clusters for size in cluster.sizes if isinstance(size, sympy.Expr)}
    free = {symbol for size in sizes for symbol in size.free_symbols}
    known = tuple((s, symbols[s]) for s in sorted(free, key=str) if s in symbols)
    if len(known) < len(free):  # a size depends on data
        return legal[0], dict.fromkeys(legal)
    counts = tuple(Counter(clusters).items())
    taken, times = _cheapest(counts, tuple(legal), pricing, known)
    return taken, dict(zip(legal, times, strict=True))


@functools.lru_cache(maxsize=1024)
def _cheapest(
    counts: tuple[tuple[Cluster, int], ...],
    legal: tuple[str, ...],
    pricing: Pricing,
    known: tuple[tuple[sympy.Symbol, Known], ...],
) -> tuple[str, tuple[float | None, ...]]:
    def time(schedule: str, values: Mapping[sympy.Symbol, int], arithmetic: Numbers) -> float | None:
        total = 0.0
        for cluster, count in counts:
            us = pricing.us(schedule, at_values(cluster, values), arithmetic)
            if us is None:
                return None
            total += count * us
        return total

    def saves(schedule: str, other: str, margin: float) -> str:
        """At which sizes."""

        def gain(values: Mapping[sympy.Symbol, int]) -> Sample:
            arithmetic = Numbers()
            slow, fast = (time(each, values, arithmetic) for each in (other, schedule))
            if slow is None or fast is None:
                return 0.0, (True,)
            return slow * (1 - margin) - fast, tuple(arithmetic.taken)

        return wins(gain, dict(known))

    def is_faster(schedule: str, other: str) -> bool:
        least = pricing.margins(schedule, stands=other == legal[0])
        if saves(schedule, other, least.everywhere) != "always":
            return False
        return least.everywhere == least.somewhere or saves(schedule, other, least.somewhere) != "never"

    taken = legal[0]
    for schedule in legal[1:]:
        if is_faster(schedule, taken):
            taken = schedule
    hints = {s: k.hint for s, k in known if k.hint is not None}
    if len(hints) < len(known):
        return taken, (None,) * len(legal)
    found = (time(schedule, hints, Numbers()) for schedule in legal)
    return taken, tuple(None if us is None else round(us, 1) for us in found)
