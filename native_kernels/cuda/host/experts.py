"""How rows of experts are cut into tiles. The launchers of the expert kernels share this module."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from autofuse.native_kernels.gpu.memory import cdiv

from .gemm import BM, PROGRESS_BYTES, ClusterConfig, most_stages, shared_bytes

GROUP = 16
MOST_WEIGHTS = 2
"""Weights of one kernel; the same in order.cuh."""
HEIGHTS = (16, 32, 64, BM)
"""Rows of a tile."""


class Runs(ctypes.Structure):
    """`Runs` of expert_order.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("rows", "run", "outer", "stretch", "per", "group", "height")
    )


@dataclass(frozen=True)
class Cut:
    """Rows `[E, R]`, R = (outer, W, run), cut into tiles of `height` rows: 128, or as few as an expert has.

    spanning: a tile has rows of several runs of an expert. All other numbers count rows or columns of tiles:
    stretch: of a run or, spanning, of an expert; per: of an expert; rows, cols: of the part for one rank or,
    spanning, for all ranks. bn: columns of a tile.
    """

    experts: int
    expert_rows: int
    run: int
    outer: int
    spanning: bool
    height: int
    stretch: int
    per: int
    cols: int
    bn: int

    @classmethod
    def of(cls, experts: int, rows: int, n: int, outer: int, world: int, bn: int, across: int) -> Cut:
        """across: blocks of a cluster, which work on rows of one expert where tiles span runs."""
        run = rows // (outer * world)
        spanning = run < BM
        height = next((h for h in HEIGHTS if h >= rows), BM)
        stretch = cdiv(cdiv(rows, BM), across) * across if spanning else cdiv(run, BM)
        per = stretch if spanning else outer * stretch
        return cls(experts, rows, run, outer, spanning, height, stretch, per, cdiv(n, bn), bn)

    @property
    def stages(self) -> int:
        """Blocks of K in flight."""
        return most_stages(self.bn, rows=self.height, beside=PROGRESS_BYTES)

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.bn, self.stages, rows=self.height)

    @property
    def rows(self) -> int:
        return self.experts * self.per

    @property
    def part_rows(self) -> int:
        """Rows that one rank sends to another."""
        return self.experts * self.outer * self.run

    @property
    def runs(self) -> Runs:
        group = min(self.per, GROUP)
        return Runs(self.expert_rows, self.run, self.outer, self.stretch, self.per, group, self.height)


def tile_cols(n: int, config: ClusterConfig, weights: int) -> int:
    """Columns of tiles of `weights` weights `[K, N]`; a cluster works on columns of one weight."""
    return weights * cdiv(n, config.bn * config.along) * config.along
