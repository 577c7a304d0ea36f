"""Predicted times of a fused reduction and what lies behind it, under each schedule, and the choice of one.

W ranks share cores as in `cost_model.py`; `fused` is the fused op as it has it. `reduced`, `read` and
`written` are the bytes of the sum, of the operands behind it, and of the results, on one rank:

    unchanged   fused + share * (reduced + read + written) / memory
    every       fused + start + share * (read + written) / memory
    owner       fused, never in one shot, + start + share * ((read + written) / (memory W)
                + (written - reduced) (2 - 1 / W) / link)

A tail is applied to sums where they arrive, so that nobody reads them again. Owners store what the tail
returns and all ranks copy it, in place of the sum.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from autofuse.passes.graph.layout import Size

from .choose import Symbols, evaluate
from .cost_model import Arithmetic, Model, Numbers, Task, Value
from .crossover import Known, Sample, wins
from .device_table import DeviceTable

START_US = {"every": 20.0, "owner": 60.0}
"""Of the steps of a tail, on CPU ranks: by docs/benchmarks/schedules.json."""

ERROR = 0.15
"""The predicted ratio of two schedules may be so far from the measured one (tests/passes/test_scheduled.py).
What is not predicted to save more is not taken instead of what stands."""


@dataclass(frozen=True)
class Cluster:
    """A fused reduction, and bytes of what lies behind it."""

    task: Task
    reduced: Size
    read: Size
    written: Size

    def map(self, f: Callable[[Size], Size]) -> Cluster:
        behind = {name: f(getattr(self, name)) for name in ("reduced", "read", "written")}
        return replace(self, task=self.task.map(f), **behind)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return (*self.task.sizes, self.reduced, self.read, self.written)


def predicted(schedule: str, cluster: Cluster, model: Model, arithmetic: Arithmetic) -> Value:
    """Microseconds of a cluster under a schedule."""
    task, behind = cluster.task, cluster.read + cluster.written
    fused = model.fused(task, arithmetic, owners=schedule == "owner")
    share, memory = model.share(task.world), model.table.constants["memory.rate"]
    if schedule == "unchanged":
        return fused + share * (cluster.reduced + behind) / memory
    fused = fused + START_US[schedule]
    if schedule == "every":
        return fused + share * behind / memory
    more = (cluster.written - cluster.reduced) * (2 - 1 / task.world) / model.link(task.world)
    return fused + share * (behind / (memory * task.world) + more)


def cheapest(
    cluster: Cluster, legal: Sequence[str], table: DeviceTable, symbols: Symbols
) -> tuple[str, dict[str, float | None]]:
    """The schedule to take, the same on all ranks, and the predicted time of each at the sizes seen while
    tracing, which does not decide. The first of `legal` is the one that stands."""
    free = {symbol for size in cluster.sizes if isinstance(size, sympy.Expr) for symbol in size.free_symbols}
    known = tuple((s, symbols[s]) for s in sorted(free, key=str) if s in symbols)
    if len(known) < len(free):  # a size depends on data
        return legal[0], dict.fromkeys(legal)
    # The number of cores, not the affinity of this process: all ranks must decide alike.
    taken, times = _cheapest(cluster, tuple(legal), table, os.cpu_count() or 1, known)
    return taken, dict(zip(legal, times, strict=True))


@functools.lru_cache(maxsize=1024)
def _cheapest(
    cluster: Cluster,
    legal: tuple[str, ...],
    table: DeviceTable,
    cores: int,
    known: tuple[tuple[sympy.Symbol, Known], ...],
) -> tuple[str, tuple[float | None, ...]]:
    model = Model(table, cores)

    def time(schedule: str, values: Mapping[sympy.Symbol, int], arithmetic: Numbers) -> float:
        numbers = cluster.map(lambda size: evaluate(size, values))
        return float(predicted(schedule, numbers, model, arithmetic))

    def is_faster(schedule: str, other: str, margin: float) -> bool:
        """At all sizes."""

        def gain(values: Mapping[sympy.Symbol, int]) -> Sample:
            arithmetic = Numbers()
            slow, fast = (time(each, values, arithmetic) for each in (other, schedule))
            return slow * (1 - margin) - fast, tuple(arithmetic.taken)

        return wins(gain, dict(known)) == "always"

    taken = legal[0]
    for schedule in legal[1:]:
        if is_faster(schedule, taken, ERROR if taken == legal[0] else 0.0):
            taken = schedule
    hints = {s: k.hint for s, k in known if k.hint is not None}
    if len(hints) < len(known):
        return taken, (None,) * len(legal)
    return taken, tuple(round(time(schedule, hints, Numbers()), 1) for schedule in legal)
