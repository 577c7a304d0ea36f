"""The GPU benchmark of the dense ops, as every rank of torchrun runs it: all ways of a cell in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import autofuse
import autofuse.lowering.ops  # defines torch.ops.autofuse
from autofuse.bench.gpu.dense.cells import WEIGHTS, Cell, Row, cells, check, extents, ops_of
from autofuse.bench.gpu.dense.peers import (
    Operands,
    Run,
    alone,
    checker,
    chosen,
    each,
    keep,
    operands,
    our_ways,
    ours,
    ours_alone,
    peers,
)
from autofuse.bench.gpu.dense.sweeps import orders, programs
from autofuse.bench.gpu.dense.table import report
from autofuse.bench.gpu.driver import (
    TIMEOUT_S,
    Asking,
    Key,
    by_kind,
    leave,
    link,
    machine,
    time_cell,
    written,
)
from autofuse.bench.gpu.driver import join as join_ranks
from autofuse.bench.gpu.ratios import BYTES, DTYPE
from autofuse.lowering.gpu.choice.timing import QUICK, Effort, Timing, calls_for, copies_of
from autofuse.passes.choice.cost_model import Task
from autofuse.passes.choice.ways import predictor_on, times


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    quick: bool = False
    """Fewer samples, and of our ways only the one that `auto` chooses."""
    orders: bool = False
    """Measure direct order against oblivious instead."""
    ctas: bool = False
    """Measure time against the number of programs instead."""
    ops: tuple[str, ...] = ()
    """Only these; none: those that have the shape in a model."""
    tune: bool = False
    """Let `auto` decide by these measurements, and add them to the user's own file of points."""


@dataclass(frozen=True)
class _Bench:
    """State that all cells share."""

    options: Options
    effort: Effort
    buffer: Tensor
    group_name: str
    alone: str
    link_gb_per_s: float
    data: dict[str, Any]
    """The content of the JSON file."""


def join(options: Options) -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or a world that does not fit."""

    def check_shapes(world: int) -> None:
        for shape in options.shapes:
            check(shape, world, options.ops)

    join_ranks("dense", check_shapes)


def run(options: Options, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures; rank 0 prints and writes the tables, and the JSON file after every cell. Call `join` before.
    Ends the process."""
    with torch.no_grad(), autofuse.config.patch(policy="auto", timeout_s=TIMEOUT_S):
        bench = _prepare(options)
        for shape in options.shapes:
            for alike in WEIGHTS:
                ops = tuple(op for op in alike if op in ops_of(shape, options.ops))
                _measure_shape(bench, shape, ops, json_file)
    leave(lambda: report(bench.data), markdown)


def _prepare(options: Options) -> _Bench:
    group = dist.group.WORLD
    assert group is not None
    own, _ = dist.new_subgroups(group_size=1)
    buffer, rate = link(max(options.tokens) * max(extents(shape)[0] for shape in options.shapes))
    settings = {**asdict(options), "dtype": DTYPE}
    data = {"machine": machine(), "settings": settings, **rate, "rows": [], "orders": [], "programs": []}
    effort = QUICK if options.quick else Effort()
    rate_gb_per_s = rate["link_gb_per_s"]
    return _Bench(options, effort, buffer, group.group_name, own.group_name, rate_gb_per_s, data)


def _measure_shape(bench: _Bench, shape: str, ops: tuple[str, ...], json_file: Path | None) -> None:
    options, data = bench.options, bench.data
    sizes = cells(dist.get_world_size(), shape, options.tokens, ops)
    if not sizes:
        return
    weights = _weights(sizes[0])
    for cell in sizes:
        given = operands(cell, bench.buffer, bench.group_name, bench.alone)
        if options.orders:
            data["orders"] += [sweep.to_json() for sweep in orders(cell, given, weights, bench.effort)]
        if options.ctas:
            data["programs"] += [sweep.to_json() for sweep in programs(cell, given, weights, bench.effort)]
        if not options.orders and not options.ctas:
            data["rows"].append(_measure(bench, cell, given, weights).to_json())
        written(cell.name, data, json_file)


def _weights(cell: Cell) -> list[Tensor]:
    """Weights [K, N] of every rank, so many that they do not fit into the L2 cache."""
    scale = extents(cell.shape)[1] ** -0.5
    copies = copies_of(cell.k * cell.n * BYTES)
    return [torch.randn(cell.k, cell.n, device="cuda", dtype=torch.bfloat16) * scale for _ in range(copies)]


def _measure(bench: _Bench, cell: Cell, given: Operands, weights: Sequence[Tensor]) -> Row:
    ask = Asking()
    groups: dict[str, dict[str, Run]] = {
        "compute": alone(cell, given),
        "peers": peers(cell, given),
        "ours": {"auto": ours(cell, given)},
        "ways": {},
    }
    if not bench.options.quick:
        every_way = bench.options.tune
        groups["ways"] = ask("ways", "names", lambda: our_ways(cell, given, every_way), groups["ways"])
        groups["compute"] |= ask("compute", "ours", lambda: ours_alone(cell, given), groups["compute"])

    def settle(timings: dict[Key, Timing]) -> None:
        ask("ways", "keep", lambda: keep(cell, given, timings), None)

    timings = time_cell(
        {(kind, name): each(run, weights) for kind in groups for name, run in groups[kind].items()},
        calls_for(cell.roughly_us),
        bench.effort,
        checker(cell, given, weights[0]),
        keep=settle if bench.options.tune else None,
    )
    way = ask("ways", "chosen", lambda: chosen(cell, given), "?")  # asked last: the first call may measure
    timings |= ask.failed
    fused_us, apart_us = _predicted(cell)
    return Row(
        cell=cell,
        link_gb_per_s=bench.link_gb_per_s,
        compute=by_kind(timings, "compute"),
        peers=by_kind(timings, "peers"),
        ours=timings["ours", "auto"],
        way=way,
        ways=by_kind(timings, "ways"),
        predicted_fused_us=fused_us,
        predicted_apart_us=apart_us,
    )


def _predicted(cell: Cell) -> tuple[float, float]:
    """Microseconds of the fastest kernel of ours, and apart, as reports predict them."""
    sent = cell.exchanged * 2 // (cell.world if cell.gathers or cell.publishes else 1)
    task = Task(cell.op, cell.world, DTYPE, "direct", sent, ((cell.m, cell.k, cell.n),))
    predictor = predictor_on(torch.device("cuda", torch.cuda.current_device()))
    found = None if predictor is None else times(task, predictor)
    return (math.nan, math.nan) if found is None else found[1:]
