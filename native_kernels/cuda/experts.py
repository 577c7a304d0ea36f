"""What launchers of the expert kernels share: how rows of experts are cut into tiles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from autofuse.native_kernels.triton.memory import cdiv

from .gemm import BM

GROUP = 16


class Runs(ctypes.Structure):
    """As expert_order.cuh has it."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("rows", "run", "outer", "stretch", "per", "group"))


@dataclass(frozen=True)
class Cut:
    """`[E, R]` rows, R = (outer, W, run), in tiles of 128 rows.

    stretch: rows of tiles of a run or, where a tile spans several runs, of an expert; per: of an expert;
    rows, cols: of tiles, of what is for one rank or, spanning, for all.
    """

    experts: int
    expert_rows: int
    run: int
    outer: int
    spanning: bool
    stretch: int
    per: int
    cols: int

    @classmethod
    def of(cls, experts: int, rows: int, n: int, outer: int, world: int, bn: int, across: int) -> Cut:
        """`across` blocks of a cluster that work on rows of one expert, spanning."""
        run = rows // (outer * world)
        spanning = run < BM
        stretch = cdiv(cdiv(rows, BM), across) * across if spanning else cdiv(run, BM)
        per = stretch if spanning else outer * stretch
        return cls(experts, rows, run, outer, spanning, stretch, per, cdiv(n, bn))

    @property
    def rows(self) -> int:
        return self.experts * self.per

    @property
    def part_rows(self) -> int:
        """Of what one rank sends to another."""
        return self.experts * self.outer * self.run

    @property
    def runs(self) -> Runs:
        return Runs(self.expert_rows, self.run, self.outer, self.stretch, self.per, min(self.per, GROUP))
