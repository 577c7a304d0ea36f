"""What the tiles of a plan cost: operations, operands, and bytes to exchange."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from autofuse.lowering.plan import Plan, Tile

Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""Rows from every rank to every rank and expert of it."""


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one program on one tile, or on a part of it."""

    operations: float = 0.0
    reads: tuple[tuple[Hashable | None, float], ...] = ()
    """(name, bytes) of operands. Operands with a name are cached and shared by the programs of a GPU."""
    moved: float = 0.0
    """Bytes that the program itself adds up or copies."""


class Work(Protocol):
    """The cost of tiles."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element that is exchanged."""

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        """The tasks that compute `tile`, for a program each."""


@dataclass(frozen=True)
class Product:
    """A matmul whose product is exchanged: tiles of the product, with a sum of `inner` products each.

    Chunks are parts of the rows of the product, or (`columns`) of its columns.
    """

    inner: int
    itemsize: int = 2
    columns: bool = False

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        rows, cols = len(tile.rows), len(tile.cols)
        column = self.inner * self.itemsize
        above, beside = (0, tile.chunk) if self.columns else (tile.chunk, 0)
        a = ("a", above, tile.rows.start), float(rows * column)
        b = ("b", beside, tile.cols.start), float(cols * column)
        return (Task(2.0 * rows * cols * self.inner, (a, b)),)


@dataclass(frozen=True)
class GatheredProduct:
    """A matmul of a gathered matrix: every tile of it is multiplied by a weight with `cols` columns, in parts
    of `part` columns."""

    cols: int
    part: int = 256
    itemsize: int = 2

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        rows, inner = len(tile.rows), len(tile.cols)
        found = []
        for start in range(0, self.cols, self.part):
            cols = min(self.part, self.cols - start)
            a = (("a", tile.chunk, tile.index), float(rows * inner * self.itemsize))
            b = (("b", tile.cols.start, start), float(inner * cols * self.itemsize))
            found.append(Task(2.0 * rows * cols * inner, (a, b)))
        return tuple(found)


@dataclass(frozen=True)
class Bags:
    """Pooled rows of embedding tables: `pooling` elements are read for every element."""

    pooling: float
    itemsize: int = 2

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        read = tile.size * self.itemsize * self.pooling
        return (Task(reads=((None, read),), moved=read),)


@dataclass(frozen=True)
class Nothing:
    """No compute: what is exchanged is there already. The plan is then the collective alone."""

    itemsize: int = 2

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        return (Task(),)


@dataclass(frozen=True)
class Sums:
    """No compute but the sums of a reduction: programs read the own tile and add it to what arrived."""

    itemsize: int = 2

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        nbytes = float(tile.size * self.itemsize)
        return (Task(reads=((None, nbytes),), moved=nbytes),)


@dataclass(frozen=True)
class Experts:
    """Matmuls of `count` experts of this rank, of `rows` rows from, or for, every rank and expert.

    A weight is read once for the rows of `shared` ranks. In a PRODUCE plan the rows of a chunk are sorted by
    expert. A CONSUME plan has no tiles of the product; it is cut here, into tiles of `height` by `width`.
    """

    count: int
    rows: int
    inner: int
    cols: int
    height: int = 128
    width: int = 128
    itemsize: int = 2
    shared: int = 1

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        if len(tile.rows):
            rows, columns = (range(span.start, span.stop) for span in (tile.rows, tile.cols))
            return tuple(self._of_expert(rows.start // self.rows, tile.chunk, rows, columns, len(columns)))
        found = []
        for expert in range(self.count):
            for start in range(0, self.rows, self.height):
                stop = min(self.rows, start + self.height)
                found += self._of_expert(expert, tile.chunk, range(start, stop), range(self.cols), self.width)
        return tuple(found)

    def _of_expert(self, expert: int, chunk: int, rows: range, columns: range, width: int) -> list[Task]:
        return _of_expert(expert, chunk, rows, columns, width, self.inner, self.itemsize, self.shared)


@dataclass(frozen=True)
class Routed:
    """As `Experts`, but `counts[s][d][e]` rows go from rank s to expert e of rank d.

    The rows that an expert has in a tile are cut into tasks of at most `most` columns, and of at most `area`
    elements of the product where the expert has most rows.
    """

    counts: Counts
    inner: int
    cols: int
    area: int
    most: int
    itemsize: int = 2
    high: int = 1024
    few: int = 256
    """Of experts with at most so many rows, ranks share the reads of a weight."""

    def tasks(self, plan: Plan, tile: Tile) -> tuple[Task, ...]:
        rows, found, end = self.counts[tile.chunk][plan.rank], [], 0
        for expert, count in enumerate(rows):
            start, end = end, end + count
            if len(tile.rows):  # of a PRODUCE plan, whose chunks are sorted by expert
                found += self._of_expert(
                    plan, tile, expert, max(start, tile.rows.start), min(end, tile.rows.stop)
                )
                continue
            for first in range(start, end, self.high):
                found += self._of_expert(plan, tile, expert, first, min(end, first + self.high))
        return tuple(found) or (Task(),)

    def _of_expert(self, plan: Plan, tile: Tile, expert: int, start: int, stop: int) -> list[Task]:
        if stop <= start:
            return []
        of_ranks = [source[plan.rank][expert] for source in self.counts]
        sharing = min(sum(n > 0 for n in of_ranks), max(1, self.few * len(of_ranks) // sum(of_ranks)))
        width = max(1, min(self.most, self.area // min(self.high, max(of_ranks))))
        rows, columns = range(start, stop), range(self.cols)
        return _of_expert(expert, tile.chunk, rows, columns, width, self.inner, self.itemsize, sharing)


def _of_expert(
    expert: int, chunk: int, rows: range, columns: range, width: int, inner: int, itemsize: int, sharing: int
) -> list[Task]:
    """The product of rows of a chunk and the weight of an expert, in tasks of `width` columns.

    Ranks that share a weight read a part of it each.
    """
    part, found = chunk if sharing > 1 else 0, []
    for column in columns[::width]:
        cols = min(width, columns.stop - column)
        a = ("a", expert, chunk, rows.start), float(len(rows) * inner * itemsize)
        b = ("b", expert, column, part), cols * inner * itemsize / sharing
        found.append(Task(2.0 * len(rows) * cols * inner, (a, b)))
    return found
