"""Times of calls that all ranks make together on their GPUs.

Calls are captured as a CUDA graph, which is replayed for some milliseconds: ranks leave a barrier tens of
microseconds apart, which a few short calls would measure instead. What fails on one rank fails on all.
"""

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.bench.timings import Timing

Key = TypeVar("Key")
T = TypeVar("T")

Call: TypeAlias = Callable[[int], Any]
"""Number i of the calls that are made one after another: its result."""
Check: TypeAlias = Callable[[Any, Any], float]
"""The error of what call 0 of the variant of a key returned."""

WARM_UP = 2
MOST_CALLS = 10
CALLS_US = 5000.0
"""A graph has no more calls than these, and than last so long."""
MOST_REPLAYS = 64

WRONG = 0.05
"""An error from which on a result is no result, and not timed; bfloat16 is good for a tenth of it."""


@dataclass(frozen=True)
class Effort:
    """How much is measured; equal on all ranks."""

    samples: int = 5
    rounds: int = 2
    """GPUs throttle: everything is timed in turn so often, and the fastest time counts."""
    sample_us: float = 15000.0
    """Short samples flatter what draws much power: GPUs throttle within milliseconds."""


QUICK = Effort(samples=3, rounds=1, sample_us=6000.0)


def every(value: float) -> list[float]:
    """The `value` of every rank."""
    mine = torch.tensor([value], dtype=torch.float64, device="cuda")
    values = mine.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(values, mine)
    return [float(v) for v in values.tolist()]


def together(work: Callable[[], T]) -> T:
    """`work()`; the same RuntimeError on all ranks if it raised on one, so that all go on alike."""
    failure, result = "", None
    try:
        result = work()
        torch.cuda.synchronize()
    except Exception as error:  # a variant may raise anything, and the others are still worth measuring
        failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    if max(every(float(bool(failure)))):
        failures = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        raise RuntimeError(next(filter(None, failures)))
    return result  # type: ignore[return-value]


def calls_for(roughly_us: float) -> int:
    """Calls in a graph: at least two, in which a call meets the one before it."""
    return max(2, min(MOST_CALLS, round(CALLS_US / roughly_us)))


def time_all(
    variants: Mapping[Key, Call],
    calls: int,
    effort: Effort,
    check: Check,
    eager: Collection[Key] = (),
) -> dict[Key, Timing]:
    """The time of a call of every variant. `eager`: those that wait for the GPU, which no graph can."""
    timings: dict[Key, Timing] = {}
    # All are warmed up before any is captured: a variant that makes memory grow takes it from older graphs.
    for key, call in variants.items():
        try:
            timings[key] = Timing(error=_warm_up(key, call, check))
        except RuntimeError as failure:
            timings[key] = Timing(failed=str(failure))
    repeated = {}
    for key, timing in timings.items():
        if not timing.failed:
            repeated[key] = _repeat(variants[key], calls, key in eager)
    for _ in range(effort.rounds):
        for key, (run, uncaptured) in list(repeated.items()):
            try:
                us, skew_us = _time(run, calls, effort)
            except RuntimeError as failure:
                timings[key] = Timing(eager=uncaptured, failed=str(failure))
                del repeated[key]
                continue
            before = timings[key]
            if before.us is None or us < before.us:
                timings[key] = Timing(us, uncaptured, skew_us, before.error)
    return timings


def _warm_up(key: Key, call: Call, check: Check) -> float:
    """The largest error of all ranks. They meet after every call: one that fails must not miss the next."""
    errors = every(together(lambda: check(key, call(0))))
    for error in errors:
        if not error <= WRONG:  # also if it is no number
            raise RuntimeError(f"the result is wrong: its error is {error:.1e}")
    for i in range(1, WARM_UP):
        together(lambda i=i: call(i))  # type: ignore[misc]
    return max(errors)


def _repeat(call: Call, calls: int, eager: bool) -> tuple[Callable[[], object], bool]:
    """Something that makes `calls` calls, and whether it does so eagerly since they cannot be captured."""

    def eagerly() -> None:
        for i in range(calls):
            call(i)

    if eager:
        return eagerly, True
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()

    def capture() -> None:
        # NCCL's watchdog is another thread, whose calls are no reason to fail.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            eagerly()

    try:
        together(capture)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # where a capture that fails leaves its own
        return eagerly, True
    return graph.replay, False


def _time(run: Callable[[], object], calls: int, effort: Effort) -> tuple[float, float]:
    """(microseconds a call on the slowest rank, difference to the fastest rank)."""
    once = max(every(together(lambda: _sample(run, 1))))
    replays = max(1, min(MOST_REPLAYS, round(effort.sample_us / once)))
    samples = together(lambda: [_sample(run, replays) for _ in range(effort.samples)])
    ranks = every(statistics.median(samples) / (replays * calls))
    return max(ranks), max(ranks) - min(ranks)


def _sample(run: Callable[[], object], times: int) -> float:
    """Microseconds of `times` runs on this rank, from a barrier on."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def push_rate(mine: Tensor, views: list[Tensor]) -> float:
    """GB/s that a rank sends while the copy engines of all ranks store distinct parts to all peers at once.

    views[r]: the memory of rank r, of the size of `mine`, as this rank maps it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    part = mine.numel() // world
    streams = [torch.cuda.Stream() for _ in range(world)]

    def push() -> None:
        current = torch.cuda.current_stream()
        for i in range(1, world):
            p = (rank + i) % world
            streams[p].wait_stream(current)
            with torch.cuda.stream(streams[p]):
                views[p][rank * part : (rank + 1) * part].copy_(mine[p * part : (p + 1) * part])
            current.wait_stream(streams[p])

    push()
    us = max(every(statistics.median(_sample(push, 1) for _ in range(5))))
    return (world - 1) * part * mine.element_size() / us / 1e3


def copy_rate(source: Tensor, target: Tensor) -> float:
    """GB/s that this GPU's memory is read and written, together, by a copy."""
    target.copy_(source)
    us = max(every(statistics.median(_sample(lambda: target.copy_(source), 1) for _ in range(5))))
    return 2 * source.nbytes / us / 1e3


def relative_error(result: Tensor, exact: Tensor) -> float:
    """|result - exact| / |exact| (Frobenius). RuntimeError if the shapes differ."""
    if result.shape != exact.shape:
        raise RuntimeError(f"expected a result of shape {tuple(exact.shape)}, got {tuple(result.shape)}")
    return float((result.double() - exact).norm() / exact.norm())
