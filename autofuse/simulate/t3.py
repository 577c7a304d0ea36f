"""The sub-layers of T3: a matmul and the all_reduce behind it, one after the other, ideally overlapped, and
with track and trigger, on the machine of the paper."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autofuse.lowering import ops  # noqa: F401  (registers the ops that plans name)
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.simulate.collectives import ring_all_gather, ring_reduce_scatter
from autofuse.lowering.simulate.executor import Result, simulate
from autofuse.lowering.simulate.machine import Arbitration, Machine
from autofuse.lowering.simulate.machines import T3, T3_QUEUE
from autofuse.lowering.simulate.work import Product

TILE = 128
THRESHOLDS = (5, 10, 30, math.inf)


@dataclass(frozen=True)
class SubLayer:
    """One matmul `[tokens, inner / world] @ [inner / world, hidden]` and its all_reduce."""

    model: str
    name: str
    world: int
    tokens: int
    hidden: int
    factor: int
    """The length of the sum over all ranks, in multiples of `hidden`."""
    layers: int

    @property
    def inner(self) -> int:
        return self.factor * self.hidden // self.world

    @property
    def columns(self) -> bool:
        """Whether chunks are columns: where rows are too few for a tile a rank."""
        return self.tokens // self.world < TILE

    @property
    def chunk(self) -> tuple[int, int]:
        rows, cols = self.tokens, self.hidden
        return (rows, cols // self.world) if self.columns else (rows // self.world, cols)

    @property
    def label(self) -> str:
        return f"{self.model} {self.name} TP{self.world}"


_FACTORS = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}
SMALL = tuple(
    SubLayer(model, name, world, tokens, hidden, factor, layers)
    for model, tokens, hidden, layers in (("Mega-GPT-2", 16384, 3072, 74), ("T-NLG", 8192, 4256, 78))
    for world in (16, 8)
    for name, factor in _FACTORS.items()
)
LARGE = tuple(
    SubLayer(model, name, 32, 2048, hidden, factor, layers)
    for model, hidden, layers in (("GPT-3", 12288, 96), ("PALM", 18432, 118), ("MT-NLG", 20480, 105))
    for name, factor in _FACTORS.items()
)


@dataclass(frozen=True)
class Times:
    """Microseconds of a sub-layer, and bytes from and to memory by name."""

    case: SubLayer
    matmul: float
    reduce_scatter: float
    reduce_scatter_near: float
    """With sums near memory."""
    all_gather: float
    t3: float
    """Matmul and reduce_scatter with track and trigger, round robin."""
    mca: float
    """The same with the arbiter that puts compute first."""
    threshold: float
    """The threshold that the arbiter chose."""
    alone: Result
    apart: Result
    gather: Result
    fused: Result
    arbitrated: Result

    @property
    def sequential(self) -> float:
        return self.matmul + self.reduce_scatter + self.all_gather

    @property
    def gains(self) -> dict[str, float]:
        """Speed-up over sequential."""
        gather, whole = self.all_gather, self.sequential
        return {
            "ideal": whole / (max(self.matmul, self.reduce_scatter) + gather),
            "ideal, sums near memory": whole / (max(self.matmul, self.reduce_scatter_near) + gather),
            "T3": whole / (self.t3 + gather),
            "T3-MCA": whole / (self.mca + gather),
        }

    def accesses(self, what: str) -> tuple[float, float]:
        """Bytes of `what`, sequential and with T3: `matmul reads`, `sum reads`, `writes` or `all`."""
        alone, apart, fused = self.alone.traffic, self.apart.traffic, self.arbitrated.traffic
        if what == "matmul reads":
            return alone["compute reads"], fused["compute reads"]
        if what == "sum reads":
            return apart["compute reads"], fused["communication reads"]
        if what == "writes":
            parts = ("compute writes", "communication writes")
            return sum(alone.get(p, 0) + apart.get(p, 0) for p in parts), sum(fused.get(p, 0) for p in parts)
        gather = sum(self.gather.traffic.values())
        before = sum(alone.values()) + sum(apart.values()) + gather
        return before, sum(fused.values()) + gather


def matmul_alone(case: SubLayer, machine: Machine) -> Result:
    """The matmul on one GPU, its product written through the cache. Tiles come in the sequence in which the
    overlapped matmul computes them: column by column where chunks are columns."""
    rows, cols = case.chunk
    whole = (cols * case.world, rows) if case.columns else (rows * case.world, cols)
    shape = PlanShape("matmul_reduce_scatter", "ring", 1, ((whole,),), (TILE, TILE))
    return simulate(shape, replace(machine, tracker=False), Product(case.inner))


def overlapped(case: SubLayer, machine: Machine, record: bool = False) -> Result:
    """The same plan as on other machines, `matmul_reduce_scatter` in ring order, on a machine that tracks
    and triggers."""
    shape = PlanShape(
        "matmul_reduce_scatter", "ring", case.world, ((case.chunk,) * case.world,), (TILE, TILE)
    )
    work = Product(case.inner, columns=case.columns)
    return simulate(shape, replace(machine, tracker=True), work, record=record)


def round_robin(machine: Machine = T3) -> Machine:
    """Requests of communication fill the queue that compute waits in."""
    return replace(machine, memory=replace(machine.memory, blocking=1.0))


def compute_first(threshold: float, machine: Machine = T3) -> Machine:
    """Communication never holds more than `threshold` places of the queue."""
    part = min(1.0, threshold / T3_QUEUE)
    memory = replace(
        machine.memory,
        arbitration=Arbitration.COMPUTE_FIRST,
        threshold=part * machine.memory.queue if part < 1 else math.inf,
        blocking=part,
    )
    return replace(machine, memory=memory)


def chosen_threshold(alone: Result) -> float:
    """The paper gives no rule: by the part of the time in which the matmul alone keeps the memory busy."""
    busy = alone.busy / alone.us
    return THRESHOLDS[0] if busy > 0.5 else THRESHOLDS[1] if busy > 0.25 else THRESHOLDS[2]


def run(case: SubLayer, machine: Machine = T3) -> Times:
    """All configurations of one sub-layer."""
    alone = matmul_alone(case, machine)
    apart = ring_reduce_scatter(machine, case.world, case.chunk)
    gather = ring_all_gather(machine, case.world, case.chunk)
    fused = overlapped(case, round_robin(machine))
    threshold = chosen_threshold(alone)
    arbitrated = overlapped(case, compute_first(threshold, machine))
    return Times(
        case,
        alone.us,
        apart.us,
        gather.us,  # the same transfers: sums cost the link nothing
        gather.us,
        fused.us,
        arbitrated.us,
        threshold,
        alone,
        apart,
        gather,
        fused,
        arbitrated,
    )


def geomean(values: Iterable[float]) -> float:
    found = list(values)
    return math.exp(math.fsum(map(math.log, found)) / len(found))
