"""Where rows of experts lie in the parts of an exchanged buffer: runs to multiply, rows to scatter."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import expert_rows as kernels

FEW_ROWS = 256
"""With shorter runs, all rows of an expert are multiplied together: a matmul of fewer rows spends a tenth or
more of its time on reading and packing the weight."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[row, row + length)` of an expert that lie at `at` and on in the part of one rank."""

    expert: int
    row: int
    length: int
    at: int


def even_runs(count: int, outer: int, world: int, c: int) -> list[list[Run]]:
    """The runs of each rank. The rows of `count` experts are `[count, (outer, world, c)]`, and the part of a
    rank is `[count, outer, c]`."""
    return [
        [Run(e, (o * world + part) * c, c, (e * outer + o) * c) for e in range(count) for o in range(outer)]
        for part in range(world)
    ]


@dataclass(frozen=True, slots=True)
class Places:
    """The places of dropless rows: row i lies at `positions[i]` of a buffer, absent: i. A part of the buffer
    for each rank, one after another.

    distinct: whether no position occurs twice; ends: of the parts; rows, places: sorted by part, and where
    each lies there; bounds: where each part starts in these two, with the end.
    """

    positions: Tensor | None
    ends: Sequence[int]
    distinct: bool
    rows: Tensor
    places: Tensor
    bounds: Sequence[int]

    @classmethod
    def of(cls, positions: Tensor | None, count: int, splits: Sequence[int], op: str) -> "Places":
        """Of `count` rows in parts of `splits` rows. Raises ValueError unless each row has one position, and
        that is in the buffer."""
        ends = [*accumulate(splits)]
        if positions is None:
            if count != ends[-1]:
                raise ValueError(
                    f"{op}: {count} rows without positions cannot be {ends[-1]} rows of a buffer"
                )
            nothing = torch.empty(0, dtype=torch.int64)
            return cls(None, ends, True, nothing, nothing, ())
        if positions.dim() != 1 or positions.shape[0] != count:
            raise ValueError(
                f"{op}: expected a position for each of {count} rows, got {tuple(positions.shape)}"
            )
        positions = positions.to(torch.int64).contiguous()
        try:
            return cls(positions, ends, *kernels.sort_rows(positions, ends))
        except IndexError as error:
            raise ValueError(
                f"{op}: positions must lie in [0, {ends[-1]}), the rows of the exchanged buffer"
            ) from error

    def runs(self, ranges: Sequence[tuple[int, int]]) -> list[list[Run]] | None:
        """The runs of each rank. ranges: the rows of each expert. None if a run has fewer than FEW_ROWS rows
        on average."""
        stops = [stop for _, stop in ranges]
        found = kernels.find_runs(self.positions, self.ends, stops, stops[-1] // FEW_ROWS)
        if found is None:
            return None
        runs: list[list[Run]] = [[] for _ in self.ends]
        for part, *run in found:
            runs[part].append(Run(*run))
        return runs


class Route:
    """Scatters finished rows of `p: [rows, N]` to their places in the parts. `full`: no place stays empty.
    Rows of one place are added up."""

    def __init__(self, p: Tensor, places: Places, full: bool) -> None:
        self._places, self._full = places, full
        self._scattered = places.distinct and places.positions is not None
        self._sent = p.contiguous()
        if not places.distinct:
            assert places.positions is not None
            empty = p.new_zeros((places.ends[-1], p.shape[1]))
            self._sent = empty.index_add_(0, places.positions, p)

    def store(self, there: Tensor, dest: int) -> None:
        """Stores the part of rank `dest` in `there`."""
        if not self._scattered:
            stop = self._places.ends[dest]
            there.copy_(self._sent[stop - there.shape[0] : stop])
            return
        if not self._full:
            there.zero_()
        of_part = slice(self._places.bounds[dest], self._places.bounds[dest + 1])
        kernels.scatter_rows(there, self._places.places[of_part], self._sent, self._places.rows[of_part])
