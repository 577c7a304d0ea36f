"""The embedding cells: tables that the ranks share out by model parallelism, pooled over the whole batch.

With W ranks, T tables [V_t, D_t] on each, batch B, L rows in a bag and P = 2 * B * sum(D_t) bytes:

    embedding_bag_all_to_all
        pool     p[t] = sum of L rows of table t for each of B bags                    [B, D_t]
        send     every rank gets its B / W bags of all tables of all ranks             [B / W, W * sum(D_t)]
        memory   L * P + P: rows of tables are read, pooled ones are written

    all_to_all_embedding_bag_backward
        send     every rank gets G, the gradients of all bags of its tables            [B, sum(D_t)]
        add up   g[t][i] = sum of G[bag, columns of t] over the bags of all indices i  [V_t, D_t]
        memory   L * P + 2 * sum(V_t * D_t): a row of G is read for every index of its bag, all rows of the
                 gradients are written once, most of them as 0

    all_to_all_embedding_bag_update
        as the backward, but row i of a table changes by g[t][i] where an index names it
        memory   L * P + 2 * those rows: they are read and written

    limit        max(memory / memory rate, (W - 1) / W * P / link rate) + a flag

Rows are bfloat16 and drawn at random. The limit ignores rows that are already in the L2, so a share of the
limit may exceed 1 with many bags and small tables or a small G. It also ignores the indices, their sorting,
and writing G to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from autofuse.bench.gpu.exchange.rows import Rates
from autofuse.bench.gpu.ratios import BYTES, FLAG_US

OP = "embedding_bag_all_to_all"
BACKWARD = "all_to_all_embedding_bag_backward"
UPDATE = "all_to_all_embedding_bag_update"
BATCHES = ((512, 64), (2048, 64), (2048, 256), (4096, 64))
"""(batch, tables a GPU)"""
POOLINGS = (1, 10, 70)
QUICK = ((512, 64, 1), (2048, 64, 10), (4096, 64, 70))
MIXED = (2048, 64, 10)
"""(batch, tables a GPU, pooling) of the cell whose tables differ."""
MIXED_DIMS, MIXED_ROWS = (0.25, 0.5, 1, 2), (0.01, 0.1, 1, 10)
"""By how much they do."""
MOST_BYTES = 100e9
"""Bytes. A cell of the backward that takes more is left out."""
VARIANTS = 11
"""Most variants that make gradients: each is a CUDA graph, which holds the gradients of a call."""


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
    op: str = OP

    @property
    def name(self) -> str:
        tables = f"{self.tables}{' mixed' if self.kind == 'mixed' else ''}"
        return f"{self.op} batch={self.batch} tables={tables} pooling={self.pooling}"

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
        """Columns of all tables of a rank."""
        return sum(dim for _, dim in self.sizes)

    @property
    def by_dim(self) -> list[tuple[int, list[int]]]:
        """Numbers of columns, with the rows of every table that has them."""
        groups = groupby(self.sizes, key=lambda size: size[1])
        return [(dim, [rows for rows, _ in sizes]) for dim, sizes in groups]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all tables of a rank."""
        return sum(rows * dim for rows, dim in self.sizes) * BYTES

    @property
    def moved_bytes(self) -> int:
        """Bytes that must be read and written in the memory of a rank."""
        row = self.batch * self.columns * BYTES
        if self.op == UPDATE:
            return self.pooling * row + 2 * self.named_bytes
        return self.pooling * row + (self.gradient_bytes if self.op == BACKWARD else row)

    @property
    def named_bytes(self) -> int:
        """The share of the rows of a rank's tables that a random set of indices names, on average."""
        entries = self.batch * self.pooling
        return round(sum(rows * (1 - (1 - 1 / rows) ** entries) * dim for rows, dim in self.sizes) * BYTES)

    @property
    def held_bytes(self) -> int:
        """Bytes that all variants of the backward hold at once, about.

        Beside gradients these are the partial sums of the two that torch has for merged tables, fp32: one for
        every row with an index, and one more for every ten indices.
        """
        sums = 0
        for dim, rows in self.by_dim:
            indices = len(rows) * self.batch * self.pooling
            sums = max(sums, (min(indices, sum(rows)) + indices // 10) * dim * 4)
        return VARIANTS * self.gradient_bytes + 2 * sums

    @property
    def roughly_us(self) -> float:
        return self.moved_bytes / 4e6

    def limit(self, compute_us: float | None, rates: Rates) -> float:
        """Microseconds of a perfect fusion: memory or link, the slower one, independent of torch's
        compute."""
        sent = (self.world - 1) / self.world * self.batch * self.columns * BYTES
        return max(self.moved_bytes / rates.memory, sent / rates.link) / 1e3 + FLAG_US


def cells(world: int, quick: bool) -> list[Cell]:
    """All cells, or a few: of the op, then those of its backward, and of updates, that fit into memory.

    ValueError for a world that does not divide a batch.
    """
    sizes = QUICK if quick else tuple((b, t, pooling) for b, t in BATCHES for pooling in POOLINGS)
    found = [Cell(*size, world) for size in sizes] + [Cell(*MIXED, world, "mixed")]
    for cell in found:
        if cell.batch % world:
            raise ValueError(f"{world} ranks cannot share out a batch of {cell.batch}; start 2, 4 or 8 ranks")
    back = [replace(cell, op=op) for op in (BACKWARD, UPDATE) for cell in found]
    return [*found, *(cell for cell in back if cell.held_bytes <= MOST_BYTES)]
