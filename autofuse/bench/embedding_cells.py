"""The embedding cells: tables that the ranks share out by model parallelism, pooled over the whole batch.

With W ranks, T tables on each, batch B, D_t columns of table t and L rows in a bag:

    pool     p[t] = sum of L rows of table t for each of B bags        [B, D_t]
    send     every rank gets its B / W bags of all tables of all ranks  [B / W, W * sum(D_t)]
    limit    max((L + 1) * P / memory rate, (W - 1) / W * P / link rate) + a flag, P = 2 * B * sum(D_t) bytes

Rows are bfloat16 and drawn at random: what of them the L2 has already is not counted, so that a share of the
limit may exceed 1 where bags are many and tables small.
"""

from __future__ import annotations

from dataclasses import dataclass

from autofuse.bench.exchange_rows import Rates
from autofuse.bench.timings import BYTES, FLAG_US

OP = "embedding_bag_all_to_all"
BATCHES = ((512, 64), (2048, 64), (2048, 256), (4096, 64))
"""(batch, tables a GPU)"""
POOLINGS = (1, 10, 70)
QUICK = ((512, 64, 1), (2048, 64, 10), (4096, 64, 70))
MIXED = (2048, 64, 10)
"""(batch, tables a GPU, pooling) of the cell whose tables differ."""
MIXED_DIMS, MIXED_ROWS = (0.25, 0.5, 1, 2), (0.01, 0.1, 1, 10)
"""By how much they do."""


@dataclass(frozen=True)
class Cell:
    """The op at one size. `kind`: `equal`, or `mixed` tables."""

    batch: int
    tables: int
    pooling: int
    world: int
    kind: str = "equal"
    rows: int = 100_000
    dim: int = 256

    @property
    def op(self) -> str:
        return OP

    @property
    def name(self) -> str:
        tables = f"{self.tables}{' mixed' if self.kind == 'mixed' else ''}"
        return f"{OP} batch={self.batch} tables={tables} pooling={self.pooling}"

    @property
    def labels(self) -> dict[str, str]:
        tables = f"{self.tables}{' mixed' if self.kind == 'mixed' else ''}"
        return {"batch": str(self.batch), "tables a GPU": tables, "pooling": str(self.pooling)}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(rows, columns) of every table of a rank; tables of one dim lie side by side."""
        if self.kind == "equal":
            return [(self.rows, self.dim)] * self.tables
        each = len(MIXED_DIMS)
        return [
            (round(self.rows * MIXED_ROWS[t % each]), round(self.dim * MIXED_DIMS[t * each // self.tables]))
            for t in range(self.tables)
        ]

    @property
    def columns(self) -> int:
        """Of all tables of a rank."""
        return sum(dim for _, dim in self.sizes)

    @property
    def pooled_bytes(self) -> int:
        """What pooling reads of the tables and writes."""
        return (self.pooling + 1) * self.batch * self.columns * BYTES

    @property
    def roughly_us(self) -> float:
        return self.pooled_bytes / 4e6

    def limit(self, compute_us: float | None, rates: Rates) -> float:
        """Microseconds of a perfect fusion: memory or link, the slower, whatever pooling takes in torch."""
        sent = (self.world - 1) / self.world * self.batch * self.columns * BYTES
        return max(self.pooled_bytes / rates.memory, sent / rates.link) / 1e3 + FLAG_US


def cells(world: int, quick: bool) -> list[Cell]:
    """All cells, or a few. ValueError for a world that does not divide a batch."""
    sizes = QUICK if quick else tuple((b, t, pooling) for b, t in BATCHES for pooling in POOLINGS)
    found = [Cell(*size, world) for size in sizes] + [Cell(*MIXED, world, "mixed")]
    for cell in found:
        if cell.batch % world:
            raise ValueError(f"{world} ranks cannot share out a batch of {cell.batch}; start 2, 4 or 8 ranks")
    return found
