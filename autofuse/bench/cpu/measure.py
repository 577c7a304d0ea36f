"""What every rank does: compile both ways, check against float64, and time the two in turn."""

import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

import autofuse
from autofuse.bench.cpu.cases import MOST_SETS, ROTATION_BYTES, Case, Inputs, cases

WARM_UP = 3
BLOCK_S = 0.05
"""Calls are timed in blocks of about this length, as in a model that keeps running. Ranks leave a barrier up
to milliseconds apart; a block of one or two calls would measure that instead."""
MOST_CALLS = 256


Event: TypeAlias = tuple[str, int, int]
"""The row that is measured next, how many are done, and how many there are."""


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks."""

    rows: tuple[str, ...]
    """A row is measured if its name contains one of these; all if empty."""
    policy: str
    dtype: str
    repeats: int
    """The least number of repetitions of a row."""
    seconds: float
    """The least time that is spent on a row."""
    threads: int = 1
    """Of every rank."""


@dataclass(frozen=True)
class Row:
    """One measured row. Times in microseconds a call of the slowest rank, medians over the repetitions."""

    name: str
    world: int
    inductor_us: float
    autofuse_us: float
    fused: str
    """`fused`, or the reasons why a site was kept."""
    inductor_error: float
    """Largest difference to float64 relative to the largest value, over all ranks."""
    autofuse_error: float
    predicted: float | None
    """Speed-up of all sites together by the cost model; None if unknown."""
    repeats: int
    tasks: tuple[str, ...] = ()
    """The task of each site that the cost model was asked about: `passes.choice.cost_model.Task.key`."""

    @property
    def speedup(self) -> float:
        return self.inductor_us / self.autofuse_us


def run_rank(rank: int, world: int, directory: str, options: Options, events: "SimpleQueue[Event]") -> None:
    """All that a rank does. Rank 0 reports each row to `events` and writes all rows as JSON to
    `directory`."""
    # The collectives are being renamed, and the oldest torch that is supported has only the old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(options.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    rows = []
    with torch.no_grad():
        chosen = list(_chosen(rank, world, options))
        for done, case in enumerate(chosen):
            if rank == 0:
                events.put((f"{case.name}, {world} ranks", done, len(chosen)))
            rows.append(_measure(case, rank, world, options))
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _chosen(rank: int, world: int, options: Options) -> Iterator[Case]:
    for case in cases(rank, world, getattr(torch, options.dtype)):
        if not options.rows or any(part in case.name for part in options.rows):
            yield case


def _measure(case: Case, rank: int, world: int, options: Options) -> Row:
    generator = torch.Generator().manual_seed(1 + rank)
    sets = [case.inputs(generator)]
    count = min(MOST_SETS, max(2, math.ceil(ROTATION_BYTES / _nbytes(sets[0]))))
    sets += [case.inputs(generator) for _ in range(count - 1)]

    torch.compiler.reset()
    stock = torch.compile(case.function, dynamic=False)
    own = torch.compile(case.function, backend="autofuse", dynamic=False, options={"policy": options.policy})
    exact = case.function(*(_double(t) for t in sets[0]))
    first = stock(*sets[0])
    with autofuse.debug() as report:
        errors = _largest([_error(first, exact), _error(own(*sets[0]), exact)])

    repeats, calls = _plan((stock, own), sets, options)
    times: list[list[float]] = [[], []]
    for i in range(repeats):
        for which, function in enumerate((stock, own)):
            times[which].append(_block(function, sets, i * calls, calls))
    inductor_us, autofuse_us = (1e6 * statistics.median(_largest(t)) for t in times)
    kept = dict.fromkeys(f"kept: {site.reason.value}" for site in report.kept if site.reason is not None)
    return Row(
        name=case.name,
        world=world,
        inductor_us=inductor_us,
        autofuse_us=autofuse_us,
        fused=", ".join(kept) or "fused",
        inductor_error=errors[0],
        autofuse_error=errors[1],
        predicted=_predicted(report),
        repeats=repeats,
        tasks=tuple(site.prediction.task for site in report.sites if site.prediction is not None),
    )


def _predicted(report: autofuse.Report) -> float | None:
    fused, unfused = 0.0, 0.0
    for site in report.sites:
        guess = site.prediction
        if guess is None or guess.fused_us is None or guess.unfused_us is None:
            return None
        fused, unfused = fused + guess.fused_us, unfused + guess.unfused_us
    return unfused / fused if fused else None


def _plan(
    compiled: Sequence[Callable[..., Tensor]], sets: Sequence[Inputs], options: Options
) -> tuple[int, int]:
    """(repetitions, calls in a block), the same on all ranks."""
    for function in compiled:
        _block(function, sets, 0, WARM_UP)
    slowest = max(_block(function, sets, 0, WARM_UP) for function in compiled)
    (each,) = _largest([slowest])
    calls = max(1, min(MOST_CALLS, round(BLOCK_S / each)))
    return max(options.repeats, math.ceil(options.seconds / (each * calls * len(compiled)))), calls


def _block(function: Callable[..., Tensor], sets: Sequence[Inputs], start: int, calls: int) -> float:
    """Seconds a call, from a barrier on."""
    dist.barrier()
    begin = time.perf_counter()
    for i in range(start, start + calls):
        function(*sets[i % len(sets)])
    return (time.perf_counter() - begin) / calls


def _largest(values: Sequence[float]) -> list[float]:
    """The largest of every value over all ranks."""
    result = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return [float(v) for v in result]


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())


def _double(value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    if isinstance(value, list):
        return [_double(v) for v in value]  # type: ignore[misc]
    return value.double() if value.is_floating_point() else value


def _nbytes(inputs: Inputs) -> int:
    tensors = [t for value in inputs for t in (value if isinstance(value, list) else [value])]
    return sum(t.nbytes for t in tensors)
