"""The bags of embedding cells, which an op and its backward have in common."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from autofuse.bench.gpu.embedding.cells import Cell
from autofuse.lowering.gpu.choice.timing import MOST_CALLS, copies_of


@dataclass(frozen=True)
class Bags:
    """What to pool, one of several sets. `indices[t]`: [B * L] of every table; `merged[g]`: [T_g * B * L],
    the same for the g-th dim, whose tables lie in one big table."""

    indices: list[Tensor]
    merged: list[Tensor]


def drawn(cell: Cell, device: torch.device) -> list[Bags]:
    """Random sets, as many as it takes for none to come from the L2."""
    return [_drawn(cell, device) for _ in range(min(MOST_CALLS, max(2, copies_of(cell.moved_bytes))))]


def _drawn(cell: Cell, device: torch.device) -> Bags:
    n = cell.batch * cell.pooling
    indices = [torch.randint(0, rows, (n,), device=device) for rows, _ in cell.sizes]
    rest = iter(indices)
    merged = [
        torch.cat([next(rest) + before for before in (0, *accumulate(rows[:-1]))]) for _, rows in cell.by_dim
    ]
    return Bags(indices, merged)


def offsets(cell: Cell, device: torch.device, tables: int = 1) -> Tensor:
    """The offsets of the bags of so many tables, one after another: [tables * B]."""
    return torch.arange(tables * cell.batch, device=device) * cell.pooling
