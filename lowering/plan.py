"""Plans: the actions of one rank in one call of a fused op, as plain data.

The mathematics of an op is in its file under `lowering/ops`. A plan holds the order of the tiles, the
destination of each tile, and the signals. `orders.make_plan` makes plans, `verify.verify` proves them, and
kernels execute them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

SIGNAL_SLOTS = 64
"""Number of signal slots that a source rank owns in the signal pad of a destination rank."""


class Order(str, Enum):
    """The rule that sorts a plan."""

    RING = "ring"
    DIRECT = "direct"
    OBLIVIOUS = "oblivious"


class Store(str, Enum):
    """The destination and operation of the store of a finished tile."""

    LOCAL = "local"
    REMOTE = "remote"
    UPDATE = "update"
    DMA = "dma"


class Family(str, Enum):
    """How an op moves data. Chunk `c` of a plan is:

    - REDUCE: the part of the product that rank `c` reduces,
    - GATHER: the part of the gathered matrix that rank `c` brings,
    - PRODUCE: what this rank computes for rank `c`,
    - CONSUME: what this rank sends to rank `c`, before it computes on what it was sent,
    - PUBLISH: the part of the result that rank `c` computes, for all ranks.
    """

    REDUCE = "reduce"
    GATHER = "gather"
    PRODUCE = "produce"
    CONSUME = "consume"
    PUBLISH = "publish"


FAMILIES: dict[str, Family] = {}
"""The family of every op, by name. Ops enter theirs when they are registered (`ops.library.register`)."""

ALIKE = (Family.REDUCE, Family.GATHER, Family.PUBLISH)
"""Families in which all ranks have the same chunks; in the others, ranks differ in what they send."""

EVERYWHERE = (
    "matmul_all_reduce",
    "reduce_update_gather",
    "all_reduce_update",
    "reduce_scatter_update_all_gather",
)
"""Ops of REDUCE whose finished tiles all ranks get."""


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range `[start, stop)`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile `index` of a chunk, counted row by row. The spans are relative to the chunk."""

    chunk: int
    index: int
    rows: Span
    cols: Span

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.cols)

    def __str__(self) -> str:
        return f"{self.chunk}.{self.index}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute `tile` and store it at `dest` (UPDATE: plus what has arrived here for it, from step 1 on).

    In a PUBLISH plan the tile goes to the output, too; peers copy it from the memory of `dest`.
    """

    step: int
    tile: Tile
    dest: int
    store: Store


@dataclass(frozen=True, slots=True)
class Send:
    """Copy `tile`, an input or a finished tile, into the memory of `dest`."""

    step: int
    tile: Tile
    dest: int
    store: Store


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal to `dest` that all stores before this action are visible."""

    step: int
    dest: int
    slot: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the signal that `source` sends to `slot` in this epoch."""

    step: int
    source: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add the partial tiles of all ranks in rank order, in fp32, and round once.

    The partial tiles lie in the memory of this rank; in a one-shot plan, each lies in the memory of the rank
    that computed it. An all_reduce that is not one-shot stores the result in memory that peers read.
    """

    step: int
    tile: Tile


@dataclass(frozen=True, slots=True)
class Copy:
    """Read the finished `tile` from the memory of `source` into this rank's output."""

    step: int
    tile: Tile
    source: int


Action: TypeAlias = Compute | Send | Signal | Wait | Reduce | Copy


@lru_cache(maxsize=4096)
def cut(chunk: int, extent: tuple[int, int], block: tuple[int, int]) -> tuple[Tile, ...]:
    """Cut a chunk of `extent` (rows, cols) into tiles of at most `block`, row by row. An empty chunk has
    none."""
    spans = [
        [Span(start, min(start + size, length)) for start in range(0, length, size)]
        for length, size in zip(extent, block, strict=True)
    ]
    pairs = ((rows, cols) for rows in spans[0] for cols in spans[1])
    return tuple(Tile(chunk, index, rows, cols) for index, (rows, cols) in enumerate(pairs))


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of `rank`, in program order, for one call of `op`.

    `chunks[c]` is the extent (rows, cols) of chunk `c` (see `Family`), `block` the largest extent of a tile.
    A step is a stage of the algorithm, with the same meaning on every rank. `one_shot`: every rank computes
    and reduces the whole result of an all_reduce, so that data crosses each link once. `visit`: the number of
    tiles of a chunk that are computed before the next chunk takes its turn (0: all tiles).
    """

    op: str
    order: Order
    world: int
    rank: int
    chunks: tuple[tuple[int, int], ...]
    block: tuple[int, int]
    actions: tuple[Action, ...] = field(hash=False, repr=False)
    one_shot: bool = False
    visit: int = 0

    @property
    def family(self) -> Family:
        return FAMILIES[self.op]

    @property
    def pulls(self) -> bool:
        """Whether a Compute reads the chunks of peers from their memory, instead of from this rank's
        memory."""
        return self.family is Family.GATHER and self.order is not Order.RING

    @property
    def slots_per_source(self) -> int:
        """Number of slots that this rank uses as a source in the signal pad of one destination."""
        return 1 + max((action.slot for action in self.actions if isinstance(action, Signal)), default=-1)

    @property
    def agreement(self) -> str:
        """A text that is equal for the plans of all ranks. Ranks compare it before their first call."""
        parts = [f"{self.order.value}{' in one shot' if self.one_shot else ''} of {self.world}"]
        if self.family in ALIKE:
            runs = [(extent, len(list(run))) for extent, run in groupby(self.chunks)]
            parts += ["chunks " + " ".join(f"{n}*{rows}x{cols}" for (rows, cols), n in runs)]
            parts += [f"tiles {self.block[0]}x{self.block[1]}"]
        if self.visit:
            parts += [f"{self.visit} a visit"]
        return ", ".join(parts)

    def tiles(self, chunk: int | None = None) -> tuple[Tile, ...]:
        """The tiles of one chunk, or of all chunks in their order."""
        if chunk is not None:
            return cut(chunk, self.chunks[chunk], self.block)
        return tuple(tile for c in range(self.world) for tile in self.tiles(c))

    def transfers(self, action: Action) -> Iterator[tuple[int, int, int]]:
        """The data that `action` moves over links: (source rank, destination rank, elements)."""
        match action:
            case Compute(_, tile, dest) | Send(_, tile, dest) if dest != self.rank:
                yield self.rank, dest, tile.size
            case Compute(_, tile) if self.pulls and tile.chunk != self.rank:
                yield tile.chunk, self.rank, tile.size
            case Copy(_, tile, source) if source != self.rank:
                yield source, self.rank, tile.size
            case Reduce(_, tile) if self.one_shot:
                yield from ((peer, self.rank, tile.size) for peer in range(self.world) if peer != self.rank)

    def __str__(self) -> str:
        """A table of the actions, with the traffic of each link."""
        shape = ", one shot" if self.one_shot else f", {self.visit} a visit" if self.visit else ""
        title = (
            f"{self.op}: {self.order.value}{shape}, rank {self.rank} of {self.world}, "
            f"{len(self.tiles())} tiles of at most {self.block[0]}x{self.block[1]}"
        )
        table: list[tuple[str, ...]] = [("step", "action", "tile", "rows", "cols", "link", "how")]
        table += [self._row(action) for action in self.actions]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        return "\n".join([title, *lines])

    def _row(self, action: Action) -> tuple[str, ...]:
        tile, how = getattr(action, "tile", None), ""
        link = ", ".join(f"{source}->{dest}" for source, dest, _ in self.transfers(action))
        match action:
            case Compute(store=store) | Send(store=store):
                how = store.value
            case Signal(_, dest, slot):
                link, how = f"{self.rank}->{dest}", f"slot {slot}"
            case Wait(_, source, slot):
                link, how = f"{source}->{self.rank}", f"slot {slot}"
        where = (str(tile), str(tile.rows), str(tile.cols)) if tile is not None else ("", "", "")
        return str(action.step), type(action).__name__.lower(), *where, link, how


def links(plans: Sequence[Plan]) -> list[dict[tuple[int, int], int]]:
    """For each step, the elements that cross every link `(source rank, destination rank)`."""
    steps = 1 + max((action.step for plan in plans for action in plan.actions), default=-1)
    moved: list[dict[tuple[int, int], int]] = [{} for _ in range(steps)]
    for plan in plans:
        for action in plan.actions:
            for source, dest, size in plan.transfers(action):
                over = moved[action.step]
                over[source, dest] = over.get((source, dest), 0) + size
    return moved


def contention(plans: Sequence[Plan]) -> list[int]:
    """For each step, the largest number of peers that store into, or read from, the memory of one rank.

    It is 1 in a balanced order, and `world - 1` if all peers access one rank.
    """
    busiest = []
    for over in links(plans):
        peers = Counter(("into", dest) for _, dest in over) + Counter(("from", source) for source, _ in over)
        busiest.append(max(peers.values(), default=0))
    return busiest
