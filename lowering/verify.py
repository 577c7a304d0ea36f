"""Proves plans: runs all ranks on an abstract machine and checks every access with vector clocks.

A cell is the place of one tile in the memory of one rank; it exists twice, for the two parities of the epoch.
Its content is the set of ranks whose contribution it holds. The time of a rank is the number of signals that
it has sent. `clock[r][q] > t` means: by a chain of signals, rank `r` knows of an action of rank `q` after its
access at time `t`, so that the access is over. The signal that a wait receives does not depend on timing, and
hence the clocks do not: one run stands for all interleavings.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from autofuse.lowering.plan import (
    ALIKE,
    EVERYWHERE,
    SIGNAL_SLOTS,
    Action,
    Compute,
    Copy,
    Family,
    Order,
    Plan,
    Reduce,
    Send,
    Signal,
    Store,
    Tile,
    Wait,
    contention,
)

EPOCHS = 3
"""Number of calls that are run. The third call is the first that reuses buffers of an earlier call."""


def verify(plans: Sequence[Plan]) -> None:
    """Prove the plans of all ranks, `plans[r].rank == r`, for one call of an op.

    - Every element is computed once, and delivered to every rank that needs it.
    - No rank waits forever. Store modes and destinations agree.
    - Signals order the store of a tile before every read. No cell is stored twice in a call, or stored again
      while a peer may still read it.
    - A rank that ends a call knows that all peers have begun the call. Hence two alternating buffers are
      enough for any mixture of ops.
    - At each step, no more peers access one rank than the order allows.

    Raises AssertionError with rank, action and tile.
    """
    _check_consistent(plans)
    _Machine(plans).run()
    _check_contention(plans)


def _check_consistent(plans: Sequence[Plan]) -> None:
    first = plans[0]
    for rank, plan in enumerate(plans):
        same = ["op", "order", "world", "block", "one_shot", "visit"]
        if first.family in ALIKE:
            same.append("chunks")
        for name in same:
            ours, theirs = getattr(first, name), getattr(plan, name)
            assert ours == theirs, f"rank {rank}: {name} is {theirs}, on rank 0 it is {ours}"
        assert plan.rank == rank, f"plan {rank} is for rank {plan.rank}"
        assert plan.slots_per_source <= SIGNAL_SLOTS, f"rank {rank} signals slot {plan.slots_per_source - 1}"
    assert len(plans) == first.world, f"{len(plans)} plans for a world of {first.world}"


def _check_contention(plans: Sequence[Plan]) -> None:
    plan, busiest = plans[0], max(contention(plans), default=0)
    if plan.one_shot:
        return
    if plan.order is not Order.OBLIVIOUS:
        assert busiest <= 1, f"{plan.op}: {busiest} peers meet at one rank in {plan.order.value} order"
    elif all(plan.tiles(chunk) for plan in plans for chunk in range(plan.world)):
        assert busiest == plan.world - 1, f"{plan.op}: the oblivious order has a contention of only {busiest}"


@dataclass
class _Cell:
    """The last store into a cell, and the latest read of each rank after it."""

    epoch: int
    content: frozenset[int]
    writer: int
    time: int
    reads: dict[int, int] = field(default_factory=dict)


@dataclass
class _Rank:
    """The position of one rank in its plan, the number of its signals, and its clock."""

    plan: Plan
    signals: int
    clock: list[int]
    epoch: int = 0
    position: int = 0
    delivered: dict[Hashable, frozenset[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        """The rank and its present action, for the start of an error message."""
        where = f"{self.plan.op}, {self.plan.order.value}: rank {self.plan.rank} in call {self.epoch}"
        if self.position == len(self.plan.actions):
            return f"{where} at the end"
        action = self.plan.actions[self.position]
        tile = f" of tile {action.tile}" if hasattr(action, "tile") else ""
        return f"{where} at action {self.position}{tile}, {action}"


class _Machine:
    def __init__(self, plans: Sequence[Plan]) -> None:
        self.world = len(plans)
        self.everyone = frozenset(range(self.world))
        self.ranks = [
            _Rank(plan, sum(isinstance(action, Signal) for action in plan.actions), [0] * self.world)
            for plan in plans
        ]
        self.cells: dict[Hashable, _Cell] = {}
        self.signals: dict[tuple[int, int, int, int], list[int]] = {}

    def run(self) -> None:
        """Run the ranks in turn until all are done or all wait."""
        moving = True
        while moving:
            moving = False
            for rank in self.ranks:
                moving |= self._advance(rank)
        for rank in self.ranks:
            if rank.epoch < EPOCHS:
                self._fail(rank, "this wait never ends")

    def _advance(self, rank: _Rank) -> bool:
        """Do the next action, or end the call. False if the rank is done or must wait."""
        if rank.epoch == EPOCHS:
            return False
        if rank.position == len(rank.plan.actions):
            self._finish(rank)
            return True
        done = self._step(rank, rank.plan.actions[rank.position])
        rank.position += done
        return done

    def _step(self, rank: _Rank, action: Action) -> bool:
        """Do one action. False if it must wait."""
        me = rank.plan.rank
        if isinstance(action, Compute | Send):
            store, dest = action.store, action.dest
            if store is not Store.UPDATE and (store is Store.LOCAL) != (dest == me):
                self._fail(rank, f"the store is {store.value} but the destination is rank {dest}")
        match action:
            case Wait(_, source, slot):
                known = self.signals.get((source, me, slot, rank.epoch))
                if known is None:
                    return False
                rank.clock[:] = map(max, rank.clock, known)
            case Signal(_, dest, slot):
                rank.clock[me] += 1
                if (me, dest, slot, rank.epoch) in self.signals:
                    self._fail(rank, "the slot has been signalled in this call")
                self.signals[me, dest, slot, rank.epoch] = list(rank.clock)
            case Compute():
                self._compute(rank, action)
            case Send(_, tile, dest):
                self._store(rank, dest, *self._source_of(rank, tile))
            case Reduce(_, tile):
                self._reduce(rank, tile)
            case Copy(_, tile, source):
                self._deliver(rank, tile, self._read(rank, source, "final", tile))
        return True

    def _compute(self, rank: _Rank, action: Compute) -> None:
        me, tile, dest = rank.plan.rank, action.tile, action.dest
        mine = frozenset([me])
        match rank.plan.family:
            case Family.REDUCE if action.store is Store.UPDATE:
                total = mine
                if action.step > 0:
                    arrived = self._read(rank, me, "sum", tile)
                    if me in arrived:
                        self._fail(rank, "this rank has been added before")
                    total |= arrived
                if dest == me:
                    self._deliver(rank, tile, total)
                else:
                    self._store(rank, dest, "sum", tile, total)
            case Family.REDUCE | Family.PRODUCE:
                self._store(rank, dest, me, tile, mine)
            case Family.PUBLISH:
                if tile.chunk != me:
                    self._fail(rank, f"rank {tile.chunk} computes this tile")
                self._store(rank, dest, "final", tile, self.everyone)
                self._deliver(rank, tile, self.everyone)
            case Family.GATHER:
                if tile.chunk != me:
                    self._read(rank, tile.chunk if rank.plan.pulls else me, tile.chunk, tile)
                self._deliver(rank, tile, self.everyone)
            case Family.CONSUME:
                for sent in self.ranks[tile.chunk].plan.tiles(me):
                    self._read(rank, me, tile.chunk, sent)
                self._deliver(rank, tile.chunk, self.everyone)

    def _source_of(self, rank: _Rank, tile: Tile) -> tuple[Hashable, Tile, frozenset[int]]:
        """The name of the cell, the tile and the content that a Send stores at its destination."""
        me, family = rank.plan.rank, rank.plan.family
        if family in (Family.REDUCE, Family.PUBLISH):
            if tile.chunk != me or family is Family.PUBLISH:
                return "final", tile, self._read(rank, me, "final", tile)
            if tile not in rank.delivered:
                self._fail(rank, "the tile is sent before it is finished")
            return "final", tile, rank.delivered[tile]
        if family is Family.GATHER and tile.chunk != me:
            return tile.chunk, tile, self._read(rank, me, tile.chunk, tile)
        return me, tile, frozenset([me])

    def _reduce(self, rank: _Rank, tile: Tile) -> None:
        me, plan = rank.plan.rank, rank.plan
        total: frozenset[int] = frozenset()
        for source in range(self.world):
            total |= self._read(rank, source if plan.one_shot else me, source, tile)
        self._deliver(rank, tile, total)
        if plan.op in EVERYWHERE and not plan.one_shot:
            self._store(rank, me, "final", tile, total)

    def _store(self, rank: _Rank, memory: int, name: Hashable, tile: Tile, content: frozenset[int]) -> None:
        me, key = rank.plan.rank, (memory, rank.epoch % 2, name, tile)
        old = self.cells.get(key)
        if old is not None:
            if old.epoch >= rank.epoch:
                self._fail(rank, "the tile has been stored before in this call")
            for peer, time in [(old.writer, old.time), *old.reads.items()]:
                if not self._over(rank, peer, time):
                    self._fail(rank, f"rank {peer} may still use the buffer of call {old.epoch}")
        self.cells[key] = _Cell(rank.epoch, content, me, rank.clock[me])

    def _read(self, rank: _Rank, memory: int, name: Hashable, tile: Tile) -> frozenset[int]:
        me, cell = rank.plan.rank, self.cells.get((memory, rank.epoch % 2, name, tile))
        if cell is None or cell.epoch != rank.epoch:
            self._fail(rank, f"tile {tile} of this call is not, or no longer, in the memory of rank {memory}")
        if not self._over(rank, cell.writer, cell.time):
            self._fail(
                rank, f"no signal orders the store of tile {tile} by rank {cell.writer} before this read"
            )
        cell.reads[me] = rank.clock[me]
        return cell.content

    def _over(self, rank: _Rank, peer: int, time: int) -> bool:
        return peer == rank.plan.rank or rank.clock[peer] > time

    def _deliver(self, rank: _Rank, what: Hashable, content: frozenset[int]) -> None:
        if what in rank.delivered:
            self._fail(rank, f"{what} is delivered a second time")
        if content != self.everyone:
            self._fail(rank, f"the contributions of ranks {sorted(self.everyone - content)} are missing")
        rank.delivered[what] = content

    def _finish(self, rank: _Rank) -> None:
        """Check the delivered tiles and the clock of the rank, and begin the next call."""
        me, plan = rank.plan.rank, rank.plan
        needed: set[Hashable] = set(plan.tiles())
        if plan.op == "matmul_reduce_scatter":
            needed = set(plan.tiles(me))
        elif plan.family is Family.CONSUME:
            needed = set(range(self.world))
        elif plan.family is Family.PRODUCE:
            needed = set()
            for source in self.ranks:  # the kernel returns all received tiles at the end of the call
                for tile in source.plan.tiles(me):
                    self._read(rank, me, source.plan.rank, tile)
        if needed != rank.delivered.keys():
            wrong = ", ".join(sorted(map(str, needed ^ rank.delivered.keys())))
            self._fail(rank, f"missing or not wanted: {wrong}")
        for peer in self.ranks:
            known = rank.clock[peer.plan.rank] > rank.epoch * peer.signals
            if rank.epoch == EPOCHS - 1 and peer is not rank and not known:
                self._fail(rank, f"nothing tells that rank {peer.plan.rank} has begun the call")
        rank.epoch, rank.position, rank.delivered = rank.epoch + 1, 0, {}

    def _fail(self, rank: _Rank, why: str) -> NoReturn:
        raise AssertionError(f"{rank}: {why}")
