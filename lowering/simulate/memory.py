"""A memory as a queue with an arbiter, and the last-level cache before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable

from .events import Engine
from .machine import Arbitration, MemoryKind

COMPUTE, COMMUNICATION = 0, 1
"""The two streams of requests."""

Done = Callable[[], None]


class _Request:
    __slots__ = ("cost", "done", "left")

    def __init__(self, left: float, cost: float, done: Done) -> None:
        self.left, self.cost, self.done = left, cost, done
        # left: bytes that have not entered the queue; cost: microseconds a byte.


class Memory:
    """Serves bursts of two streams in the order of the arbiter.

    Bursts leave a stream for the queue while the queue has room, and the queue is served first come, first
    served. `traffic` counts bytes by the name that every request gives.
    """

    def __init__(self, engine: Engine, kind: MemoryKind, record: bool = False) -> None:
        self.engine, self.kind = engine, kind
        self.traffic: dict[str, float] = {}
        self.busy = 0.0
        """Microseconds in which it served."""
        self.communicated = 0.0
        """Microseconds in which it served communication."""
        self.occupancy: list[tuple[float, float, float, float]] | None = [] if record else None
        """(time, bytes in the queue, bytes of compute and of communication that wait before it)."""
        self._streams: tuple[deque[_Request], deque[_Request]] = (deque(), deque())
        self._queue: deque[tuple[int, float, float, Done | None]] = deque()
        self._queued = 0.0
        self._last = COMMUNICATION
        self._issued = 0.0
        self._serving = False

    def access(self, stream: int, name: str, nbytes: float, done: Done, update: bool = False) -> None:
        """Read, write or update `nbytes`; `done` is called when the last burst has been served."""
        cost = 1.0
        if update:
            cost = self.kind.update_cost if self.kind.near_memory else 2.0
        self.traffic[name] = self.traffic.get(name, 0.0) + nbytes
        self._streams[stream].append(_Request(nbytes, cost / self.kind.rate, done))
        self._issue()

    def _issue(self) -> None:
        """Move bursts into the queue while it has room."""
        kind, streams = self.kind, self._streams
        while self._queued < kind.queue and (streams[0] or streams[1]):
            stream = self._next()
            if stream is None:
                break
            if stream == COMMUNICATION:
                self._issued = self.engine.now
            request = streams[stream][0]
            burst = min(request.left, kind.burst)
            request.left -= burst
            if request.left <= 0:
                streams[stream].popleft()
            done = None if request.left > 0 else request.done
            self._queue.append((stream, burst, burst * request.cost, done))
            self._queued += burst
        if self.occupancy is not None:
            waiting = (sum(request.left for request in stream) for stream in streams)
            self.occupancy.append((self.engine.now, self._queued, next(waiting), next(waiting)))
        if self._queue and not self._serving:
            self._serving = True
            self.engine.after(self._queue[0][2], self._served)

    def _next(self) -> int | None:
        compute, communication = self._streams
        if self.kind.arbitration is Arbitration.ROUND_ROBIN:
            if not compute or not communication:
                return COMPUTE if compute else COMMUNICATION
            self._last = 1 - self._last
            return self._last
        if communication and compute and self.engine.now - self._issued > self.kind.starvation:
            return COMMUNICATION
        if compute:
            return COMPUTE
        return COMMUNICATION if self._queued < self.kind.threshold else None

    def _served(self) -> None:
        stream, burst, time, done = self._queue.popleft()
        self._queued -= burst
        self.busy += time
        if stream == COMMUNICATION:
            self.communicated += time
        self._serving = False
        if done is not None:
            done()
        self._issue()


class Cache:
    """A cache with random replacement, in the mean: every byte that comes in throws out a random one.

    Entries are pieces of operands. Of an entry, the part `exp(-x / size)` remains after `x` bytes came into a
    full cache. So results do not depend on the size of lines or of entries, and nothing is random.
    """

    def __init__(self, size: float) -> None:
        self.size = size
        self._age = 0.0
        """Bytes that came in since the cache was full, over its size."""
        self._filled = 0.0
        self._dirty = 0.0
        self._entries: dict[Hashable, tuple[float, float]] = {}

    def read(self, key: Hashable, nbytes: float) -> tuple[float, float]:
        """Read all of an entry: (bytes that are missing and come in, dirty bytes that go out)."""
        if not self.size:
            return nbytes, 0.0
        resident, age = self._entries.get(key, (0.0, 0.0))
        missing = nbytes - resident * math.exp(age - self._age)
        out = self._insert(missing)
        self._entries[key] = nbytes, self._age
        return missing, out

    def write(self, nbytes: float) -> float:
        """Write what nobody reads again: dirty bytes that go out."""
        if not self.size:
            return nbytes
        out = self._insert(nbytes)
        self._dirty += nbytes
        return out

    def flush(self) -> float:
        """The dirty bytes that are left."""
        left, self._dirty = self._dirty, 0.0
        return left

    def _insert(self, nbytes: float) -> float:
        room = min(nbytes, self.size - self._filled)
        self._filled += room
        share = (nbytes - room) / self.size
        self._age += share
        out = self._dirty * -math.expm1(-share)
        self._dirty -= out
        return out
