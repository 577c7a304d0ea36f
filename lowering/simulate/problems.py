"""One fused op at one size: the plans that it may take, what its tiles cost, and the times on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import FAMILIES, Family

from .executor import Result, simulate
from .machine import Machine
from .machines import EXPERTS_US, GRADIENTS_US, INDEX_US, KERNELS, nccl_us
from .work import Bags, Counts, Experts, GatheredProduct, Nothing, Product, Routed, Work

FEW_ROWS = 128
"""With fewer rows a rank, kernels compute all rows of a tile at once, and chunks are columns."""
GROUP = 1024
"""Kernels take tiles in groups of so many rows, so that weights come from memory once. Here a tile is as high
as a group, and narrow."""
BAG_ROWS = 4
"""A bag costs as much as so many rows more: fitted to one size on 2 H200 (docs/simulate.md)."""
BACKWARD, UPDATE = "all_to_all_embedding_bag_backward", "all_to_all_embedding_bag_update"
MOST_TILES = 8192
"""Of more tiles of experts, several are one, to save events."""


@dataclass(frozen=True)
class Problem:
    """An op on every rank: a matmul `[rows, inner] @ [inner, cols]`, or bags.

    A gather has all gathered rows. `count` experts have `rows` rows for, or from, every rank and expert.
    With `counts`, rows differ: `counts[s][d][e]` go from rank s to expert e of rank d. Bags: `rows` bags of
    `cols` elements for every rank, of `inner` rows each. Gradients of bags: `count` tables of `height` rows.
    """

    op: str
    world: int
    rows: int
    inner: int
    cols: int
    count: int = 1
    itemsize: int = 2
    counts: Counts | None = None
    height: int = 0

    @property
    def family(self) -> Family:
        return FAMILIES[self.op]

    @property
    def bags(self) -> bool:
        return self.op == "embedding_bag_all_to_all"

    @property
    def gradients(self) -> bool:
        return self.op in (BACKWARD, UPDATE)

    @property
    def experts(self) -> bool:
        return "expert" in self.op

    @property
    def few(self) -> bool:
        """Whether ranks share out columns, because there are few rows."""
        return self.rows // self.world < FEW_ROWS and self.cols >= self.world

    @property
    def moved(self) -> float:
        """Bytes of the larger side of the collective on one rank."""
        if self.bags or self.gradients:
            return float(self.rows * self.world * self.cols * self.itemsize)
        if self.experts:
            width = self.inner if self.family is Family.CONSUME else self.cols
            if self.counts is not None:
                return most_moved(self.counts) * width * self.itemsize * self.world / (self.world - 1)
            return float(self.rows * self.world * self.count * width * self.itemsize)
        if self.family is Family.GATHER:
            return float(self.rows * self.inner * self.itemsize)
        if self.family is Family.PUBLISH:
            return float(self.rows * self.cols * self.world * self.itemsize)
        return float(self.rows * self.cols * self.itemsize)

    @property
    def collective(self) -> str:
        if self.op in ("matmul_all_reduce", "matmul_reduce_scatter"):
            return self.op.removeprefix("matmul_")
        return "all_gather" if self.family in (Family.GATHER, Family.PUBLISH) else "all_to_all"


def most_moved(counts: Counts) -> int:
    """Rows that a rank sends to others, or receives from them."""
    ranks = range(len(counts))
    sent = [sum(sum(counts[r][d]) for d in ranks if d != r) for r in ranks]
    received = [sum(sum(counts[s][r]) for s in ranks if s != r) for r in ranks]
    return max(*sent, *received)


def _tile(machine: Machine, problem: Problem, height: int, width: int, copies: int = 1) -> tuple[int, int]:
    """The tile of a matmul whose chunks are `height` x `width`, and of which there are `copies`.

    A program computes 128 rows of 32 to 256 columns: the width with the least work in whole waves, where 16
    columns stand for the begin and end of a tile.
    """
    rows, cols = problem.rows, problem.cols

    def waves(width: int) -> int:
        tiles = copies * math.ceil(rows / 128) * math.ceil(cols / width)
        return math.ceil(tiles / machine.processors) * (width + 16)

    columns = min(range(256, 0, -32), key=waves)
    high = max(1, min(height, GROUP))
    return high, max(1, min(width, min(rows, 128) * columns // high))


def alone(problem: Problem, machine: Machine) -> float:
    """Microseconds of the compute alone."""
    if problem.bags:
        whole = problem.rows * problem.world, problem.cols
        shape = PlanShape(problem.op, "direct", 1, ((whole,),), (32, 1024))
        return simulate(shape, machine, Bags(problem.inner + BAG_ROWS, problem.itemsize)).us
    if problem.gradients:
        return _added_up(problem, machine)
    if problem.counts is not None:
        return _one_by_one(problem, problem.counts, machine)
    if problem.experts:
        each = replace(problem, rows=problem.rows * problem.world)
        tile = _expert_tile(machine, each)
        work: Work = Experts(each.count, each.rows, each.inner, each.cols, *tile, each.itemsize)
        whole = each.count * each.rows, each.cols
    else:
        tile = _tile(machine, problem, problem.rows, problem.cols)
        work, whole = Product(problem.inner, problem.itemsize), (problem.rows, problem.cols)
    # A plan that only computes: nothing is sent, or added up.
    return simulate(PlanShape("expert_matmul_all_to_all", "direct", 1, ((whole,),), tile), machine, work).us


def _one_by_one(problem: Problem, counts: Counts, machine: Machine) -> float:
    """A matmul an expert, on the rank with most rows. Few sizes stand for all: rows are rounded up to 32."""
    rank = max(range(problem.world), key=lambda r: sum(sum(source[r]) for source in counts))
    rows = [sum(of_ranks) for of_ranks in zip(*(source[rank] for source in counts), strict=True)]
    return sum(
        _matmul(Problem("matmul_reduce_scatter", 1, -(-n // 32) * 32, problem.inner, problem.cols), machine)
        for n in rows
        if n
    )


@lru_cache(maxsize=4096)
def _matmul(problem: Problem, machine: Machine) -> float:
    return alone(problem, machine)


def _added_up(problem: Problem, machine: Machine) -> float:
    """Gradients of tables from those of bags that have arrived: a row is read for every index. All rows of
    the tables are written (backward), or those with an index, which are also read (update)."""
    bags = problem.rows * problem.world
    entries, width = bags * problem.inner, problem.cols // problem.count
    read, written = float(entries * problem.cols), float(problem.height * problem.cols)
    if problem.op == UPDATE:
        written *= 1 - (1 - 1 / problem.height) ** entries
        read += written
    rows = max(1, round(written / width / 4))
    block = max(1, min(256, rows // (4 * machine.processors))), 4 * width
    shape = PlanShape("expert_matmul_all_to_all", "direct", 1, (((rows, 4 * width),),), block)
    return simulate(shape, machine, Bags(read / written, problem.itemsize)).us


def _expert_tile(machine: Machine, problem: Problem) -> tuple[int, int]:
    height, width = _tile(machine, problem, problem.rows, problem.cols, problem.count)
    while problem.count * math.ceil(problem.rows / height) * math.ceil(problem.cols / width) > MOST_TILES:
        width *= 2
    return height, width


def fused(problem: Problem, machine: Machine, order: str = "direct", everyone: bool = False) -> float:
    """Microseconds of the fused op: of the best of its plans. ValueError if it has none in this order."""
    return min(
        extra + simulate(shape, machine, work, everyone=everyone).us
        for shape, work, extra in plans(problem, machine, order)
    )


def apart(problem: Problem, machine: Machine) -> float:
    """Microseconds of compute and NCCL, one after the other."""
    return alone(problem, machine) + nccl_us(
        problem.collective, problem.world, problem.moved, machine.network
    )


def on_gpus(problem: Problem, machine: Machine, order: str = "direct") -> float:
    """`fused`, with what was fitted to kernels on GPUs."""
    extra = EXPERTS_US if problem.experts else 0.0
    if problem.gradients:
        extra = GRADIENTS_US + INDEX_US * problem.rows * problem.world * problem.inner * problem.count
    return fused(problem, machine, order) * KERNELS + extra


def plans(problem: Problem, machine: Machine, order: str) -> list[tuple[PlanShape, Work, float]]:
    """The plans, the work of their tiles, and microseconds of what runs before or after them."""
    op, world, itemsize = problem.op, problem.world, problem.itemsize

    def alike(chunk: tuple[int, int], block: tuple[int, int], visit: int = 0) -> PlanShape:
        return PlanShape(op, order, world, ((chunk,) * world,), block, visit=visit)

    if problem.bags:
        return [
            (alike((problem.rows, problem.cols), (32, 1024)), Bags(problem.inner + BAG_ROWS, itemsize), 0.0)
        ]
    if problem.gradients:  # no row can be added up before all gradients of bags are there
        after = alone(problem, machine) - machine.launch
        return [(alike((problem.rows, problem.cols), (32, 1024)), Nothing(itemsize), after)]
    if problem.experts:
        return [_experts(problem, machine, order)]
    inner, cols, rows = problem.inner, problem.cols, problem.rows
    if problem.family is Family.GATHER:
        part = max(1, rows // world)
        if problem.few:  # all rows at once, when they are there
            after = alone(problem, machine) - machine.launch
            return [(alike((part, inner), (part, 1024)), Nothing(itemsize), after)]
        height, width = _tile(machine, replace(problem, rows=part), part, cols)
        return [(alike((part, inner), (height, inner)), GatheredProduct(cols, width, itemsize), 0.0)]
    if problem.family is Family.PUBLISH:
        block = _tile(machine, problem, rows, cols)
        return [(alike((rows, cols), block), Product(inner, itemsize, True), 0.0)]
    few = problem.few
    chunk = (rows, cols // world) if few else (max(1, rows // world), cols)
    block = _tile(machine, problem, *chunk)
    work = Product(inner, itemsize, few)
    found: list[tuple[PlanShape, Work, float]] = [(alike(chunk, block), work, 0.0)]
    tiles = math.ceil(chunk[0] / block[0]) * math.ceil(chunk[1] / block[1])
    if order != "ring":
        if tiles > 16 and not few:
            found.append((alike(chunk, block, max(4, -(-tiles // 16))), work, 0.0))
        if op == "matmul_all_reduce" and problem.moved * world <= 2**20:
            whole = ((rows, cols), *((0, cols),) * (world - 1))
            tile = _tile(machine, problem, rows, cols)
            found.append((PlanShape(op, order, world, (whole,), tile, one_shot=True), work, 0.0))
    return found


def _experts(problem: Problem, machine: Machine, order: str) -> tuple[PlanShape, Work, float]:
    if problem.counts is not None:
        return _routed(problem, problem.counts, machine, order)
    count, rows, world = problem.count, problem.rows, problem.world
    high, wide = _expert_tile(machine, replace(problem, rows=rows * world))
    tile = min(rows, high), wide * max(1, high // rows)
    # An expert with few rows computes those for all ranks at once: its weight is read once for all of them.
    shared = min(world, max(1, FEW_ROWS * 2 // rows))
    work = Experts(count, rows, problem.inner, problem.cols, *tile, problem.itemsize, shared)
    produces = problem.family is Family.PRODUCE
    chunk = count * rows, problem.cols if produces else problem.inner
    block = tile if produces else (128, problem.inner)
    return PlanShape(problem.op, order, world, ((chunk,) * world,), block), work, 0.0


def _routed(problem: Problem, counts: Counts, machine: Machine, order: str) -> tuple[PlanShape, Work, float]:
    ranks, produces = range(problem.world), problem.family is Family.PRODUCE
    most = max(sum(sum(source[r]) for source in counts) for r in ranks)
    area = 128 * 256
    while most * problem.cols > area * MOST_TILES:
        area *= 2
    # Weights of experts with few rows are shared out to all programs.
    parts = max(sum(n > 0 for source in counts for n in source[r]) for r in ranks)
    columns = max(32, min(512, problem.cols * parts // (4 * machine.processors)))
    work = Routed(counts, problem.inner, problem.cols, area, columns, problem.itemsize, GROUP)
    width = problem.cols if produces else problem.inner
    rows = [[sum(counts[c][r] if produces else counts[r][c]) for c in ranks] for r in ranks]
    chunks = tuple(tuple((n, width) for n in of_rank) for of_rank in rows)
    block = (GROUP if produces else 128), width
    return PlanShape(problem.op, order, problem.world, chunks, block), work, 0.0


def timeline(problem: Problem, machine: Machine, order: str) -> Result:
    """The best plan once more, with what every program of rank 0 did."""
    best = min(plans(problem, machine, order), key=lambda p: p[2] + simulate(p[0], machine, p[1]).us)
    return simulate(best[0], machine, best[1], record=True)
