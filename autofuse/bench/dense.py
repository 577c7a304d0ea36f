"""The GPU benchmark of the dense ops, as every rank of torchrun runs it: all ways of a cell in turn."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import autofuse
import autofuse.lowering.ops  # defines torch.ops.autofuse
from autofuse.bench.dense_cells import DTYPE, SHAPES, Cell, Row, Timing, cells, check
from autofuse.bench.dense_peers import (
    Operands,
    Run,
    alone,
    calls_of,
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
from autofuse.bench.dense_sweeps import orders, programs
from autofuse.bench.dense_table import report
from autofuse.bench.dense_timing import QUICK, Effort, push_rate, time_all, together
from autofuse.lowering.torch_internals import symmetric_empty, symmetric_views
from autofuse.passes.cost_model import Model, Numbers, Task
from autofuse.passes.table import shipped, table_for

T = TypeVar("T")

TIMEOUT_S = 60.0
ROTATION_BYTES = 192 << 20
"""Weights rotate among copies of more than this together: they come from memory, not from the L2."""
LINK_BYTES = 128 << 20
"""What is pushed, at least, to measure the link: the start must not count."""
LINK_GB_PER_S = {4: 356.0, 8: 346.0}
"""Copy engines of H200, by the number of ranks; only for where they cannot be measured."""


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    quick: bool = False
    """Fewer samples, and of ours only what `auto` chooses."""
    orders: bool = False
    """Measure direct order against oblivious instead."""
    ctas: bool = False
    """Measure time against the number of programs instead."""
    tune: bool = False
    """Let `auto` decide by what is measured here, and keep it in the user's own table."""


@dataclass(frozen=True)
class _Bench:
    """What all cells share."""

    options: Options
    effort: Effort
    buffer: Tensor
    group_name: str
    alone: str
    link_gb_per_s: float
    data: dict[str, Any]
    """As it is written to the JSON file."""


def join(options: Options) -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or a world that does not fit."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "this process is no rank of torchrun; start `torchrun --nproc_per_node 4 -m autofuse bench dense`"
        )
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if rank >= gpus:
        raise ValueError(f"rank {rank} has no GPU: torch finds {gpus}; start as many ranks as GPUs")
    if world < 2:
        raise ValueError("one rank has no peers; start 2 ranks or more")
    for shape in options.shapes:
        check(shape, world)
    # Collectives are being renamed, and the oldest torch that is supported has only the old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=2 * TIMEOUT_S))
    torch.manual_seed(1 + dist.get_rank())


def run(options: Options, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures; rank 0 prints and writes the tables, and the JSON file after every cell. Call `join` before.

    Ends the process: freeing communicators and symmetric memory that graphs have captured may take forever.
    """
    with torch.no_grad(), autofuse.config.patch(policy="auto", timeout_s=TIMEOUT_S):
        bench = _prepare(options)
        for shape in options.shapes:
            for gathers in (False, True):
                _measure_shape(bench, shape, gathers, json_file)
    if dist.get_rank() == 0:
        text = report(bench.data)
        print(text, flush=True)
        if markdown is not None:
            markdown.write_text(text + "\n")
    dist.barrier()
    torch.cuda.synchronize()
    sys.stderr.flush()
    os._exit(0)


def _prepare(options: Options) -> _Bench:
    group = dist.group.WORLD
    assert group is not None
    world, group_name = dist.get_world_size(), group.group_name
    own, _ = dist.new_subgroups(group_size=1)
    count = max(LINK_BYTES // 2, max(options.tokens) * max(SHAPES[shape][0] for shape in options.shapes))
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = symmetric_empty(count, torch.bfloat16, device)
    views = symmetric_views(buffer, group)
    link, failed = LINK_GB_PER_S[4 if world <= 4 else 8], ""
    try:
        mine = torch.zeros_like(buffer)
        link = together(lambda: push_rate(mine, views))
    except RuntimeError as error:
        failed = str(error)
    data = {
        "machine": _machine(world),
        "settings": {**asdict(options), "dtype": DTYPE},
        "link_gb_per_s": link,
        "link_failed": failed,
        "rows": [],
        "orders": [],
        "programs": [],
    }
    effort = QUICK if options.quick else Effort()
    return _Bench(options, effort, buffer, group_name, own.group_name, link, data)


def _machine(world: int) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "world": world,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _measure_shape(bench: _Bench, shape: str, gathers: bool, json_file: Path | None) -> None:
    options, data = bench.options, bench.data
    sizes = cells(dist.get_world_size(), shape, options.tokens, gathers)
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
        if dist.get_rank() == 0:
            print(f"measured {cell.name}", file=sys.stderr, flush=True)
            if json_file is not None:
                json_file.write_text(json.dumps(data, indent=1) + "\n")
        torch.cuda.empty_cache()


def _weights(cell: Cell) -> list[Tensor]:
    """[K, N] of every rank, so many that they do not fit the L2 cache."""
    scale = SHAPES[cell.shape][1] ** -0.5
    copies = max(1, -(-ROTATION_BYTES // (cell.k * cell.n * 2)))
    return [torch.randn(cell.k, cell.n, device="cuda", dtype=torch.bfloat16) * scale for _ in range(copies)]


def _measure(bench: _Bench, cell: Cell, given: Operands, weights: Sequence[Tensor]) -> Row:
    failed: dict[tuple[str, str], Timing] = {}

    def ask(kind: str, name: str, what: Callable[[], T], otherwise: T) -> T:
        """What `lowering.gpu` says of the cell; `otherwise`, and a failed variant, if it cannot."""
        try:
            return together(what)
        except RuntimeError as error:
            failed[kind, name] = Timing(failed=str(error))
            return otherwise

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

    variants = {(kind, name): each(run, weights) for kind in groups for name, run in groups[kind].items()}
    timings: dict[tuple[str, str], Timing] = {}
    check_result = checker(cell, given, weights[0])
    if bench.options.tune:
        # What auto takes is settled first, and only then compared with the peers, side by side.
        candidates = {key: run for key, run in variants.items() if key[0] == "ways"}
        timings |= time_all(candidates, calls_of(cell), QUICK, check_result)
        ask("ways", "keep", lambda: keep(cell, given, timings), None)
        variants = {key: run for key, run in variants.items() if key[0] != "ways"}
    timings |= time_all(variants, calls_of(cell), bench.effort, check_result)
    way = ask("ways", "chosen", lambda: chosen(cell, given), "?")  # asked last: the first call may measure
    timings |= failed
    timings_of = {
        kind: {name: timing for (group, name), timing in timings.items() if group == kind} for kind in groups
    }
    fused_us, apart_us = _predicted(cell)
    return Row(
        cell=cell,
        link_gb_per_s=bench.link_gb_per_s,
        compute=timings_of["compute"],
        peers=timings_of["peers"],
        ours=timings["ours", "auto"],
        way=way,
        ways=timings_of["ways"],
        predicted_fused_us=fused_us,
        predicted_apart_us=apart_us,
    )


def _predicted(cell: Cell) -> tuple[float, float]:
    """Microseconds fused and apart, by the cost model with the table of this GPU."""
    table = table_for(shipped(), torch.device("cuda", torch.cuda.current_device()))
    sent = cell.exchanged * 2 // (cell.world if cell.gathers else 1)
    task = Task(cell.op, cell.world, DTYPE, "direct", sent, ((cell.m, cell.k, cell.n),))
    model = Model(table, os.cpu_count() or 1)
    return float(model.fused(task, Numbers())), float(model.apart(task, Numbers()))
