"""`autofuse bench schedules`: every schedule of what lies between two matmuls, beside stock Inductor.

    piece    normed, h = norm(residual + all_reduce(x @ w)), both replicated
    layer    two of them with the matmul of an MLP behind each, as a layer of a longer model has them

All schedules compute the same; they are timed in turn, block by block, in one process a rank.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

import autofuse
from autofuse.bench.cpu.run import cores
from autofuse.bench.gpu.driver import TIMEOUT_S, leave, written
from autofuse.bench.models import run as models
from autofuse.bench.pieces import MODELS, Way, Weights, ways
from autofuse.lowering.gpu.choice.timer import Call, time_all, together
from autofuse.lowering.gpu.choice.timing import QUICK, Effort, calls_for, matmul_us
from autofuse.lowering.torch_internals import compiling_variants, enable_symmetric_memory
from autofuse.passes.report import Report
from autofuse.passes.schedules.schedule import AUTO, SCHEDULES

TOKENS_ON_CPUS = (1, 4, 16, 64, 128, 256, 512, 1024)
TOKENS_ON_GPUS = (8, 2048, 64, 512, 1, 8192)
"""What tells most comes first: time may run out."""
BLOCK_S, MOST_CALLS = 0.03, 64
"""Calls are timed in blocks of about this length: ranks leave a barrier up to milliseconds apart."""

ERROR = 0.05
"""Of the largest value, which no schedule may be away from the others."""


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks. `ratios`: K over all ranks, in hidden sizes."""

    hidden: tuple[int, ...]
    ratios: tuple[float, ...]
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: tuple[str, ...]
    seconds: float
    """That are spent on a row, about; on CPU ranks alone."""
    quick: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """Microseconds of a call under every schedule: medians of the slowest rank. `did`: what became of it.
    `predicted`: what `auto` reckons with where it can split."""

    name: str
    world: int
    tokens: int
    dtype: str
    us: dict[str, float]
    did: dict[str, str]
    hidden: int
    ratio: float
    failed: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def cell(self) -> str:
        return f"{self.name} {self.tokens} {self.dtype} {self.hidden} x {self.ratio:g}"

    @property
    def gain(self) -> float | None:
        """How many times as long as `auto` the fastest that is not ours takes."""
        others = [us for name, us in self.us.items() if name not in SCHEDULES]
        return min(others) / self.us[AUTO] if others and AUTO in self.us else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{name: value for name, value in data.items() if name != "gain"})


def run(worlds: Sequence[int], options: Options) -> list[Row]:
    """The rows of groups of so many CPU ranks each, which share out the cores of this process."""
    rows: list[Row] = []
    for world in worlds:
        chosen = Options(**{**asdict(options), "threads": max(1, cores() // world)})
        with tempfile.TemporaryDirectory(prefix="autofuse-bench-") as directory:
            multiprocessing.spawn(_rank, (world, directory, chosen), nprocs=world)
            rows += [Row(**row) for row in json.loads(Path(directory, "rows.json").read_text())]
    return rows


def run_on_gpus(options: Options, until: float, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures on the group of torchrun, which has been joined, and begins no row after `until`. Rank 0
    prints and writes the table, and the JSON file after every row. Ends the process."""
    data = models.begun(models.Options(device="cuda"), json_file)
    assert dist.group.WORLD is not None
    enable_symmetric_memory(dist.group.WORLD)
    with torch.device("cuda", torch.cuda.current_device()):
        rows = resumed(options, until, data, json_file)
    leave(lambda: table(rows), markdown)


def resumed(options: Options, until: float, data: dict[str, Any], json_file: Path | None) -> list[Row]:
    """The rows that `data` has, and those that are measured now."""
    rows = [Row.from_json(row) for row in data["rows"]]
    for row in _rows(options, [row.cell for row in rows], until):
        rows.append(row)
        data["rows"] = [row.to_json() for row in rows]
        written(row.cell, data, json_file)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown, and what failed."""
    rows = sorted(rows, key=lambda row: (row.world, row.dtype, row.name, row.hidden, row.ratio, row.tokens))
    names = list(dict.fromkeys(name for row in rows for name in (*row.us, *row.failed)))
    titles = " | ".join(f"{name} us" for name in names)
    lines = [f"| ranks | dtype | what | hidden | K | tokens | {titles} | best other / auto |"]
    lines.append("|---" * (len(names) + 7) + "|")
    for row in rows:
        best = min(row.us.values(), default=0.0)
        spec = ",.0f" if best >= 100 else ".1f"
        times = [format(row.us[name], spec) if name in row.us else "-" for name in names]
        times = [f"**{t}**" if row.us.get(n) == best else t for n, t in zip(names, times, strict=True)]
        size = (str(row.hidden), f"{row.ratio * row.hidden:.0f}", str(row.tokens))
        gain = "-" if row.gain is None else f"{row.gain:.2f}"
        lines.append("| " + " | ".join([str(row.world), row.dtype, row.name, *size, *times, gain]) + " |")
    failed = [f"- {row.cell}, {name}: {why}" for row in rows for name, why in row.failed.items()]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])])


def _rank(rank: int, world: int, directory: str, options: Options) -> None:
    torch.set_num_threads(options.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    rows = list(_rows(options, [], math.inf))
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _rows(options: Options, known: Sequence[str], until: float) -> Iterator[Row]:
    """Those that are not known."""
    warnings.filterwarnings("ignore")
    cells = [
        Row(name, dist.get_world_size(), tokens, dtype, {}, {}, hidden, ratio)
        for dtype in options.dtypes
        for name in MODELS
        for tokens in options.tokens
        for hidden in options.hidden
        for ratio in options.ratios
    ]
    with autofuse.config.patch(timeout_s=TIMEOUT_S), compiling_variants(), torch.no_grad():
        for cell in cells:
            if cell.cell in known or (options.rows and not any(part in cell.cell for part in options.rows)):
                continue
            if models.over(until):
                return
            yield _measure(cell, options)
            models.cleared()


def _measure(cell: Row, options: Options) -> Row:
    """The row of a cell, which has no times yet."""
    group = dist.group.WORLD
    assert group is not None
    on_gpus = torch.get_default_device().type == "cuda"
    inner = round(cell.ratio * cell.hidden) // cell.world
    torch.manual_seed(1 + group.rank())
    dtype = getattr(torch, cell.dtype)
    model = MODELS[cell.name](inner, cell.hidden, group).to(dtype)
    autofuse.replicated(model, parameters=["*norm"], inputs=["residual"])
    weights = Weights(model, cold=on_gpus)
    x = torch.randn(cell.tokens, inner).to(dtype)
    residual = torch.randn(cell.tokens, cell.hidden, generator=_generator()).to(dtype)
    calls: dict[str, Call] = {}
    did: dict[str, str] = {}
    failed: dict[str, str] = {}
    predicted: dict[str, float] = {}
    expected: list[Tensor] = []
    for name, way in ways(model, cell.tokens, on_gpus).items():
        try:
            calls[name], report = together(lambda w=way: _compiled(w, weights, (x, residual), expected))  # type: ignore[misc]
            did[name] = (
                ", ".join(site.pattern or site.collective for site in report.sites) if way.ours else ""
            )
            predicted |= _predicted(report)
        except RuntimeError as error:
            failed[name] = str(error)
    if on_gpus:
        count = calls_for(matmul_us(cell.tokens, inner, cell.hidden) + 10)
        times = time_all(calls, count, QUICK if options.quick else Effort())
        us = {name: t.us for name, t in times.items() if t.us is not None and not t.eager}
        failed |= {name: t.failed or "could not be captured" for name, t in times.items() if name not in us}
    else:
        us = _timed({name: lambda c=call: c(0) for name, call in calls.items()}, options.seconds)  # type: ignore[misc]
    return replace(cell, us=us, did=did, failed=failed, predicted=predicted)


def _predicted(report: Report) -> dict[str, float]:
    """Of the one group, if its stream was priced."""
    told = [each for graph in report.graphs for schedule in graph.schedules for each in schedule.considered]
    return {each.name: each.us for each in told if each.us is not None}


def _generator() -> torch.Generator:
    """Of the values that all ranks have."""
    return torch.Generator(torch.get_default_device()).manual_seed(0)


def _compiled(
    way: Way, weights: Weights, args: tuple[Tensor, Tensor], expected: list[Tensor]
) -> tuple[Call, Report]:
    """Calls of a model that was compiled in some way, and its report. RuntimeError if results are not as
    `expected`, which the first one to be compiled sets."""
    compiled = way.compiled()

    def call(i: int) -> Any:
        weights.take(i)
        return compiled(*args)

    with autofuse.debug() as report:
        results = call(0)
    expected += [] if expected else [result.clone() for result in results]
    for ours, theirs in zip(results, expected, strict=True):
        far = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        if not far <= ERROR:
            raise RuntimeError(f"its result is {far:.2g} away from that of Inductor")
    return call, report


def _timed(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    for call in calls.values():
        _block(call, 2)
    each = _largest([_block(call, 2) for call in calls.values()])
    counts = [max(1, min(MOST_CALLS, round(BLOCK_S / second))) for second in each]
    a_round = sum(count * second for count, second in zip(counts, each, strict=True))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(5, min(60, math.ceil(seconds / a_round)))):
        for (name, call), count in zip(calls.items(), counts, strict=True):
            times[name].append(_block(call, count))
    return {name: 1e6 * statistics.median(_largest(found)) for name, found in times.items()}


def _block(call: Callable[[], Any], count: int) -> float:
    """Seconds a call, from a barrier on."""
    _finish()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    _finish()
    return (time.perf_counter() - begin) / count


def _finish() -> None:
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def _largest(values: Sequence[float]) -> list[float]:
    result = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return [float(v) for v in result]
