"""Calls of `exchange_bags` on ranks that are CPU processes."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.triton.embedding_tables import Places, Tables
from autofuse.native_kernels.triton.exchange_bags import BagSumsConfig, bag_sums_needs, launch_exchange_bags
from tests.kernels.calls import SITE, peer_memory
from tests.kernels.embedding_calls import Exchange, check, spoil, told

CONFIG = BagSumsConfig(tile=64, unroll=2, per_sm=2, slice_kib=1)


@dataclass(frozen=True)
class BagSums:
    """`of`: the bags of one rank and their tables, without another rank; `only`: the rank that has entries,
    None: all."""

    of: Exchange
    all_ranks: bool = True
    mean: bool = False
    only: int | None = None
    config: BagSumsConfig = CONFIG
    programs: int = 2

    @property
    def columns(self) -> int:
        return sum(self.of.dims[0])

    def need(self, world: int) -> Need:
        of = self.of
        return bag_sums_needs(of.b, self.columns, of.wire.itemsize, world, self.all_ranks, self.config)

    def tables(self, rank: int, seed: int) -> Tables:
        tables = self.of.tables(0, 16 * seed + rank)
        if self.only in (None, rank):
            return tables
        none = [i[:0] for i in tables.indices]
        return replace(tables, indices=none, offsets=[torch.zeros_like(o) for o in tables.offsets])

    def expected(self, rank: int, world: int, seed: int) -> Tensor:
        total = torch.zeros(self.of.b, self.columns)
        for r in range(world):
            if self.only in (None, r):
                total += self.of.pooled(0, 16 * seed + r).float()
        total = (total / world if self.mean else total).to(self.of.wire)
        return total if self.all_ranks else total.chunk(world)[rank]

    def launch(self, memory: PeerMemory, seed: int, tables: Tables) -> Tensor:
        of, world = self.of, memory.world
        places = Places(of.b, tuple(sum(of.dims[0][:t]) for t in range(len(of.dims[0]))), self.columns, ())
        rows = of.b if self.all_ranks else of.b // world
        out = torch.full((rows, self.columns), torch.nan, dtype=of.wire)
        words = torch.tensor(tables.words(places), dtype=torch.int64)
        launch_exchange_bags(
            replace(memory, programs=self.programs), words, tables, places, out, self.mean, self.all_ranks,
            self.config, SITE,
        )  # fmt: skip
        return out

    def run(self, memory: PeerMemory, seed: int) -> None:
        got = self.launch(memory, seed, self.tables(memory.rank, seed))
        check(got, self.expected(memory.rank, memory.world, seed), self, memory)


def reported(rank: int, world: int, call: BagSums, table: int, at: int, value: int, offset: bool) -> int:
    """The word of the record of rank 1, which has `value` among the indices (offsets) of a table.

    All other bags are right on all ranks, and so is the next call.
    """
    memory = peer_memory(rank, world, call.need(world))
    tables = call.tables(rank, 0)
    if rank == 1:
        spoil(tables, table, at, value, offset)
    got = call.launch(memory, 0, tables)
    word = told(memory)
    wrong = (got != call.expected(rank, world, 0)).any(1)
    assert int(wrong.sum()) <= 1 + offset, "other bags were touched"
    assert not got.isnan().any()
    call.run(memory, 1)
    dist.barrier()
    return word
