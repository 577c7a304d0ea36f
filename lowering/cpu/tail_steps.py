"""The steps of a reduction with a tail.

Form "every": the tail of some rows is applied when the last of their tiles has come, straight from shared
memory: from the reduced tiles of all owners, or from the partial tiles of all ranks where this rank adds them
up. So nothing is copied before. Form "owner": the chunks are rows; the owner of a tile applies the tail to
its sum and leaves each result in its memory, in place of the sum; peers copy them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import Spec, State, Step, meta
from autofuse.lowering.cpu.reduce_steps import ReduceSteps
from autofuse.lowering.cpu.tails import ApplyTail, Place, tail_of
from autofuse.lowering.cpu.tiles import Buffer, Run
from autofuse.lowering.plan import Action, Compute, Copy, Reduce, Span, Store, Tile
from autofuse.lowering.reference.tail import check_tail, tail_reference
from autofuse.native_kernels.cpu import reduce_rows


@dataclass(frozen=True, slots=True)
class Shared:
    """In the buffer of a rank, contiguous."""

    rank: int
    offset: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def stride(self) -> int:
        return self.shape[1]

    def tensor(self, s: State) -> Tensor:
        return s.call.tensor(self.rank, self.offset, self.shape, self.dtype)

    def address(self, s: State) -> int:
        return s.call.address(self.rank, self.offset)


@dataclass(frozen=True, slots=True)
class Owned:
    """Rows of a result of this call, or of its sums (`index` -1)."""

    index: int
    row: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def stride(self) -> int:
        return self.shape[1]

    def tensor(self, s: State) -> Tensor:
        whole = s.out if self.index < 0 else s.results[self.index]
        return whole.narrow(0, self.row, self.shape[0])

    def address(self, s: State) -> int:
        whole = s.out if self.index < 0 else s.results[self.index]
        return whole.data_ptr() + self.row * self.stride * self.dtype.itemsize


@dataclass(slots=True)
class Rows:
    """Rows of the output: `missing` of their tiles have not come yet. `source`: of each run of columns where
    it starts, and its parts."""

    run: Run
    missing: int
    source: list[tuple[int, Sequence[Place]]] = field(default_factory=list)


class TailSteps(ReduceSteps):
    """The same with a tail; `owner`: by the owners of rows."""

    def __init__(self, tail: str, operands: Spec, owner: bool, *given: Any) -> None:
        super().__init__(*given)
        rows, columns = self.shape
        self.owner, self.operands = owner, operands
        check_tail(self.shape, meta(operands), tail, self.plan.op, self.everywhere or self.dim == 0)
        dims = tuple((len(shape), dtype) for shape, dtype in operands)
        self.tail = tail_of(tail, self.dtype, columns, dims)
        self.results = tuple(((rows, width), dtype) for dtype, width in self.tail.results)
        if not self.ring:
            self.sums = (0, 0)
        if owner:
            self.left: list[Buffer] = []
            self.nbytes = self.partial.end
            for dtype, width in self.tail.results:
                chunks = [self._of_width(width, self.plan.tiles(c)) for c in range(self.plan.world)]
                self.left.append(Buffer(self.nbytes, 1, chunks, dtype))
                self.nbytes = self.left[-1].end
        self._rows: dict[int, Rows] = {}
        for tile in self.plan.tiles(None if self.everywhere else self.plan.rank):
            run = self._rows_of(tile)
            self._rows.setdefault(run.start, Rows(run, 0)).missing += 1

    def steps(self, actions: Iterable[tuple[Action, int]]) -> tuple[Step, ...]:
        found: list[Step] = []
        for action, awaited in actions:
            if self.owner and isinstance(action, Reduce):
                found += self._reduce_and_apply(action.tile)
            elif self.owner and isinstance(action, Copy):
                found.append(self._copy_results(action.tile, action.source))
            else:
                found += self._every(action, awaited)
        if not self._rows:
            found.append(self._apply_to_nothing)
        return tuple(found)

    @staticmethod
    def _of_width(width: int, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
        return tuple(replace(tile, cols=Span(0, width)) for tile in tiles)

    def _rows_of(self, tile: Tile) -> Run:
        return self._place(tile) if self.dim == 0 else Run(0, self.shape[0])

    def _shared(self, buffer: Buffer, tile: Tile, rank: int, source: int) -> Shared:
        return Shared(rank, buffer.offset(tile, source), (len(tile.rows), len(tile.cols)), buffer.dtype)

    def _parts_of(self, tile: Tile) -> list[Shared]:
        """What the ranks add up."""
        world, rank = range(self.plan.world), self.plan.rank
        if self.plan.one_shot:
            return [self._shared(self.partial, tile, peer, tile.chunk) for peer in world]
        return [self._shared(self.partial, tile, rank, peer) for peer in world]

    def _mine(self, run: Run) -> list[Owned]:
        """Rows of the results."""
        sizes = enumerate(self.tail.results)
        return [Owned(i, run.start, (run.length, width), dtype) for i, (dtype, width) in sizes]

    # --- every rank -----------------------------------------------------------------------------------

    def _every(self, action: Action, awaited: int) -> list[Step]:
        """The step of an action; behind the last one of some rows also the tail of these."""
        match action:
            case Compute(tile=tile, dest=dest, store=Store.UPDATE) if dest == self.plan.rank:
                return [self.step(action, awaited), *self._came(tile, [])]
            case Copy(tile=tile) if self.ring:
                return [self.step(action, awaited), *self._came(tile, [])]
            case Copy(tile=tile, source=source):
                return self._came(tile, [self._shared(self.finished, tile, source, 0)])
            case Reduce(tile=tile) if self.everywhere and not self.plan.one_shot:
                finished = self._shared(self.finished, tile, self.plan.rank, 0)
                add = partial(_add, finished, self._parts_of(tile), self.scale)
                return [add, *self._came(tile, [finished])]
            case Reduce(tile=tile):
                return self._came(tile, self._parts_of(tile))
        return [self.step(action, awaited)]

    def _came(self, tile: Tile, parts: Sequence[Place]) -> list[Step]:
        """The tail of the rows of a tile if it is the last one of them. In a ring sums are in the output."""
        rows = self._rows[self._rows_of(tile).start]
        rows.missing -= 1
        rows.source.append((self._place(tile).start if self.dim == 1 else 0, parts))
        if rows.missing:
            return []
        run = rows.run
        source = [parts for _, parts in sorted(rows.source, key=lambda pair: pair[0])]
        if self.ring:
            source = [[Owned(-1, run.start, (run.length, self.shape[1]), self.dtype)]]
        adds = not self.ring and (self.plan.one_shot or not self.everywhere)
        scale = self.scale if adds else 1.0
        return [ApplyTail(self.tail, run, scale, source, self.operands, self._mine(run))]

    def _apply_to_nothing(self, s: State) -> None:
        """The tail of a matrix without rows or columns."""
        nothing = torch.empty(self.shape, dtype=self.dtype)
        for result, value in zip(
            s.results, tail_reference(nothing, s.tail_operands, self.tail.text), strict=True
        ):
            result.copy_(value)

    # --- owners ---------------------------------------------------------------------------------------

    def _left(self, tile: Tile, rank: int) -> list[Shared]:
        """The results of a tile in the memory of its owner."""
        widths = [width for _, width in self.tail.results]
        pairs = zip(self.left, widths, strict=True)
        return [self._shared(left, self._of_width(width, [tile])[0], rank, 0) for left, width in pairs]

    def _reduce_and_apply(self, tile: Tile) -> list[Step]:
        run, parts, left = self._rows_of(tile), self._parts_of(tile), self._left(tile, self.plan.rank)
        apply = ApplyTail(self.tail, run, self.scale, [parts], self.operands, left)
        return [apply, self._copy_results(tile, self.plan.rank)]

    def _copy_results(self, tile: Tile, source: int) -> Step:
        pairs = list(zip(self._mine(self._rows_of(tile)), self._left(tile, source), strict=True))

        def copy(s: State) -> None:
            for mine, left in pairs:
                mine.tensor(s).copy_(left.tensor(s))

        return copy


def _add(target: Place, parts: Sequence[Place], scale: float, s: State) -> None:
    reduce_rows(target.tensor(s), [part.tensor(s) for part in parts], scale)
