"""Executes plans on described machines: the same actions as on real ones, in simulated time.

Programs take the actions of their rank in the order of the plan, one at a time; an action that has to wait
keeps its program. What helpers do runs beside the programs, as does the reading of parts that peers hold.

If the ranks' plans are the same but for a shift of ranks and chunks, and the network is, too, all ranks do
the same at the same time. Then only as many ranks are simulated as the network has different places: what a
rank sends to rank `d` is received from rank `-d`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import (
    Compute,
    Copy,
    Family,
    Order,
    Plan,
    Reduce,
    Send,
    Store,
    Tile,
    Wait,
)

from .events import Engine
from .gpu import GPU, After
from .items import Block, Item, Items
from .machine import Machine
from .network import Link, Links, period
from .work import Work

Done = Callable[[], None]

IN_FLIGHT = 2**21
"""Bytes that a rank reads from peers at a time."""


@dataclass(frozen=True)
class Record:
    """What a program did: an action's kind, its tile, and times in microseconds."""

    rank: int
    program: int
    kind: str
    peer: int
    tile: int
    begin: float
    end: float


@dataclass
class Result:
    """What came out of a simulation. `traffic` and `links` are bytes, of all simulated ranks."""

    us: float
    ranks: int
    """Number of ranks that were simulated."""
    events: int
    traffic: dict[str, float]
    links: dict[Link, float]
    busy: float
    """Microseconds in which the memory of rank 0 served."""
    tracked: int
    records: list[Record] = field(default_factory=list)
    occupancy: list[tuple[float, float, float, float]] = field(default_factory=list)


def simulate(
    shape: PlanShape,
    machine: Machine,
    work: Work,
    *,
    stepped: bool = False,
    record: bool = False,
    everyone: bool = False,
) -> Result:
    """Run the plans of `shape`. `stepped`: no tile of a ring's step begins before the whole step before it
    has arrived, as in collectives with a kernel a step. `record`: also return what every program did.
    `everyone`: simulate all ranks, even where they behave alike."""
    alike = shape.order != Order.OBLIVIOUS and len(set(shape.chunks)) == 1
    alike = alike and (shape.one_shot or len(set(shape.chunks[0])) == 1)
    ranks = min(period(machine.network, shape.world) if alike and not everyone else shape.world, shape.world)
    return _Simulation(shape, machine, work, ranks, stepped, record).run()


class _Simulation:
    def __init__(
        self, shape: PlanShape, machine: Machine, work: Work, ranks: int, stepped: bool, record: bool
    ) -> None:
        self.engine = Engine()
        self.machine, self.work, self.world, self.number = machine, work, shape.world, ranks
        self.stepped = stepped
        self.links = Links(self.engine, machine.network, shape.world, ranks)
        self.records: list[Record] | None = [] if record else None
        self.ended = 0.0
        self.ranks = [_Rank(self, shape.plan(rank), record and not rank) for rank in range(ranks)]

    def run(self) -> Result:
        for rank in self.ranks:
            self.engine.after(self.machine.launch, rank.start)
        self.engine.run()
        stuck = [rank for rank in self.ranks if rank.unfinished]
        if stuck:
            raise RuntimeError(
                f"rank {stuck[0].plan.rank} waits forever with {stuck[0].unfinished} tasks left"
            )
        traffic: dict[str, float] = {}
        for rank in self.ranks:
            left = rank.gpu.cache.flush()
            found = {**rank.gpu.memory.traffic}
            found["compute writes"] = found.get("compute writes", 0.0) + left
            for name, nbytes in found.items():
                traffic[name] = traffic.get(name, 0.0) + nbytes
        first = self.ranks[0].gpu
        return Result(
            self.ended,
            self.number,
            self.engine.ran,
            traffic,
            dict(self.links.carried),
            first.memory.busy,
            max(rank.gpu.tracked for rank in self.ranks),
            self.records or [],
            first.memory.occupancy or [],
        )

    def place(self, rank: int) -> tuple[_Rank, int]:
        """The simulated rank that stands for `rank`, and the shift that maps ranks and chunks onto it."""
        shift = rank - rank % self.number
        return self.ranks[rank % self.number], shift

    def end(self) -> None:
        self.ended = self.engine.now


class _Rank:
    """One rank: its plan as items, its programs, and the signals and tiles that have arrived."""

    def __init__(self, sim: _Simulation, plan: Plan, record: bool) -> None:
        self.sim, self.plan, self.me = sim, plan, plan.rank
        self.engine, self.machine = sim.engine, sim.machine
        self.gpu = GPU(sim.engine, sim.machine, record)
        items = Items(plan, sim.machine, sim.work, sim.stepped)
        self.unfinished = items.count
        self._items, self._beside, self._parts = deque(items.queue), items.beside, items.parts
        self._there: set[Hashable] = set()
        self._waiting: dict[Hashable, list[Done]] = {}
        self._idle = list(range(sim.machine.processors - 1, -1, -1))
        self._pulls: deque[tuple[Hashable, Tile]] = deque()
        self._flying: dict[Hashable, float] = {}
        self._leaving: dict[int, deque[Done]] = {}
        """For each program: what to call when the next of its tiles has left."""
        self._summed: dict[Hashable, Done] = {}
        """What to call when a tracked piece has both of its updates."""

    def start(self) -> None:
        if self.plan.pulls:
            self._pulls.extend(self._announced())
            self._pull()
        for item in self._beside:
            self.when(item.needs, partial(self._begin, item, -1))
        self._dispatch()

    def _dispatch(self) -> None:
        """Give actions to idle programs, in the order of the plan."""
        items = self._items
        while items and (self._idle or isinstance(items[0], Block)):
            item = items.popleft()
            if isinstance(item, Block):
                self._signal(item)
            else:
                program = self._idle.pop()
                self.when(item.needs, partial(self._begin, item, program))

    def when(self, needs: tuple[Hashable, ...], then: Done) -> None:
        """Call `then` when all of `needs` are there."""
        missing = [need for need in dict.fromkeys(needs) if need not in self._there]
        if not missing:
            then()
            return
        after = After(len(missing), then)
        for need in missing:
            self._waiting.setdefault(need, []).append(after)

    def arrive(self, what: Hashable) -> None:
        self._there.add(what)
        for then in self._waiting.pop(what, ()):
            then()

    def _release(self, item: Item, program: int, begin: float) -> None:
        """The program is free for the next action."""
        if program < 0:
            return
        if self.sim.records is not None:
            tile = item.action.tile  # type: ignore[union-attr]
            peer = getattr(item.action, "dest", getattr(item.action, "source", tile.chunk))
            kind = type(item.action).__name__.lower()
            self.sim.records.append(Record(self.me, program, kind, peer, tile.index, begin, self.engine.now))
        self._idle.append(program)
        self._dispatch()

    def _stored(self, item: Item) -> None:
        """All that the item stores is where it belongs."""
        self.sim.end()
        self.unfinished -= 1
        action = item.action
        if isinstance(action, Compute):
            key = action.tile.chunk, action.tile.index
            self._parts[key] -= 1
            if not self._parts[key]:
                self.arrive(("tile", *key))
        item.block.left -= 1
        if not item.block.left:
            self._signal(item.block)

    def _signal(self, block: Block) -> None:
        for signal in block.signals:
            rank, shift = self.sim.place(signal.dest)
            delay = max(self.machine.signal, self.sim.links.latency(self.me, signal.dest))
            source = (self.me - shift) % self.sim.world
            self.engine.after(delay, rank.arrive, (source, signal.slot))

    def _begin(self, item: Item, program: int) -> None:
        action, begin = item.action, self.engine.now
        free = partial(self._release, item, program, begin)
        done = partial(self._stored, item)
        match action:
            case Compute():
                self.gpu.perform(item.task, partial(self._store, item, program, free, done))
            case Send(_, tile, dest):
                self._move(self._bytes(tile), dest, _both(free, done))
            case Reduce(_, tile):
                self._reduce(item, _both(free, done))
            case Copy(_, tile, source):
                if source == self.me:
                    self.engine.after(0.0, _both(free, done))
                else:
                    self._bring(self._bytes(tile), source, _both(free, done))

    def _bytes(self, tile: Tile) -> float:
        return float(tile.size * self.sim.work.itemsize)

    def _store(self, item: Item, program: int, free: Done, done: Done) -> None:
        """Store a computed tile in pieces; the program is free when the last one has left it, or has a buffer
        for the next tile."""
        action: Any = item.action
        tile, pieces = action.tile, self.machine.pieces
        whole = self._bytes(tile) / item.parts
        tracked = action.store is Store.UPDATE and self.machine.tracker
        # The product of a gathered matrix stays here, and its size is not in the plan.
        if not whole or self.plan.family is Family.GATHER:
            self.engine.after(0.0, _both(free, done))
            return
        here = action.dest == self.me or (tracked and action.step)
        all_free = After(pieces, free if here else self._leave(program, free))
        all_done = After(pieces, done)
        for piece in range(pieces):
            nbytes = whole / pieces
            if tracked and action.step:
                entry = (tile.chunk, tile.index, piece)
                self._summed[entry] = all_done
                counted = partial(self._count, tile, piece, nbytes)
                self.gpu.store(nbytes, _both(all_free, counted), past_cache=True)
            elif action.dest == self.me:
                self.gpu.store(nbytes, _both(all_free, all_done))
            else:
                rank, shift = self.sim.place(action.dest)
                if tracked:
                    arrived = partial(rank.update, tile, shift, piece, nbytes, all_done)
                else:
                    arrived = partial(rank.gpu.receive, nbytes, all_done)
                self.sim.links.send(self.me, action.dest, nbytes, arrived, all_free)

    def _leave(self, program: int, free: Done) -> Done:
        """What to call when a tile has left: it frees the program, or a buffer of it."""
        leaving = self._leaving.setdefault(program, deque())
        buffers = self.machine.buffers
        if len(leaving) < buffers:
            leaving.append(_nothing)
            free()
        else:
            leaving.append(_nothing)
            leaving[len(leaving) - 1 - buffers] = free  # when so many are left in flight

        def left() -> None:
            leaving.popleft()()

        return left

    def update(self, tile: Tile, shift: int, piece: int, nbytes: float, done: Done) -> None:
        """A piece of a partial sum arrives for a tile of which this rank computes its own part."""
        mine = Tile((tile.chunk - shift) % self.sim.world, tile.index, tile.rows, tile.cols)
        counted = partial(self._count, mine, piece, nbytes)
        self.gpu.receive(nbytes, _both(counted, done), update=True)

    def _count(self, tile: Tile, piece: int, nbytes: float) -> None:
        """The tracker counts an update. After the second, a copy engine moves the piece to the right
        neighbour, or it is a part of the result."""
        entry = (tile.chunk, tile.index, piece)
        if not self.gpu.count(entry, 2):
            return
        done = self._summed.pop(entry)
        if tile.chunk == self.me:
            done()
            return
        right = (self.me + 1) % self.sim.world
        rank, shift = self.sim.place(right)
        arrived = partial(rank.update, tile, shift, piece, nbytes, done)
        self.gpu.read(nbytes, partial(self.sim.links.send, self.me, right, nbytes, arrived))

    def _move(self, nbytes: float, dest: int, done: Done) -> None:
        """Read here and write at `dest`."""
        if dest == self.me:
            self.engine.after(0.0, done)  # an input that lies where peers read it
            return
        rank, _ = self.sim.place(dest)
        arrived = partial(rank.gpu.receive, nbytes, done)
        self.gpu.read(nbytes, partial(self.sim.links.send, self.me, dest, nbytes, arrived))

    def _bring(self, nbytes: float, source: int, done: Done) -> None:
        """Read at `source` and write here."""
        rank, _ = self.sim.place(source)
        arrived = partial(self.gpu.receive, nbytes, done)
        rank.gpu.read(nbytes, partial(self.sim.links.send, source, self.me, nbytes, arrived))

    def _pull(self) -> None:
        """Bring parts that peers hold, in the sequence of the plan, with few bytes on their way."""
        while self._pulls and (len(self._flying) < 2 or sum(self._flying.values()) < IN_FLIGHT):
            need, tile = self._pulls[0]
            if need not in self._there:
                self.when((need,), self._pull)
                return
            self._pulls.popleft()
            part = ("part", tile.chunk, tile.index)
            self._flying[part] = self._bytes(tile)
            self._bring(self._bytes(tile), tile.chunk, partial(self._pulled, part))

    def _pulled(self, part: Hashable) -> None:
        del self._flying[part]
        self.arrive(part)
        self._pull()

    def _announced(self) -> Iterator[tuple[Hashable, Tile]]:
        """The tiles of peers that a rank computes on, each with the signal that announces it."""
        wait: Hashable = None
        for action in self.plan.actions:
            if isinstance(action, Wait):
                wait = action.source, action.slot
            elif isinstance(action, Compute) and wait and action.tile.chunk != self.me:
                yield wait, action.tile

    def _reduce(self, item: Item, done: Done) -> None:
        """Add up the partial tiles, and store the sum."""
        action: Any = item.action
        nbytes = self._bytes(action.tile) / item.parts
        store = partial(self.gpu.store, nbytes, done)
        if not self.plan.one_shot:
            self.gpu.perform(item.task, store)
            return
        peers = [rank for rank in range(self.sim.world) if rank != self.me]
        after = After(1 + len(peers), store)
        self.gpu.perform(item.task, after)
        for peer in peers:
            self._bring(nbytes, peer, after)


def _both(first: Done, second: Done) -> Done:
    def call() -> None:
        first()
        second()

    return call


def _nothing() -> None:
    pass
