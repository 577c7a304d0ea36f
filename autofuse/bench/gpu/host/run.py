"""`autofuse bench host`, as every rank of torchrun runs it: what a call costs the host, ours and replaced.

A sample times some calls in a row on an idle GPU, without waiting for it. Compiled code has some calls in
one graph. What the graph costs besides, such as its guards, is the time of a graph with one call less that
call, and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import autofuse
from autofuse.bench.gpu.driver import TIMEOUT_S, leave, machine, written
from autofuse.bench.gpu.driver import join as join_ranks
from autofuse.bench.gpu.host.cells import Call, Cell, Inputs, cells
from autofuse.bench.gpu.table import grid, number
from autofuse.lowering import runs
from autofuse.lowering.gpu.choice.timer import slowest, together

CALLS = 8
"""Calls of a compiled graph, and of an eager sample."""
SAMPLES = 15
WARM_UP = 4

BACKENDS: dict[str, dict[str, Any]] = {
    "ours": {"backend": "autofuse", "options": {"policy": "always"}},
    "replaced": {"backend": "inductor"},
}


@dataclass(frozen=True)
class Row:
    """Microseconds of host time a call by how it is made, `ours eager` and so on: medians of the samples, of
    the slowest rank. way: what ran ours; failed: why a time is missing."""

    name: str
    op: str
    us: dict[str, float]
    way: str
    failed: dict[str, str]


def join(rows: Sequence[str]) -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or no such row."""
    join_ranks("host", lambda world: _chosen(rows, world))


def _chosen(rows: Sequence[str], world: int) -> list[Cell]:
    found = [cell for cell in cells(world) if not rows or any(row in cell.name for row in rows)]
    if not found:
        raise ValueError(f"--rows: no cell is named like {', '.join(rows)}")
    return found


def run(rows: Sequence[str], json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures; rank 0 prints and writes the table, and the JSON file after every row. Ends the process."""
    device = torch.device("cuda", torch.cuda.current_device())
    data: dict[str, Any] = {"machine": machine(), "rows": []}
    with torch.no_grad(), autofuse.config.patch(timeout_s=TIMEOUT_S):
        for cell in _chosen(rows, dist.get_world_size()):
            data["rows"].append(asdict(measure(cell, device)))
            written(cell.name, data, json_file)
    leave(lambda: report(data), markdown)


def measure(cell: Cell, device: torch.device) -> Row:
    """The row of a cell; all ranks measure together."""
    given: list[Inputs] = [cell.make(device) for _ in range(CALLS + 1)]
    shared = cell.shared(device)
    us: dict[str, float] = {}
    failed: dict[str, str] = {}

    def ask(name: str, what: Callable[[], float]) -> None:
        try:
            us[name] = slowest(together(what))
        except RuntimeError as error:
            failed[name] = str(error)

    for kind, call in (("ours", cell.ours), ("replaced", cell.replaced)):
        if call is not None:
            ask(f"{kind} eager", lambda call=call: _eager_us(call, given[:CALLS], shared))  # type: ignore[misc]
    way = _way(cell.op)
    for kind in BACKENDS:
        ask(f"{kind} compiled", lambda kind=kind: _compiled_us(cell.replaced, kind, given, shared))  # type: ignore[misc]
    compiled = _way(cell.op)
    way = compiled if cell.ours is None or way == compiled else f"{way}; compiled: {compiled}"
    return Row(cell.name, cell.op, us, way, failed)


def _eager_us(call: Call, given: Sequence[Inputs], shared: Inputs) -> float:
    every = [(*each, *shared) for each in given]
    return host_us(lambda: [call(each) for each in every]) / len(every)


def _compiled_us(call: Call, kind: str, given: Sequence[Inputs], shared: Inputs) -> float:
    """Microseconds of a call in compiled code: the time of a graph of many calls less that of one call."""
    torch._dynamo.reset()

    def calls(given: Sequence[Inputs], shared: Inputs) -> list[Any]:
        return [call([*each, *shared]) for each in given]

    compiled = torch.compile(calls, fullgraph=True, dynamic=False, **BACKENDS[kind])
    many = host_us(lambda: compiled(given, shared))
    one = host_us(lambda: compiled(given[:1], shared))
    return (many - one) / (len(given) - 1)


def host_us(call: Callable[[], object]) -> float:
    """Microseconds until `call` returns, the median; the GPU is idle before, and may be busy after it."""
    samples = []
    for _ in range(WARM_UP + SAMPLES):
        _idle()
        begun = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begun) * 1e6)
    _idle()
    return median(samples[WARM_UP:])


def _idle() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _way(op: str) -> str:
    """What runs calls of an op now, the latest of all that have run."""
    ways = [run.way.name for run in runs.of_op(op)]
    return ways[-1] if ways else "-"


def report(data: dict[str, Any]) -> str:
    """The table."""
    about = data["machine"]
    head = (
        f"{about['world']} x {about['gpu']}, torch {about['torch']}, Triton {about['triton']}. Microseconds "
        "of host time a call, the median, of the slowest rank."
    )
    names = [f"{kind} {how}" for how in ("compiled", "eager") for kind in BACKENDS]
    table = [("call", *names, "compiled: replaced / ours", "way")]
    failed = []
    for row in data["rows"]:
        us = [row["us"].get(name) for name in names]
        ratio = us[1] / us[0] if us[0] and us[1] else None
        table.append((row["name"], *map(number, us), number(ratio, ".2f"), row["way"]))
        failed += [f"- {row['name']}, {name}: {why}" for name, why in row["failed"].items()]
    return "\n\n".join([head, grid(table), *(["Failed:", "\n".join(failed)] if failed else [])])
