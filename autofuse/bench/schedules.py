"""`autofuse bench schedules`: every schedule of what lies between two matmuls, beside stock Inductor.

    piece    normed, h = norm(residual + all_reduce(x @ w)), both replicated
    layer    two of them with the matmul of an MLP behind each, as a layer of a longer model has them

All schedules compute the same; they are timed in turn, block by block, in one process a rank.
"""

from __future__ import annotations

import itertools
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
from autofuse.bench.gpu import driver
from autofuse.bench.gpu.driver import TIMEOUT_S, leave, written
from autofuse.bench.gpu.table import grid
from autofuse.bench.models import run as models
from autofuse.bench.pieces import MODELS, Way, Weights, ways
from autofuse.lowering.gpu.choice.timer import Call, time_all, together
from autofuse.lowering.gpu.choice.timing import QUICK, Effort, calls_for, captured, matmul_us
from autofuse.lowering.torch_internals import compiling_variants, enable_symmetric_memory
from autofuse.passes.report import Report
from autofuse.passes.schedules.schedule import AUTO, SCHEDULES, UNCHANGED

TOKENS_ON_CPUS = (1, 4, 16, 64, 128, 256, 512, 1024)
TOKENS_ON_GPUS = (2048, 8, 8192, 512, 64, 4096, 1024, 1)
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
    device: str = "cpu"


@dataclass(frozen=True)
class Row:
    """Microseconds of a call under every schedule: medians of the slowest rank. `did`: what became of it.
    `predicted`: what `auto` reckons with."""

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


def join(options: Options) -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or if the ranks cannot share K."""

    def check(world: int) -> None:
        for ratio, hidden in itertools.product(options.ratios, options.hidden):
            if round(ratio * hidden) % world:
                raise ValueError(
                    f"{world} ranks cannot share K = {ratio * hidden:.0f}; choose another --ratio"
                )

    driver.join("schedules --device cuda", check)


def run_on_gpus(options: Options, until: float, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures on the group of torchrun, which has been joined, and begins no row after `until`. Rank 0
    prints and writes the table, and the JSON file after every row. Ends the process."""
    data = models.begun(models.Options(device="cuda"), json_file)
    assert dist.group.WORLD is not None
    enable_symmetric_memory(dist.group.WORLD)
    rows = resumed(options, until, data, json_file)
    about = data["machine"]
    head = (
        f"{about['world']} x {about['gpu']}, torch {about['torch']}, NCCL {about['nccl']}. Microseconds of "
        "the slowest rank, from CUDA graphs with cold weights; in parentheses as predicted."
    )
    leave(lambda: f"{head}\n\n{table(rows)}", markdown)


def resumed(options: Options, until: float, data: dict[str, Any], json_file: Path | None) -> list[Row]:
    """The rows that `data` has, and those that are measured now."""
    rows = [Row.from_json(row) for row in data["rows"]]
    for row in _rows(options, [row.cell for row in rows], until):
        rows.append(row)
        data["rows"] = [row.to_json() for row in rows]
        written(row.cell, data, json_file)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown, how good predictions were, and what failed."""
    rows = sorted(rows, key=lambda row: (row.world, row.dtype, row.name, row.hidden, row.ratio, row.tokens))
    names = list(dict.fromkeys(name for row in rows for name in (*row.us, *row.failed)))
    titles = ("ranks", "dtype", "what", "hidden", "K", "tokens", *(f"{name} us" for name in names))
    lines: list[tuple[str, ...]] = [(*titles, "best other / auto")]
    for row in rows:
        size = (str(row.hidden), f"{row.ratio * row.hidden:.0f}", str(row.tokens))
        gain = "-" if row.gain is None else f"{row.gain:.2f}"
        times = (_time(row, name) for name in names)
        lines.append((str(row.world), row.dtype, row.name, *size, *times, gain))
    failed = [f"- {row.cell}, {name}: {why}" for row in rows for name, why in row.failed.items()]
    parts = [grid(lines), "\n".join(_errors(rows)), "\n".join(["Failed:", "", *failed] if failed else [])]
    return "\n\n".join(part for part in parts if part)


def _time(row: Row, name: str) -> str:
    """Measured, the fastest in bold, and predicted."""
    if name not in row.us:
        return "-"
    best = min(row.us.values())
    spec = ",.0f" if best >= 100 else ".1f"
    text = format(row.us[name], spec)
    text = f"**{text}**" if row.us[name] == best else text
    return f"{text} ({row.predicted[name]:{spec}})" if name in row.predicted else text


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    """Of every schedule how far the predicted ratios to `unchanged` are from the measured ones."""
    for name in SCHEDULES:
        known = [r for r in rows if all(n in r.us and n in r.predicted for n in (name, UNCHANGED))]
        found = {
            row.predicted[name] / row.predicted[UNCHANGED] / (row.us[name] / row.us[UNCHANGED]) - 1: row.cell
            for row in known
        }
        if found and name != UNCHANGED:
            worst, middle = max(found, key=abs), statistics.median(map(abs, found))
            yield (
                f"- {name} / {UNCHANGED}: predictions are {middle:.1%} off in the median, "
                f"{worst:+.1%} in the worst case ({found[worst]})"
            )


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
        for tokens in options.tokens
        for hidden in options.hidden
        for ratio in options.ratios
        for name in MODELS
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
    on_gpus, device = options.device == "cuda", _device(options)
    inner = round(cell.ratio * cell.hidden) // cell.world
    torch.manual_seed(1 + group.rank())
    dtype = getattr(torch, cell.dtype)
    with device:
        model = MODELS[cell.name](inner, cell.hidden, group).to(dtype)
    autofuse.replicated(model, parameters=["*norm"], inputs=["residual"])
    weights = Weights(model, cold=on_gpus)
    same = torch.Generator(device).manual_seed(0)  # of what all ranks have
    x = torch.randn(cell.tokens, inner, device=device).to(dtype)
    residual = torch.randn(cell.tokens, cell.hidden, device=device, generator=same).to(dtype)
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
        count = calls_for(weights.matrices * (matmul_us(cell.tokens, inner, cell.hidden) + 10))
        times = time_all(calls, count, QUICK if options.quick else Effort())
        us = captured(times)
        failed |= {name: t.failed or "could not be captured" for name, t in times.items() if name not in us}
    else:
        us = _timed({name: lambda c=call: c(0) for name, call in calls.items()}, options.seconds)  # type: ignore[misc]
    return replace(cell, us=us, did=did, failed=failed, predicted=predicted)


def _device(options: Options) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    )


def _predicted(report: Report) -> dict[str, float]:
    """Predicted microseconds by schedule: of the whole stream if it was priced, else the sum over the
    reductions. `auto` has the time of the schedule that was taken."""
    streams = [schedule.considered for graph in report.graphs for schedule in graph.schedules]
    priced = [each for each in streams if any(e.us is not None for e in each)]
    found: dict[str, float] = {}
    for considered in priced or [site.considered for site in report.sites]:
        for each in considered:
            for name in (each.name, AUTO) if each.taken else (each.name,):
                if each.us is not None:
                    found[name] = found.get(name, 0.0) + each.us
    return found


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
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _largest(values: Sequence[float]) -> list[float]:
    result = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return [float(v) for v in result]
