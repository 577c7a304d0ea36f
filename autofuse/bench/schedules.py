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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

import autofuse
from autofuse.bench.cpu.run import cores
from autofuse.passes.schedules.schedule import AUTO, SCHEDULES

INDUCTOR = "inductor"
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_ON_CPUS = 1024
EPSILON = 1e-6
BLOCK_S, MOST_CALLS = 0.03, 64
"""Calls are timed in blocks of about this length: ranks leave a barrier up to milliseconds apart."""

ERROR = 0.05
"""Of the largest value, which no schedule may be away from the others."""


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks. `ratio`: K over all ranks, in units of the hidden size."""

    hidden: int
    ratio: float
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: tuple[str, ...]
    seconds: float
    """That are spent on a row, about."""
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """Microseconds of a call under every schedule: medians of the slowest rank. `did`: what became of it."""

    name: str
    world: int
    tokens: int
    dtype: str
    us: dict[str, float]
    did: dict[str, str]

    @property
    def gain(self) -> float:
        """How many times as long as `auto` Inductor takes."""
        return self.us[INDUCTOR] / self.us[AUTO]


class Piece(nn.Module):
    """`residual`, `gamma` and the results are the same on all ranks."""

    def __init__(self, inner: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(hidden, inner) / math.sqrt(inner))
        self.norm = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        product = F.linear(x, self.weight)
        h = residual + funcol.wait_tensor(funcol.all_reduce(product, "sum", self.group))
        wide = h.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return normed.to(h.dtype) * self.norm, h


class Layer(nn.Module):
    """A piece, the first matmul of an MLP, a piece, and the first matmul of the next layer."""

    def __init__(self, inner: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first = Piece(inner, hidden, group)
        self.up = nn.Parameter(torch.randn(inner, hidden) / math.sqrt(hidden))
        self.second = Piece(inner, hidden, group)
        self.next = nn.Parameter(torch.randn(inner, hidden) / math.sqrt(hidden))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor]:
        normed, h = self.first(x, residual)
        normed, _ = self.second(F.silu(F.linear(normed, self.up)), h)
        return (F.linear(normed, self.next),)


MODELS: dict[str, type[Piece | Layer]] = {"piece": Piece, "layer": Layer}


def run(worlds: Sequence[int], options: Options) -> list[Row]:
    """The rows of groups of so many CPU ranks each, which share out the cores of this process."""
    rows: list[Row] = []
    for world in worlds:
        chosen = Options(**{**asdict(options), "threads": max(1, cores() // world)})
        with tempfile.TemporaryDirectory(prefix="autofuse-bench-") as directory:
            multiprocessing.spawn(_rank, (world, directory, chosen), nprocs=world)
            rows += [Row(**row) for row in json.loads(Path(directory, "rows.json").read_text())]
    return rows


def run_on_gpus(options: Options) -> list[Row]:
    """The rows of the group of torchrun, which has been joined."""
    with torch.device("cuda", torch.cuda.current_device()):
        return list(_rows(options))


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row.us))
    lines = [
        f"| ranks | dtype | what | tokens | {' | '.join(f'{name} us' for name in names)} | Inductor / auto |"
    ]
    lines.append("|---" * (len(names) + 5) + "|")
    for row in rows:
        best = min(row.us.values())
        times = (f"**{us:,.0f}**" if us == best else f"{us:,.0f}" for us in map(row.us.__getitem__, names))
        cells = [str(row.world), row.dtype, row.name, str(row.tokens), *times, f"{row.gain:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rank(rank: int, world: int, directory: str, options: Options) -> None:
    torch.set_num_threads(options.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    rows = list(_rows(options))
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _rows(options: Options) -> Iterator[Row]:
    warnings.filterwarnings("ignore")
    for dtype in options.dtypes:
        for name in MODELS:
            for tokens in options.tokens:
                if not options.rows or any(part in f"{name} {tokens} {dtype}" for part in options.rows):
                    yield _measure(name, tokens, dtype, options)


def _measure(name: str, tokens: int, dtype: str, options: Options) -> Row:
    group = dist.group.WORLD
    assert group is not None
    world = group.size()
    inner = round(options.ratio * options.hidden) // world
    torch.manual_seed(1 + group.rank())
    model = MODELS[name](inner, options.hidden, group).to(getattr(torch, dtype))
    autofuse.replicated(model, parameters=["*norm"], inputs=["residual"])
    x = torch.randn(tokens, inner).to(getattr(torch, dtype))
    residual = torch.randn(tokens, options.hidden, generator=_generator()).to(x.dtype)
    calls: dict[str, Callable[[], Any]] = {}
    did: dict[str, str] = {}
    with torch.no_grad():
        for schedule in (INDUCTOR, *SCHEDULES):
            calls[schedule], did[schedule] = _compiled(model, schedule, (x, residual))
        _check(calls)
        us = _timed(calls, options.seconds)
    return Row(name, world, tokens, dtype, us, did)


def _generator() -> torch.Generator:
    """Of the values that all ranks have."""
    return torch.Generator(torch.get_default_device()).manual_seed(0)


def _compiled(model: nn.Module, schedule: str, args: tuple[Tensor, ...]) -> tuple[Callable[[], Any], str]:
    """A call of the model under a schedule, and what became of its collectives."""
    torch.compiler.reset()
    if schedule == INDUCTOR:
        compiled = torch.compile(model, dynamic=False)
        compiled(*args)
        return lambda: compiled(*args), ""
    options: dict[str, Any] = {"policy": "always", "schedule": schedule}
    compiled = torch.compile(model, backend="autofuse", dynamic=False, options=options)
    with autofuse.debug() as report:
        compiled(*args)
    sites = [site.pattern or site.collective for site in report.sites]
    return lambda: compiled(*args), ", ".join(sites)


def _check(calls: dict[str, Callable[[], Any]]) -> None:
    expected = calls[INDUCTOR]()
    for schedule, call in calls.items():
        for ours, theirs in zip(call(), expected, strict=True):
            far = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
            if not far <= ERROR:
                raise RuntimeError(f"schedule {schedule}: its result is {far:.2g} away from that of Inductor")


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
