"""The clock: events in the order of their times, and of their making where times are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Engine:
    """Runs events. Times are microseconds; nothing is random, so two runs are equal to the last bit."""

    __slots__ = ("_heap", "_made", "now", "ran")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0
        self.now = 0.0
        self.ran = 0
        """The number of events so far."""

    def at(self, time: float, event: Callable[..., None], *args: Any) -> None:
        """Run `event(*args)` at `time`, which must not lie in the past."""
        self._made += 1
        heapq.heappush(self._heap, (time, self._made, event, args))

    def after(self, delay: float, event: Callable[..., None], *args: Any) -> None:
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay, self._made, event, args))

    def run(self) -> float:
        """Run until nothing is left; returns the time of the last event."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, event, args = pop(heap)
            self.ran += 1
            event(*args)
        return self.now
