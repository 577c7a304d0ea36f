"""One GPU of a simulation: its programs, its memory and cache, and the tracker that triggers transfers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from .events import Engine
from .machine import Machine
from .memory import COMMUNICATION, COMPUTE, Cache, Memory
from .work import Task

Done = Callable[[], None]


class After:
    """Calls `then` when it has been called `count` times."""

    __slots__ = ("count", "then")

    def __init__(self, count: int, then: Done) -> None:
        self.count, self.then = count, then

    def __call__(self) -> None:
        self.count -= 1
        if not self.count:
            self.then()


class GPU:
    """The parts of a GPU that tasks and messages use. It knows nothing of plans."""

    def __init__(self, engine: Engine, machine: Machine, record: bool) -> None:
        self.engine, self.machine = engine, machine
        self.memory = Memory(engine, machine.memory, record)
        self.cache = Cache(machine.cache)
        self._fetched: dict[Hashable, list[Done]] = {}
        """Operands on their way into the cache, and who waits for them."""
        self._updates: dict[Hashable, int] = {}
        self.tracked = 0
        """The largest number of entries that the tracker held."""

    def perform(self, task: Task, done: Done) -> None:
        """Run a task on a free program. Operands of a group are read while the group is computed."""
        machine = self.machine
        if not task.reads and not task.operations and not task.moved:
            self.engine.after(0.0, done)
            return
        # A task without operations streams: its reads are as long as its memory takes.
        share = 1.0 / machine.groups
        time = task.operations * machine.processors / machine.operations + task.moved / machine.move_rate
        self.engine.after(machine.read_latency, self._group, task, machine.groups, time * share, share, done)

    def _group(self, task: Task, left: int, time: float, share: float, done: Done) -> None:
        if not left:
            done()
            return
        then = partial(self._group, task, left - 1, time, share, done)
        if task.operations and self.machine.memory.blocking:
            then = partial(self._stand_still, self.memory.communicated, then)
        after = After(1 + len(task.reads), then)
        for name, nbytes in task.reads:
            self._fetch(None if name is None else (name, left), nbytes * share, after)
        self.engine.after(time, after)

    def _stand_still(self, before: float, then: Done) -> None:
        """Add a part of the time for which the memory has served communication since `before`."""
        now = self.memory.communicated
        stalled = (now - before) * self.machine.memory.blocking
        if stalled < 1e-3:
            then()
        else:
            self.engine.after(stalled, self._stand_still, now, then)

    def _fetch(self, name: Hashable | None, nbytes: float, done: Done) -> None:
        if name is None:
            self.memory.access(COMPUTE, "compute reads", nbytes, done)
            return
        waiting = self._fetched.get(name)
        if waiting is not None:
            waiting.append(done)
            return
        missing, out = self.cache.read(name, nbytes)
        self._write_back(out)
        if missing < 1.0:
            done()
            return
        self._fetched[name] = [done]
        self.memory.access(COMPUTE, "compute reads", missing, partial(self._arrived, name))

    def _arrived(self, name: Hashable) -> None:
        for done in self._fetched.pop(name):
            done()

    def _write_back(self, nbytes: float) -> None:
        if nbytes >= 1.0:
            self.memory.access(COMPUTE, "compute writes", nbytes, _nothing)

    def store(self, nbytes: float, done: Done, past_cache: bool = False) -> None:
        """A program stores into this GPU's memory. Through the cache it waits for the cache alone."""
        if past_cache or not self.machine.cache:
            self.memory.access(COMPUTE, "compute writes", nbytes, done, update=past_cache)
            return
        self._write_back(self.cache.write(nbytes))
        self.engine.after(nbytes * self.machine.processors / self.machine.cache_rate, done)

    def count(self, entry: Hashable, needed: int) -> bool:
        """The tracker: whether this is the last of `needed` updates of an entry."""
        seen = self._updates.get(entry, 0) + 1
        if seen < needed:
            self._updates[entry] = seen
            self.tracked = max(self.tracked, len(self._updates))
            return False
        self._updates.pop(entry, None)
        return True

    def read(self, nbytes: float, done: Done) -> None:
        """Read for a transfer."""
        self.memory.access(COMMUNICATION, "communication reads", nbytes, done)

    def receive(self, nbytes: float, done: Done, update: bool = False) -> None:
        """Write what arrived over a link."""
        self.memory.access(COMMUNICATION, "communication writes", nbytes, done, update)


def _nothing() -> None:
    pass
