"""The ways to pool and exchange an embedding cell: with what torch ships, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.bench.gpu.embedding.bags import Bags, drawn, offsets
from autofuse.bench.gpu.embedding.cells import OP, Cell
from autofuse.bench.gpu.exchange.work import Sample, Variant, Work, exchange, sampled
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.ratios import DTYPE


@dataclass(frozen=True)
class Operands:
    """`big[g]`: the T_g tables of the g-th dim, one below the other; `tables[t]`: [V_t, D_t], views of these;
    `offsets`: [B]; `big_offsets[g]`: [T_g * B]; `group_name`: the ranks."""

    cell: Cell
    big: list[Tensor]
    tables: list[Tensor]
    offsets: Tensor
    big_offsets: list[Tensor]
    bags: list[Bags]
    group_name: str


class Path:
    """Buffers on the way from pooled rows to the result, and the steps of that way."""

    def __init__(self, given: Operands) -> None:
        cell = given.cell
        part = cell.batch // cell.world
        like = given.tables[0]
        self.counts = [(len(rows), dim) for dim, rows in cell.by_dim]
        self.batch = cell.batch
        self.sent = like.new_empty(cell.batch, cell.columns)
        self.received = like.new_empty(cell.world, part, cell.columns)
        self.result = like.new_empty(part, cell.world, cell.columns)

    def pack(self, pooled: Sequence[Tensor]) -> Tensor:
        """[T_g * B, D_g] of every dim, by table and bag, to [B, sum(D_t)]."""
        start = 0
        for (tables, dim), rows in zip(self.counts, pooled, strict=True):
            place = self.sent[:, start : start + tables * dim].unflatten(1, (tables, dim))
            place.copy_(rows.view(tables, self.batch, dim).transpose(0, 1))
            start += tables * dim
        return self.sent

    def exchange(self) -> Tensor:
        """To [W, B / W, sum(D_t)], by source."""
        return exchange(self.received.view(self.sent.shape), self.sent, None, None)

    def unpack(self) -> Tensor:
        """To [B / W, W, sum(D_t)]."""
        return self.result.copy_(self.received.transpose(0, 1))


def operands(cell: Cell, device: torch.device, group_name: str) -> Operands:
    """Random tables and bags, other ones on every rank."""
    big, tables = [], []
    for dim, rows in cell.by_dim:
        big.append(torch.randn(sum(rows), dim, device=device, dtype=getattr(torch, DTYPE)))
        tables += big[-1].split(rows)
    big_offsets = [offsets(cell, device, len(rows)) for _, rows in cell.by_dim]
    return Operands(cell, big, tables, offsets(cell, device), big_offsets, drawn(cell, device), group_name)


def work(cell: Cell, device: torch.device, group_name: str) -> Work:
    """All that there is to measure of a cell."""
    given = operands(cell, device, group_name)
    mine, whole = exact(given)
    fused = Fused(OP, [arguments(given, bags) for bags in given.bags])

    def variant(run: Callable[[Bags], Any], error: Callable[[Any], float]) -> Variant:
        return Variant(lambda i: run(given.bags[i % len(given.bags)]), error)

    path = Path(given)  # of the steps alone: the peers have another, for what lies here stays
    pooled = _merged(given, given.bags[0])
    path.pack(pooled)
    path.exchange()
    variants = {
        "compute": {
            "per table": variant(lambda bags: _per_table(given, bags), lambda r: mine.error(torch.cat(r, 1))),
            "merged": variant(lambda bags: _merged(given, bags), lambda r: mine.error(path.pack(r))),
        },
        "parts": {
            "all-to-all": Variant(lambda i: path.exchange(), lambda r: whole.error(path.unpack())),
            "pack": Variant(lambda i: path.pack(pooled), mine.error),
            "unpack": Variant(lambda i: path.unpack(), whole.error),
        },
        "peers": {name: variant(run, whole.error) for name, run in peers(given).items()},
        "ours": {"auto": Variant(fused.auto, whole.error)},
    }
    return Work(variants, fused)


def peers(given: Operands) -> dict[str, Callable[[Bags], Tensor]]:
    """What torch ships, with buffers in place, and indices of a merged table shifted beforehand."""
    path = Path(given)

    def per_table(bags: Bags) -> Tensor:
        torch.cat(_per_table(given, bags), 1, out=path.sent)
        path.exchange()
        return path.unpack()

    def merged(bags: Bags) -> Tensor:
        path.pack(_merged(given, bags))
        path.exchange()
        return path.unpack()

    return {"per table+nccl": per_table, "merged+nccl": merged}


def exact(given: Operands) -> tuple[Sample, Sample]:
    """The bags of the first set: those that this rank pools, [B, sum(D_t)], and those that it gets.

    The latter are [B / W, W * sum(D_t)].
    """
    cell = given.cell
    of_ranks = sampled(cell.batch, cell.world, given.offsets.device)
    some, bags = of_ranks[0], of_ranks.flatten()
    rows = [i.view(cell.batch, cell.pooling)[bags] for i in given.bags[0].indices]
    pooled = torch.cat([t[i].double().sum(1) for t, i in zip(given.tables, rows, strict=True)], 1)
    received = exchange(torch.empty_like(pooled), pooled, None, None)
    whole = received.view(cell.world, len(some), cell.columns).transpose(0, 1).flatten(1)
    return (
        Sample((cell.batch, cell.columns), bags, pooled),
        Sample((cell.batch // cell.world, cell.world * cell.columns), some, whole),
    )


def _per_table(given: Operands, bags: Bags) -> list[Tensor]:
    """[B, D_t] of every table."""
    return [
        F.embedding_bag(indices, table, given.offsets, mode="sum")
        for indices, table in zip(bags.indices, given.tables, strict=True)
    ]


def _merged(given: Operands, bags: Bags) -> list[Tensor]:
    """[T_g * B, D_g] of every dim."""
    return [
        F.embedding_bag(indices, table, offsets, mode="sum")
        for indices, table, offsets in zip(bags.merged, given.big, given.big_offsets, strict=True)
    ]


def arguments(given: Operands, bags: Bags) -> tuple[Any, ...]:
    """Those of the fused op."""
    cell = given.cell
    offsets = [given.offsets] * len(given.tables)
    columns = [cell.columns] * cell.world
    options = (0, False, -1, given.tables[0].dtype, columns, "bsc", given.group_name, "direct", "bench")
    return given.tables, bags.indices, offsets, [], *options
