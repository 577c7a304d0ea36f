"""The GPU benchmarks of exchanges, as every rank of torchrun runs them: a cell's ways in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import autofuse
import autofuse.lowering.ops  # defines torch.ops.autofuse
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
from autofuse.bench.gpu.embedding import (
    cells as embedding_cells,
)
from autofuse.bench.gpu.embedding import (
    gradients as embedding_gradients,
)
from autofuse.bench.gpu.embedding import (
    peers as embedding_work,
)
from autofuse.bench.gpu.embedding import (
    updates as embedding_updates,
)
from autofuse.bench.gpu.exchange.rows import Cell, Rates, Row, chosen
from autofuse.bench.gpu.exchange.table import report
from autofuse.bench.gpu.exchange.work import Variant, Work
from autofuse.bench.gpu.experts import cells as expert_cells
from autofuse.bench.gpu.experts import peers as expert_work
from autofuse.bench.gpu.experts import vdev as expert_vdev
from autofuse.bench.gpu.named_ways import ways
from autofuse.bench.gpu.rates import copy_rate
from autofuse.bench.gpu.ratios import DTYPE
from autofuse.bench.gpu.sums import cells as sum_cells
from autofuse.bench.gpu.sums import peers as sum_work
from autofuse.lowering.gpu.choice.timer import together
from autofuse.lowering.gpu.choice.timing import QUICK, Effort, Timing, calls_for, captured

MEMORY_BYTES = 2 << 30
"""Bytes that are copied to measure the memory's rate."""

CELLS: Mapping[str, Callable[[int, bool], Sequence[Cell]]] = {
    "embedding": embedding_cells.cells,
    "experts": expert_cells.cells,
    "sums": sum_cells.cells,
}
"""By benchmark: the function that makes all cells, or a few, for a number of ranks."""
WORK: Mapping[str, Callable[[Any, torch.device, str], Work]] = {
    embedding_cells.OP: embedding_work.work,
    embedding_cells.BACKWARD: embedding_gradients.work,
    embedding_cells.UPDATE: embedding_updates.work,
    expert_cells.COMBINE: expert_work.work,
    expert_cells.DISPATCH: expert_work.work,
    sum_cells.REDUCE: sum_work.work,
    sum_cells.SCATTER: sum_work.work,
}
"""By op: the function that makes the work of its cells."""


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks. `benchmark`: embedding, experts or sums."""

    benchmark: str
    rows: tuple[str, ...]
    """Cells whose name contains one of these; all if empty."""
    quick: bool = False
    """Fewer cells and samples, and of our ways only the one that `auto` chooses."""
    tune: bool = False
    """Let `auto` decide by these measurements, and add them to the user's own file of points."""


def join(options: Options) -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or no cell to be measured."""
    join_ranks(options.benchmark, lambda world: cells(options, world))


def cells(options: Options, world: int) -> list[Cell]:
    """The cells that are measured. ValueError if there are none, or for a world that does not fit."""
    return chosen([*CELLS[options.benchmark](world, options.quick)], options.rows)


def run(options: Options, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures; rank 0 prints and writes the tables, and the JSON file after every cell. Call `join` before.
    Ends the process."""
    with torch.no_grad(), autofuse.config.patch(policy="auto", timeout_s=TIMEOUT_S):
        data, rates = _prepare(options)
        for cell in cells(options, dist.get_world_size()):
            data["rows"].append(_measure(options, cell, rates).to_json())
            written(cell.name, data, json_file)
    leave(lambda: report(data), markdown)


def _prepare(options: Options) -> tuple[dict[str, Any], Rates]:
    _, rate = link(0)
    source = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    memory = together(lambda: copy_rate(source, torch.empty_like(source)))
    notes = []
    if options.benchmark == "experts" and (why := expert_vdev.missing()) is not None:
        notes.append(f"all_to_all_vdev_2d is not measured: {why}.")
    if options.tune and ways() is None:
        notes.append("Nothing is tuned: there are no kernels for GPUs to choose from.")
    data = {
        "machine": machine(),
        "settings": {**asdict(options), "dtype": DTYPE},
        **rate,
        "memory_gb_per_s": memory,
        "notes": notes,
        "rows": [],
    }
    return data, Rates(rate["link_gb_per_s"], memory)


def _measure(options: Options, cell: Cell, rates: Rates) -> Row:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    return measure(cell, WORK[cell.op](cell, device, group.group_name), rates, options)


def measure(cell: Cell, work: Work, rates: Rates, options: Options) -> Row:
    """The row of a cell."""
    ask = Asking()
    names: list[str] = []
    if not options.quick:
        names = ask("ways", "names", lambda: work.fused.names(unfused=options.tune), names)
    error = work.variants["ours"]["auto"].error
    groups = {**work.variants, "ways": {name: Variant(work.fused.call(name), error) for name in names}}
    variants = {(kind, name): variant for kind in groups for name, variant in groups[kind].items()}

    def settle(timings: dict[Key, Timing]) -> None:
        times = {name: us for (_, name), us in captured(timings).items()}
        ask("ways", "keep", lambda: work.fused.keep(times), None)

    timings = time_cell(
        {key: variant.call for key, variant in variants.items()},
        calls_for(cell.roughly_us),
        QUICK if options.quick else Effort(),
        lambda key, result: variants[key].error(result),
        keep=settle if options.tune else None,
        eager=() if work.capturable else {("ours", "auto")},
    )
    way = ask("ways", "chosen", work.fused.chosen, "?")  # asked last: the first call may measure
    timings |= ask.failed
    return Row(
        cell=cell,
        rates=rates,
        compute=by_kind(timings, "compute"),
        parts=by_kind(timings, "parts"),
        peers=by_kind(timings, "peers"),
        ours=timings["ours", "auto"],
        way=way,
        ways=by_kind(timings, "ways"),
    )
