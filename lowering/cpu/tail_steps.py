"""The steps of a reduction with a tail.

Form "every": the tail of some rows is applied when the last of their tiles has come, straight from shared
memory: from the reduced tiles of all owners, or from the partial tiles of all ranks where this rank adds them
up. So nothing is copied before. Form "owner": the chunks are rows; the owner of a tile applies the tail to
its sum and leaves each result in its memory, in place of the sum; peers copy them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import Spec, State, Step, meta
from autofuse.lowering.cpu.reduce_steps import ReduceSteps
from autofuse.lowering.cpu.tails import tail_of
from autofuse.lowering.cpu.tiles import Buffer, Run
from autofuse.lowering.plan import Action, Compute, Copy, Reduce, Span, Store, Tile
from autofuse.lowering.reference.tail import check_tail
from autofuse.native_kernels.cpu import reduce_rows

Find = Callable[[State], Tensor]


@dataclass(slots=True)
class Rows:
    """Rows of the output: `missing` of their tiles have not come yet. `source`: of each run of columns its
    start and how to find its parts."""

    run: Run
    missing: int
    source: list[tuple[int, list[Find]]] = field(default_factory=list)


class TailSteps(ReduceSteps):
    """The same with a tail; `owner`: by the owners of rows."""

    def __init__(self, tail: str, operands: Spec, owner: bool, *given: Any) -> None:
        super().__init__(*given)
        rows, columns = self.shape
        self.owner = owner
        check_tail(self.shape, meta(operands), tail, self.plan.op, self.everywhere or self.dim == 0)
        dims = tuple((len(shape), dtype) for shape, dtype in operands)
        self.tail = tail_of(tail, self.dtype, columns, dims)
        self.results = tuple(((rows, width), dtype) for dtype, width in self.tail.results)
        if not self.ring:
            self.sums = (0, 0)
        world = range(self.plan.world)
        if owner:
            self.left: list[Buffer] = []
            for dtype, width in self.tail.results:
                of_width = Span(0, width)
                chunks = [tuple(replace(t, cols=of_width) for t in self.plan.tiles(c)) for c in world]
                self.left.append(
                    Buffer(self.left[-1].end if self.left else self.partial.end, 1, chunks, dtype)
                )
            self.nbytes = self.left[-1].end
        self._rows: dict[int, Rows] = {}
        for tile in self.plan.tiles(None if self.everywhere else self.plan.rank):
            run = self._rows_of(tile)
            self._rows.setdefault(run.start, Rows(run, 0)).missing += 1

    def steps(self, actions: Iterable[tuple[Action, int]]) -> tuple[Step, ...]:
        found: list[Step] = []
        for action, awaited in actions:
            if self.owner and isinstance(action, Reduce):
                found.append(self._reduce_and_apply(action.tile))
            elif self.owner and isinstance(action, Copy):
                found.append(self._copy_results(action.tile, action.source))
            else:
                found += self._every(action, awaited)
        if not self._rows:
            found.append(self._apply_to_none)
        return tuple(found)

    def _rows_of(self, tile: Tile) -> Run:
        return self._place(tile) if self.dim == 0 else Run(0, self.shape[0])

    def _operands(self, run: Run) -> Callable[[State], list[Tensor]]:
        return lambda s: [run.read_operand(t, 0) for t in s.tail_operands]

    # --- every rank -----------------------------------------------------------------------------------

    def _every(self, action: Action, awaited: int) -> list[Step]:
        """The step of an action; behind the last one of some rows also the tail of these."""
        match action:
            case Compute(tile=tile, dest=dest, store=Store.UPDATE) if dest == self.plan.rank:
                return [self.step(action, awaited), *self._came(tile, [self._in_output(tile)])]
            case Copy(tile=tile) if self.ring:
                return [self.step(action, awaited), *self._came(tile, [self._in_output(tile)])]
            case Copy(tile=tile, source=source):
                return self._came(tile, [self._tile(self.finished, tile, source, 0)])
            case Reduce(tile=tile) if self.everywhere and not self.plan.one_shot:
                finished = self._tile(self.finished, tile, self.plan.rank, 0)
                add = partial(_add, finished, self._parts(tile), self.scale)
                return [add, *self._came(tile, [finished])]
            case Reduce(tile=tile):
                return self._came(tile, self._parts(tile))
        return [self.step(action, awaited)]

    def _came(self, tile: Tile, parts: list[Find]) -> list[Step]:
        rows = self._rows[self._rows_of(tile).start]
        rows.missing -= 1
        rows.source.append((self._place(tile).start if self.dim == 1 else 0, parts))
        if rows.missing:
            return []
        source = [parts for _, parts in sorted(rows.source, key=lambda pair: pair[0])]
        adds = not self.ring and (self.plan.one_shot or not self.everywhere)
        scale, operands, tail, run = (
            self.scale if adds else 1.0,
            self._operands(rows.run),
            self.tail,
            rows.run,
        )

        def apply(s: State) -> None:
            given = [[part(s) for part in parts] for parts in source]
            tail.apply(given, scale, operands(s), [run.read(t, 0) for t in s.results])

        return [apply]

    def _apply_to_none(self, s: State) -> None:
        """The tail of a matrix without rows or columns."""
        nothing = [[torch.empty(self.shape, dtype=self.dtype)]]
        replace(self.tail, stages=None).apply(nothing, 1.0, s.tail_operands, s.results)

    # --- owners ---------------------------------------------------------------------------------------

    def _left(self, tile: Tile, rank: int) -> list[Find]:
        """How to find the results of a tile in the memory of its owner."""
        found: list[Find] = []
        for buffer, (dtype, width) in zip(self.left, self.tail.results, strict=True):
            found.append(partial(_in_memory, rank, buffer.offset(tile, 0), (len(tile.rows), width), dtype))
        return found

    def _reduce_and_apply(self, tile: Tile) -> Step:
        run, parts, scale, tail = self._rows_of(tile), self._parts(tile), self.scale, self.tail
        left, operands = self._left(tile, self.plan.rank), self._operands(run)

        def apply(s: State) -> None:
            results = [find(s) for find in left]
            tail.apply([[part(s) for part in parts]], scale, operands(s), results)
            for mine, result in zip(s.results, results, strict=True):
                run.read(mine, 0).copy_(result)

        return apply

    def _copy_results(self, tile: Tile, source: int) -> Step:
        run, left = self._rows_of(tile), self._left(tile, source)

        def copy(s: State) -> None:
            for mine, find in zip(s.results, left, strict=True):
                run.read(mine, 0).copy_(find(s))

        return copy


def _in_memory(rank: int, offset: int, shape: tuple[int, int], dtype: torch.dtype, s: State) -> Tensor:
    return s.call.tensor(rank, offset, shape, dtype)


def _add(target: Find, parts: Sequence[Find], scale: float, s: State) -> None:
    reduce_rows(target(s), [part(s) for part in parts], scale)
