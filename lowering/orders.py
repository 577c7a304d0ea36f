"""Makes plans.

Each generator below yields the actions of one rank for one family and order. In all of them, a chunk is cut
into tiles, its tiles are grouped into slices, and one signal covers a slice. An empty chunk is one empty
slice: its signal is sent and awaited, too, because the reuse of buffers relies on these signals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from autofuse.lowering.plan import (
    ALIKE,
    EVERYWHERE,
    FAMILIES,
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
    Span,
    Store,
    Tile,
    Wait,
    cut,
)

Slices = Sequence[Sequence[Tile]]
Extents = tuple[tuple[int, int], ...]
"""(rows, cols) of every chunk."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """The arguments of `make_plan` for one call, without the rank.

    `chunks` has an entry for every rank, or one entry that all ranks share.
    """

    op: str
    order: str
    world: int
    chunks: tuple[Extents, ...]
    block: tuple[int, int]
    one_shot: bool = False
    visit: int = 0

    @classmethod
    def of_any_size(cls, op: str, order: str, world: int) -> PlanShape:
        """Plans with one tile for each chunk, of any size: for rows that are counted at run time."""
        return cls(op, order, world, (((1, 1),) * world,), (1, 1))

    @property
    def sized(self) -> bool:
        """Whether the extents count elements. Otherwise a tile stands for a chunk of any size."""
        return self.block != (1, 1)

    def plan(self, rank: int) -> Plan:
        """The plan of `rank`. ValueError as in `make_plan`."""
        chunks = self.chunks[rank if len(self.chunks) > 1 else 0]
        return make_plan(self.op, self.order, self.world, rank, chunks, self.block, self.one_shot, self.visit)

    def plans(self) -> list[Plan]:
        """The plans of all ranks."""
        return [self.plan(rank) for rank in range(self.world)]


@lru_cache(maxsize=1024)
def make_plan(
    op: str,
    order: str,
    world: int,
    rank: int,
    chunks: tuple[tuple[int, int], ...],
    block: tuple[int, int],
    one_shot: bool = False,
    visit: int = 0,
) -> Plan:
    """The plan of `rank` for one call of `op`.

    `chunks[c] = (rows, cols)` is the extent of chunk `c` (what that is: `plan.Family`); for the families in
    `plan.ALIKE` all ranks must give the same chunks, an exchange may differ from rank to rank. Chunks may
    be ragged and empty. `one_shot` asks for the all_reduce in which every rank reduces everything, `visit`
    for the reduction that computes so many tiles of every chunk in turn (0: each chunk as a whole).

    Raises ValueError for an unknown op or order, a rank, chunk or block out of range, a `one_shot` or `visit`
    that the op or order does not have, and a ring or visits that are too many for the signal pad.
    """
    _check(op, order, world, rank, chunks, block, one_shot, visit)
    order = Order(order)
    family, twice = FAMILIES[op], op in EVERYWHERE and not one_shot
    tiles = [cut(c, extent, block) for c, extent in enumerate(chunks)]
    phases = (2 if twice else 1) * (max(1, world - 1) if order is Order.RING else 1)
    if family in ALIKE and phases > SIGNAL_SLOTS:
        raise ValueError(
            f"{op}: a ring of {world} ranks needs {phases} signal slots, there are {SIGNAL_SLOTS}; "
            "use order='direct'"
        )
    limit = max(1, SIGNAL_SLOTS // phases)
    runs = [_visits(t, visit) if visit else _slices(t, limit) for t in tiles]
    if visit and max(map(len, runs)) > limit:
        raise ValueError(
            f"{op}: {max(map(len, runs))} visits of {visit} tiles a chunk need as many signal slots, there "
            f"are {limit}; visit at least {-(-max(map(len, tiles)) // limit)} tiles"
        )
    actions: Iterator[Action]
    if one_shot:
        actions = _one_shot(world, rank, _slices([tile for t in tiles for tile in t], SIGNAL_SLOTS))
    elif family is Family.REDUCE and order is Order.RING:
        actions = _reduce_ring(world, rank, runs, twice)
    elif visit:
        actions = _reduce_in_turns(order, world, rank, runs, twice)
    elif family is Family.REDUCE:
        actions = _reduce(order, world, rank, runs, twice)
    elif family is Family.GATHER and order is Order.RING:
        actions = _circulate(world, rank, runs, family)
    elif family is Family.GATHER:
        actions = _gather(order, world, rank, runs)
    elif family is Family.PUBLISH and order is Order.RING:
        actions = _circulate(world, rank, runs, family)
    elif family is Family.PUBLISH:
        actions = _publish(order, world, rank, runs)
    elif family is Family.PRODUCE:
        actions = _produce(order, world, rank, tiles)
    else:
        actions = _consume(order, world, rank, tiles)
    return Plan(op, order, world, rank, chunks, block, tuple(actions), one_shot, visit)


def _check(
    op: str,
    order: str,
    world: int,
    rank: int,
    chunks: tuple[tuple[int, int], ...],
    block: tuple[int, int],
    one_shot: bool,
    visit: int,
) -> None:
    if op not in FAMILIES:
        raise ValueError(f"no plan for op {op!r}; expected one of {', '.join(FAMILIES)}")
    if order not in {o.value for o in Order}:
        raise ValueError(f"unknown order {order!r}; expected one of {', '.join(o.value for o in Order)}")
    if not 0 <= rank < world:
        raise ValueError(f"{op}: rank {rank} is outside of a world of {world}")
    if len(chunks) != world or any(rows < 0 or cols < 0 for rows, cols in chunks):
        raise ValueError(f"{op}: expected {world} chunks (rows, cols) of non-negative extent, got {chunks}")
    if min(block) < 1:
        raise ValueError(f"{op}: the block must be at least 1x1, got {block}")
    if one_shot and (op != "matmul_all_reduce" or order == Order.RING):
        raise ValueError(f"{op}: only matmul_all_reduce has a one-shot plan, and not in ring order")
    if visit and (FAMILIES[op] is not Family.REDUCE or order == Order.RING or one_shot or visit < 0):
        raise ValueError(
            f"{op}: only a reduction in direct or oblivious order, and not in one shot, visits some tiles of "
            f"every chunk in turn; expected 0, or there a positive number of tiles, got {visit}"
        )


def _slices(tiles: Sequence[Tile], limit: int) -> Slices:
    """Cut `tiles` into at least one and at most `limit` runs of almost equal length."""
    count = max(1, min(len(tiles), limit))
    ends = [len(tiles) * i // count for i in range(count + 1)]
    return [tiles[start:stop] for start, stop in pairwise(ends)]


def _visits(tiles: Sequence[Tile], visit: int) -> Slices:
    """Cut `tiles` into runs of `visit` tiles, with a shorter last run; at least one run."""
    return [tiles[start : start + visit] for start in range(0, max(1, len(tiles)), visit)]


def _sequence(order: Order, world: int, rank: int, own_last: bool) -> list[int]:
    """All ranks in the sequence in which `rank` serves them."""
    if order is Order.OBLIVIOUS:
        return list(range(world))
    return [(rank + own_last + i) % world for i in range(world)]


def _peers(world: int, rank: int) -> list[int]:
    return [(rank + i) % world for i in range(1, world)]


def _placed(rank: int, dest: int) -> Store:
    return Store.LOCAL if dest == rank else Store.REMOTE


def _reduce(
    order: Order, world: int, rank: int, runs: Sequence[Slices], everywhere: bool
) -> Iterator[Action]:
    """Partial tiles are stored at their owners, which reduce them. `everywhere`: all ranks then copy the
    result."""
    peers = _peers(world, rank)
    reduced = max(map(len, runs))  # the lower slots are for the slices that are reduced
    own_last = order is Order.DIRECT
    sequence = _sequence(order, world, rank, own_last=own_last)
    for step, owner in enumerate(sequence[: world - own_last]):
        for slot, run in enumerate(runs[owner]):
            yield from (Compute(step, tile, owner, _placed(rank, owner)) for tile in run)
            if owner != rank:
                yield Signal(step, owner, slot)
    # In each round, one own slice is computed, the slice before it is reduced, and the slice before that is
    # copied from its owner, while it is in the caches. In direct order, the own slices are computed last. One
    # peer at a time reads from an owner: from round 2 on, a round has one step for each owner.
    owners = (peers if own_last else sequence) if everywhere else []
    for round_ in range(reduced + 2):
        step = world - 1 + min(round_, 2) + max(0, round_ - 2) * max(1, len(owners))
        if own_last and round_ < len(runs[rank]):
            yield from (Compute(step, tile, rank, Store.LOCAL) for tile in runs[rank][round_])
        slot = round_ - 1
        if 0 <= slot < len(runs[rank]):
            yield from (Wait(step, peer, slot) for peer in peers)
            yield from (Reduce(step, tile) for tile in runs[rank][slot])
            if everywhere:
                yield from (Signal(step, peer, reduced + slot) for peer in peers)
        slot = round_ - 2
        for i, owner in enumerate(owners):
            if owner != rank and 0 <= slot < len(runs[owner]):
                yield Wait(step + i, owner, reduced + slot)
                yield from (Copy(step + i, tile, owner) for tile in runs[owner][slot])


def _reduce_in_turns(
    order: Order, world: int, rank: int, runs: Sequence[Slices], everywhere: bool
) -> Iterator[Action]:
    """As `_reduce`, but the chunks take turns, so that all links are used throughout the compute.

    A visit computes one slice. The own slice is reduced one turn later; slices of owners are copied two turns
    later.
    """
    peers, turns = _peers(world, rank), max(map(len, runs))
    sequence = _sequence(order, world, rank, own_last=order is Order.DIRECT)
    owners = sequence if everywhere else []
    for turn in range(turns + 1 + everywhere):
        step = turn * (world + 1 + len(owners))
        for i, owner in enumerate(sequence):
            if turn < len(runs[owner]):
                yield from (Compute(step + i, t, owner, _placed(rank, owner)) for t in runs[owner][turn])
                if owner != rank:
                    yield Signal(step + i, owner, turn)
        slot = turn - 1
        if 0 <= slot < len(runs[rank]):
            yield from (Wait(step + world, peer, slot) for peer in peers)
            yield from (Reduce(step + world, tile) for tile in runs[rank][slot])
            if everywhere:
                yield from (Signal(step + world, peer, turns + slot) for peer in peers)
        slot = turn - 2
        for i, owner in enumerate(owners, start=step + world + 1):
            if owner != rank and 0 <= slot < len(runs[owner]):
                yield Wait(i, owner, turns + slot)
                yield from (Copy(i, tile, owner) for tile in runs[owner][slot])


def _one_shot(world: int, rank: int, runs: Slices) -> Iterator[Action]:
    """Every rank computes all tiles in its own memory and reduces all tiles from the memories of all ranks.

    A slice is reduced after the next slice is computed, while it is in the caches.
    """
    peers = _peers(world, rank)
    for step in range(len(runs) + 1):
        if step < len(runs):
            yield from (Compute(step, tile, rank, Store.LOCAL) for tile in runs[step])
            yield from (Signal(step, peer, step) for peer in peers)
        if step:
            yield from (Wait(step, peer, step - 1) for peer in peers)
            yield from (Reduce(step, tile) for tile in runs[step - 1])


def _reduce_ring(world: int, rank: int, runs: Sequence[Slices], everywhere: bool) -> Iterator[Action]:
    """Partial sums move to the right neighbour and end at their owner. `everywhere`: finished chunks move
    on."""
    left, right, stride = (rank - 1) % world, (rank + 1) % world, max(map(len, runs))
    for step in range(world):
        last = step == world - 1
        for i, run in enumerate(runs[(rank - 1 - step) % world]):
            if step:
                yield Wait(step, left, (step - 1) * stride + i)
            yield from (Compute(step, tile, rank if last else right, Store.UPDATE) for tile in run)
            if not last:
                yield Signal(step, right, step * stride + i)
    if everywhere:
        yield from _circulate(world, rank, runs, Family.REDUCE, first=world)


def _circulate(
    world: int, rank: int, runs: Sequence[Slices], family: Family, first: int = 0
) -> Iterator[Action]:
    """Chunk `rank - s` passes at stage `s`: it is handed to the right, then copied out or, in a GATHER plan,
    computed on.

    The own chunk is an input (GATHER), has been reduced into the output (REDUCE), or is computed (PUBLISH).

    `first` is the step of stage 0; the slots of the steps before it, one fewer than steps, are taken.
    """
    left, right, stride = (rank - 1) % world, (rank + 1) % world, max(map(len, runs))
    taken = max(0, first - 1) * stride
    for stage in range(world):
        step = first + stage
        for i, run in enumerate(runs[(rank - stage) % world]):
            if stage:
                yield Wait(step, left, taken + (stage - 1) * stride + i)
            elif family is Family.PUBLISH:
                yield from (Compute(step, tile, rank, Store.LOCAL) for tile in run)
            if stage < world - 1:
                yield from (Send(step, tile, right, Store.REMOTE) for tile in run)
                yield Signal(step, right, taken + stage * stride + i)
            if family is Family.GATHER:
                yield from (Compute(step, tile, rank, Store.LOCAL) for tile in run)
            elif stage:
                yield from (Copy(step, tile, rank) for tile in run)


def _gather(order: Order, world: int, rank: int, runs: Sequence[Slices]) -> Iterator[Action]:
    """Every rank copies its part into its shared memory, and computes on the parts of all ranks in place."""
    for slot, run in enumerate(runs[rank]):
        yield from (Send(0, tile, rank, Store.LOCAL) for tile in run)
        yield from (Signal(0, peer, slot) for peer in _peers(world, rank))
    for step, source in enumerate(_sequence(order, world, rank, own_last=False)):
        for slot, run in enumerate(runs[source]):
            if source != rank:
                yield Wait(step, source, slot)
            yield from (Compute(step, tile, rank, Store.LOCAL) for tile in run)


def _publish(order: Order, world: int, rank: int, runs: Sequence[Slices]) -> Iterator[Action]:
    """Every rank computes its chunk in its own memory, from which its peers copy it into their outputs.

    Round by round: the next own slice is computed, then the slice before it is copied from every peer in
    turn, while it is in the caches. Every rank is read by one peer at a time.
    """
    sequence = list(range(world)) if order is Order.OBLIVIOUS else _peers(world, rank)
    for round_ in range(max(map(len, runs)) + 1):
        step = max(0, 1 + (round_ - 1) * (len(sequence) + 1))
        if round_ < len(runs[rank]):
            yield from (Compute(step, tile, rank, Store.LOCAL) for tile in runs[rank][round_])
            yield from (Signal(step, peer, round_) for peer in _peers(world, rank))
        slot = round_ - 1
        for i, source in enumerate(sequence, start=step + 1):
            if source != rank and 0 <= slot < len(runs[source]):
                yield Wait(i, source, slot)
                yield from (Copy(i, tile, source) for tile in runs[source][slot])


def _produce(order: Order, world: int, rank: int, tiles: Sequence[Sequence[Tile]]) -> Iterator[Action]:
    """Tiles are stored in the memory of the rank that they are for.

    All tiles of a source are one slice, because only the source knows how its chunk is cut.
    """
    for step, dest in enumerate(_sequence(order, world, rank, own_last=order is Order.DIRECT)):
        yield from (Compute(step, tile, dest, _placed(rank, dest)) for tile in tiles[dest])
        if dest != rank:
            yield Signal(step, dest, 0)
    yield from (Wait(world, peer, 0) for peer in _peers(world, rank))


def _consume(order: Order, world: int, rank: int, tiles: Sequence[Sequence[Tile]]) -> Iterator[Action]:
    """Parts are sent to the ranks that they are for. Each rank computes on the received parts, one source at
    a time.

    Only the source knows the size of its part: the tile of such a Compute is empty and stands for the whole
    part.
    """
    for step, dest in enumerate(_sequence(order, world, rank, own_last=order is Order.DIRECT)):
        yield from (Send(step, tile, dest, _placed(rank, dest)) for tile in tiles[dest])
        if dest != rank:
            yield Signal(step, dest, 0)
    # The own part first, then parts in the sequence of arrival: a part sent `i` ranks to the right comes from
    # the left.
    arrivals = range(world) if order is Order.OBLIVIOUS else [(rank - i) % world for i in range(world)]
    for step, source in enumerate(arrivals, start=world):
        if source != rank:
            yield Wait(step, source, 0)
        yield Compute(step, Tile(source, 0, Span(0, 0), Span(0, 0)), rank, Store.LOCAL)
