"""The ways to exchange gradients of bags and update an embedding cell's tables by SGD: torch's, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autofuse.bench.gpu.driver import relative_error
from autofuse.bench.gpu.embedding.bags import Bags
from autofuse.bench.gpu.embedding.cells import UPDATE, Cell
from autofuse.bench.gpu.embedding.gradients import Operands, Path, exact, operands
from autofuse.bench.gpu.exchange.work import Variant, Work
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.ratios import DTYPE

LR = 1.0
"""Rows change by about what is in them, so that an update that is missing is noticed."""


@dataclass(frozen=True)
class Tables:
    """`big[g]`: the tables of the g-th dim, one below the other; `all[t]`: views of these. `watched`: of two
    tables their number, some rows, what is in them before every call with the first set, and after it."""

    big: list[Tensor]
    all: list[Tensor]
    watched: list[tuple[int, Tensor, Tensor, Tensor]]

    @classmethod
    def of(cls, given: Operands, rows: list[Tensor], gradients: list[Tensor]) -> Tables:
        big, tables = [], []
        for dim, heights in given.cell.by_dim:
            big.append(torch.randn(sum(heights), dim, device=given.grad.device, dtype=getattr(torch, DTYPE)))
            tables += big[-1].split(heights)
        watched = []
        for t in sorted({0, len(tables) - 1}):
            start = tables[t][rows[t]]
            watched.append((t, rows[t], start, start.double() - LR * gradients[t]))
        return cls(big, tables, watched)

    def restore(self) -> None:
        """Calls change tables: what is watched begins anew."""
        for t, rows, start, _ in self.watched:
            self.all[t].index_copy_(0, rows, start)

    def error(self, tables: list[Tensor]) -> float:
        """|found - exact| / |exact| (Frobenius) of what is watched."""
        found = torch.cat([tables[t][rows].flatten() for t, rows, *_ in self.watched])
        return relative_error(found, torch.cat([end.flatten() for *_, end in self.watched]))


@dataclass(frozen=True)
class Updated(Fused):
    """A result is the tables."""

    tables: Tables | None = None

    def _at(self, i: int) -> tuple[Any, ...]:
        if self.tables is not None and i % len(self.arguments) == 0:
            self.tables.restore()
        return super()._at(i)

    def _result(self, results: Any) -> Any:
        return None if self.tables is None else self.tables.all


def work(cell: Cell, device: torch.device, group_name: str) -> Work:
    """All that there is to measure of a cell."""
    given = operands(cell, device, group_name)
    sent, received, gradients = exact(given)
    tables = Tables.of(given, gradients.rows, gradients.exact)
    fused = Updated(UPDATE, [arguments(given, tables, bags) for bags in given.bags], tables=tables)

    def variant(run: Callable[[Bags], None]) -> Variant:
        def call(i: int) -> list[Tensor]:
            if i % len(given.bags) == 0:
                tables.restore()
            run(given.bags[i % len(given.bags)])
            return tables.all

        return Variant(call, tables.error)

    path = Path(given)  # of the steps alone: the peers have another, for what lies here stays
    path.pack()
    path.exchange()
    by_table = path.unpack()
    variants = {
        "compute": {
            name: variant(partial(update, given, tables, by_table)) for name, update in UPDATES.items()
        },
        "parts": path.parts(sent, received),
        "peers": {
            f"{name}+nccl": variant(_with_nccl(given, tables, update)) for name, update in UPDATES.items()
        },
        "ours": {"auto": Variant(fused.auto, tables.error)},
    }
    return Work(variants, fused)


def _with_nccl(given: Operands, tables: Tables, update: Callable[..., None]) -> Callable[[Bags], None]:
    """With buffers in place, and indices of a merged table shifted beforehand."""
    path = Path(given)

    def run(bags: Bags) -> None:
        path.pack()
        path.exchange()
        update(given, tables, path.unpack(), bags)

    return run


def _dense(given: Operands, tables: Tables, by_table: list[Tensor], bags: Bags) -> None:
    """Gradients as large as the tables, from [T_g * B, D_g] of every dim; then all of the tables is read."""
    for forward, grad, indices, big in zip(given.big, by_table, bags.merged, tables.big, strict=True):
        big.add_(forward.gradient(grad, indices, len(big)), alpha=-LR)


def _sparse(given: Operands, tables: Tables, by_table: list[Tensor], bags: Bags) -> None:
    """A value for every index, as sparse gradients have it, added to its row: each addition is rounded."""
    for forward, grad, indices, big in zip(given.big, by_table, bags.merged, tables.big, strict=True):
        big.index_add_(0, indices, grad[forward.bag_of], alpha=-LR)


UPDATES: dict[str, Callable[..., None]] = {"dense": _dense, "sparse": _sparse}


def arguments(given: Operands, tables: Tables, bags: Bags) -> tuple[Any, ...]:
    """Those of the fused op."""
    cell, count = given.cell, given.cell.tables
    rates = [torch.tensor([LR, 0.0], device=given.grad.device)] * count
    options = (0, False, -1, [cell.columns] * cell.world, "bsc", False, given.group_name, "direct", "bench")
    return tables.all, [], rates, given.grad, bags.indices, [given.one.offsets] * count, [], *options
