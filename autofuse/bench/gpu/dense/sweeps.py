"""One fused way of a cell in several settings: orders of the tiles, and numbers of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autofuse.bench.gpu.dense.cells import Cell, Sweep
from autofuse.bench.gpu.dense.peers import Operands, checker, each, fused, in_way
from autofuse.lowering.gpu.choice.timer import time_all, together
from autofuse.lowering.gpu.choice.timing import Effort, Timing, calls_for

ORDERS = ("direct", "oblivious")
EIGHTHS = (4, 6, 7, 8)
"""Eighths of the SMs that programs run on. With fewer, some ways would have no program that multiplies."""


def orders(cell: Cell, given: Operands, weights: Sequence[Tensor], effort: Effort) -> list[Sweep]:
    """The same kernels in direct and in oblivious order, if they store tiles into the memory of peers."""
    if cell.gathers or cell.publishes:
        return []  # only a tile of a reduction has one rank that it goes to
    return [
        _sweep(cell, given, weights, effort, way, {o: in_way(cell, given, way, o) for o in ORDERS})
        for way in _ways(cell, given)
        if way.startswith(("tiles", "clusters"))
    ]


def programs(cell: Cell, given: Operands, weights: Sequence[Tensor], effort: Effort) -> list[Sweep]:
    """The time of every fused way against the number of programs (by default as many as SMs)."""
    from autofuse.lowering.gpu.dense import plain

    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    counts = [sms * part // 8 for part in EIGHTHS]

    def run(way: str, count: int) -> Callable[[Tensor], Tensor]:
        return lambda w: plain.run_on(way, cell.op, given.x, w, given.group_name, programs=count)

    return [
        _sweep(cell, given, weights, effort, way, {str(c): run(way, c) for c in counts})
        for way in _ways(cell, given)
    ]


def _ways(cell: Cell, given: Operands) -> list[str]:
    return together(lambda: fused(cell, given).names())


def _sweep(
    cell: Cell,
    given: Operands,
    weights: Sequence[Tensor],
    effort: Effort,
    way: str,
    runs: dict[str, Callable[[Tensor], Tensor]],
) -> Sweep:
    variants = {("ways", name): each(run, weights) for name, run in runs.items()}
    timings: dict[tuple[str, str], Timing] = time_all(
        variants, calls_for(cell.roughly_us), effort, checker(cell, given, weights[0])
    )
    return Sweep(cell, way, {name: timing for (_, name), timing in timings.items()})
