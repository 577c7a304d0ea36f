"""Times calls that all ranks of a group make together on their GPUs, several variants side by side.

- Calls are captured as a CUDA graph, which is replayed for some milliseconds. Ranks leave a barrier some
  microseconds apart, and these microseconds would dominate the time of a few short calls.
- All variants are sampled in turn, round after round. GPUs at their power limit become slower within seconds,
  and so all variants run at the same clocks.
- All decisions follow from the timings of all ranks. A variant that fails on one rank fails on all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .timing import Effort, Key, Timing, fastest, in_turn

T = TypeVar("T")

Call: TypeAlias = Callable[[int], Any]
"""`call(i)` makes call number i and returns its result."""
Check: TypeAlias = Callable[[Key, Any], float]
"""`check(key, result)` returns the error of the result of call 0 of the variant `key`."""

WARM_UP_CALLS = 2
WARM_UP_US = 150e3
"""Microseconds of work before anything is timed. A cool GPU runs at clocks that it cannot keep."""
MOST_REPLAYS = 64

WRONG = 0.05
"""A variant whose error is larger fails and is not timed. Roundings of bfloat16 cause a tenth of this error.
"""


def _on_gpus() -> bool:
    """Whether the ranks have GPUs; the benchmark of models also runs on CPU ranks."""
    return torch.cuda.is_initialized()


def every(values: Sequence[float], group: ProcessGroup | None = None) -> list[list[float]]:
    """The `values` of every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device="cuda" if _on_gpus() else "cpu")
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, mine, group=group)
    found: list[list[float]] = torch.stack(ranks).tolist()
    return found


def slowest(us: float, group: ProcessGroup | None = None) -> float:
    """The time of the slowest rank."""
    return max(of_rank for (of_rank,) in every([us], group))


def together(work: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """`work()`; the same RuntimeError on all ranks if it raised on one, so that all go on alike."""
    failure, result = "", None
    try:
        result = work()
        if _on_gpus():
            torch.cuda.synchronize()
    except Exception as error:  # a variant may raise anything, and the others are still worth timing
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if slowest(float(bool(failure)), group):
        failures = [""] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group=group)
        raise RuntimeError(next(filter(None, failures)))
    return result  # type: ignore[return-value]


def sample(run: Callable[[], object], times: int, group: ProcessGroup | None = None) -> float:
    """Microseconds of `times` runs on this rank, from a barrier of the GPUs (CPU ranks: of the hosts) on."""
    if not _on_gpus():
        dist.barrier(group)
        begun = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begun) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # on the stream: hosts leave later, and apart
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def time_all(
    variants: Mapping[Key, Call],
    calls: int,
    effort: Effort,
    check: Check[Key] | None = None,
    *,
    finals: Effort | None = None,
    eager: Collection[Key] = (),
    group: ProcessGroup | None = None,
) -> dict[Key, Timing]:
    """The time of a call of every variant.

    finals: with how much effort those that may be the fastest are timed again, which then counts; the fastest
    of all has always been. eager: those that wait for the GPU, which no graph can.
    """
    timer: _Timer[Key] = _Timer(calls, group)
    # All are warmed up before any is captured: a variant that makes memory grow takes it from older graphs.
    for key, call in variants.items():
        timer.warm_up(key, call, check)
    for key, call in variants.items():
        timer.prepare(key, call, key in eager)
    timer.heat(effort)
    timer.time(list(variants), effort)
    again: set[Key] = set()
    while finals and (few := fastest(timer.timings)) and few[0] not in again:
        few = [key for key in few if key not in again]
        timer.time(few, finals)
        again.update(few)
    return timer.timings


class _Timer(Generic[Key]):
    """Variants, and what is known of their times."""

    def __init__(self, calls: int, group: ProcessGroup | None) -> None:
        self._calls, self._group = calls, group
        self.timings: dict[Key, Timing] = {}
        self._runs: dict[Key, tuple[Callable[[], object], float]] = {}
        """A function that makes all calls of a variant, and about how many microseconds it takes; of variants
        that have not failed."""

    @contextmanager
    def _unless_it_fails(self, key: Key) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:
            self.timings[key] = Timing(eager=self.timings[key].eager, failed=str(failure))
            self._runs.pop(key, None)

    def warm_up(self, key: Key, call: Call, check: Check[Key] | None) -> None:
        """The first calls."""
        self.timings[key] = Timing()
        with self._unless_it_fails(key):
            self.timings[key] = Timing(error=_warm_up(key, call, check, self._group))

    def prepare(self, key: Key, call: Call, eager: bool) -> None:
        """Captures the calls, and runs them for the first time."""
        if self.timings[key].failed:
            return
        run, eager = _repeat(call, self._calls, eager, self._group)
        self.timings[key] = replace(self.timings[key], eager=eager)
        with self._unless_it_fails(key):
            together(run, self._group)
            us = together(lambda: sample(run, 1, self._group), self._group)
            self._runs[key] = run, slowest(us, self._group)

    def heat(self, effort: Effort) -> None:
        """Rounds that do not count."""
        keys = list(self._runs)
        round_us = sum(us * _times(us, effort) for _, us in self._runs.values())
        for number in range(math.ceil(WARM_UP_US / round_us) if keys else 0):
            self._round(in_turn(keys, number), effort)

    def time(self, keys: Sequence[Key], effort: Effort) -> None:
        """The medians of the rounds, each of which lasts as long as on its slowest rank."""
        rounds = [self._round(in_turn(keys, number), effort) for number in range(effort.rounds)]
        for key in keys:
            if key in self._runs:
                of_ranks = every([samples[key] for samples in rounds], self._group)
                of_rounds = list(zip(*of_ranks, strict=True))
                us = statistics.median(map(max, of_rounds))
                skew_us = statistics.median(max(times) - min(times) for times in of_rounds)
                self.timings[key] = replace(self.timings[key], us=us, skew_us=skew_us)

    def _round(self, keys: Sequence[Key], effort: Effort) -> dict[Key, float]:
        """Microseconds a call on this rank: one sample of each."""
        found = {}
        for key in keys:
            if key in self._runs:
                run, once_us = self._runs[key]
                times = _times(once_us, effort)
                with self._unless_it_fails(key):
                    us = together(lambda r=run, n=times: sample(r, n, self._group), self._group)  # type: ignore[misc]
                    found[key] = us / (times * self._calls)
        return found


def _times(once_us: float, effort: Effort) -> int:
    """How often a sample repeats a run that takes `once_us`."""
    return max(1, min(MOST_REPLAYS, round(effort.sample_us / once_us)))


def _warm_up(key: Key, call: Call, check: Check[Key] | None, group: ProcessGroup | None) -> float | None:
    """The largest error of all ranks. They meet after every call: one that fails must not miss the next."""
    error = together(lambda: None if check is None else check(key, call(0)), group)
    if error is not None:
        errors = [of_rank for (of_rank,) in every([error], group)]
        for of_rank in errors:
            if not of_rank <= WRONG:  # also if it is no number
                raise RuntimeError(f"the result is wrong: its error is {of_rank:.1e}")
        error = max(errors)
    for i in range(WARM_UP_CALLS):
        together(lambda i=i: call(i), group)  # type: ignore[misc]
    return error


def _repeat(
    call: Call, calls: int, eager: bool, group: ProcessGroup | None
) -> tuple[Callable[[], object], bool]:
    """A function that makes `calls` calls, and whether it makes them eagerly, as asked or since they cannot
    be captured."""

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
        together(capture, group)
    except RuntimeError:
        torch.cuda.set_stream(stream)  # where a capture that fails leaves its own
        return eagerly, True
    return graph.replay, False
