"""Calls of `embedding_exchange` on ranks that are CPU processes; every call is checked bit by bit.

Tables and weights are small multiples of 1/4: sums are exact in fp32 and in fp64, so that the only roundings
are those that the op promises.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.embedding.call import tables_of
from autofuse.lowering.gpu.embedding.places import places_of, send_places
from autofuse.lowering.gpu.embedding.run import exchange
from autofuse.lowering.gpu.embedding.ways import ExchangeProblem
from autofuse.lowering.gpu.memory.descriptors import Descriptors
from autofuse.lowering.reference import embedding_layout
from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.gpu.state import State
from autofuse.native_kernels.triton.embedding_exchange import launch_embedding_exchange
from autofuse.native_kernels.triton.embedding_tables import BagsConfig, Tables, exchange_needs
from tests.kernels.calls import SITE, peer_memory, placed, straggling

CONFIG = BagsConfig(tile=64, unroll=2, per_sm=3, copying=1, slice_kib=1)


@dataclass(frozen=True)
class Exchange:
    """A call: `dims[r]` are those of rank r's tables, `dtypes` theirs by turns; a bag has at most `pooling`
    indices, or none. Tables of dim 0 and the first `bare` ones have no rows, and bags none of them."""

    dims: tuple[tuple[int, ...], ...]
    b: int = 5
    pooling: int = 4
    rows: int = 9
    layout: str = "bsc"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    wire: torch.dtype = torch.bfloat16
    index: torch.dtype = torch.int64
    mode: int = 0
    weighted: bool = False
    last: bool = False
    padding: int = -1
    send: bool = False
    bare: int = 0
    config: BagsConfig = field(default=CONFIG)

    @property
    def columns(self) -> list[int]:
        return [sum(dims) for dims in self.dims]

    def tables(self, rank: int, seed: int) -> Tables:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        bags = self.b * len(self.dims)
        weights, indices, offsets, samples = [], [], [], []
        for t, dim in enumerate(self.dims[rank]):
            dtype = self.dtypes[t % len(self.dtypes)]
            stops = torch.randint(0, self.pooling + 1, (bags,), generator=generator).cumsum(0)
            bounds = torch.cat([stops.new_zeros(1), stops]).to(self.index)
            count, rows = int(stops[-1]), self.rows if dim and t >= self.bare else 0
            weights.append((torch.randint(-8, 9, (rows, dim), generator=generator) / 4).to(dtype))
            indices.append(torch.randint(0, self.rows, (count,), generator=generator).to(self.index))
            offsets.append(bounds if self.last else bounds[:-1].contiguous())
            if not rows:
                indices[-1], offsets[-1] = indices[-1][:0], torch.zeros_like(offsets[-1])
            if self.weighted:
                samples.append((torch.randint(-4, 5, indices[-1].shape, generator=generator) / 4).to(dtype))
        return Tables(weights, indices, offsets, samples, self.mode, self.last, self.padding)

    def pooled(self, rank: int, seed: int) -> Tensor:
        """All bags of a rank, [B, columns], as they are exchanged; bag by bag, in fp64 but for the mean."""
        tables, found = self.tables(rank, seed), []
        bags = self.b * len(self.dims)
        for t, (w, indices, offsets) in enumerate(
            zip(tables.weights, tables.indices, tables.offsets, strict=True)
        ):
            bounds = [*offsets.tolist()[:bags], len(indices)]
            rows = []
            for start, stop in pairwise(bounds):
                used = indices[start:stop].long()
                keep = (used != self.padding) & (used >= 0) & (used < self.rows)
                values = w[used[keep]].double()
                if self.weighted:
                    values = values * tables.samples[t][start:stop][keep].double()[:, None]
                if self.mode == 2:
                    row = values.max(0).values if len(values) else w.new_zeros(w.shape[1]).double()
                else:
                    row = values.sum(0)
                if self.mode == 1:
                    row = row.float() / max(1, len(values))
                rows.append(row.float())
            found.append(torch.stack(rows).to(w.dtype).to(self.wire))
        return torch.cat(found, 1)

    def need(self, world: int) -> Need:
        places = places_of(self.layout, 0, self.b, self.columns, self.dims[0])
        return exchange_needs(places, self.wire.itemsize, world, self.config)

    def run(self, memory: PeerMemory, seed: int, tables: Tables | None = None) -> Tensor:
        """Launch on this rank."""
        rank, b, dims = memory.rank, self.b, self.dims[memory.rank]
        tables = tables or self.tables(rank, seed)
        if self.send:
            places = send_places(rank, b, self.columns, dims)
            shape: list[int] = [len(self.dims), b, self.columns[rank]]
        else:
            places = places_of(self.layout, rank, b, self.columns, dims)
            shape = [int(n) for n in embedding_layout.shape(self.layout, b, self.columns, dims)]
        out = torch.full(shape, torch.nan, dtype=self.wire)
        words = torch.tensor(tables.words(places), dtype=torch.int64)
        launch_embedding_exchange(memory, words, tables, places, out, self.config, self.send, SITE)
        return out

    def expected(self, rank: int, seed: int) -> Tensor:
        dims = self.dims[rank]
        if self.send:
            return self.pooled(rank, seed).view(len(self.dims), self.b, -1)
        shape = embedding_layout.shape(self.layout, self.b, self.columns, dims)
        out = torch.full([int(n) for n in shape], torch.nan, dtype=self.wire)
        for source in range(len(self.dims)):
            part = embedding_layout.part(out, self.layout, source, self.b, self.columns)
            mine = self.pooled(source, seed)[rank * self.b : (rank + 1) * self.b]
            part.copy_(mine.view(part.shape))
        return out


def check(got: Tensor, expected: Tensor, call: object, memory: PeerMemory) -> None:
    """AssertionError unless bitwise equal (zeros may differ in sign) and nobody gave up waiting."""
    assert not memory.record.any(), f"rank {memory.rank}, {call}: {memory.record.tolist()}"
    wrong = ~((got == expected) & (got.signbit() == expected.signbit())) & ~((got == 0) & (expected == 0))
    assert not wrong.any(), (
        f"rank {memory.rank}, call {int(memory.state[3])}, {call}: {int(wrong.sum())} of {wrong.numel()} "
        f"differ, first at {wrong.nonzero()[0].tolist()}: {got[wrong][0]} instead of {expected[wrong][0]}"
    )


def needed(calls: list[Exchange], world: int) -> Need:
    need = Need()
    for call in calls:
        need |= call.need(world)
    return need


def run_exchanges(
    rank: int, world: int, calls: list[Exchange], before: int = 0, late: int | None = None
) -> None:
    """One call after another on one memory, with no barrier between, by ranks that straggle.

    before: the epoch of the call before; late: a seed, of programs that are placed late.
    """
    memory = peer_memory(rank, world, needed(calls, world))
    memory.epoch.fill_(before)
    with straggling(rank), placed(rank, memory, late) as memory:
        for number, call in enumerate(calls):
            check(call.run(memory, number), call.expected(rank, number), call, memory)
    epochs = sum(not call.send for call in calls)
    assert memory.state[State.EPOCH : State.FIRM].tolist() == [before + epochs] + 10 * [0]
    dist.barrier()  # peers may still store
    assert not memory.signals.views[rank].any(), "counters are left over"
    assert not memory.words.views[rank].any(), "words are left over"
    assert not memory.done.any()


def spoil(tables: Tables, table: int, at: int, value: int, offset: bool) -> None:
    """Puts `value` among the indices (offsets) of a table."""
    (tables.offsets if offset else tables.indices)[table][at] = value


def told(memory: PeerMemory) -> int:
    """The word of the record about a bad index or offset. Nobody gave up waiting. Clears the record."""
    word = int(memory.record.view(torch.int64)[3])
    assert memory.record[:6].tolist() == [0] * 6
    memory.record.zero_()
    return word


def reported(rank: int, world: int, call: Exchange, table: int, at: int, value: int, offset: bool) -> int:
    """The word of rank 1's record after rank 1 has put `value` into the indices (offsets) of a table.

    All other bags are right on all ranks, and so is the next call.
    """
    memory = peer_memory(rank, world, call.need(world))
    tables = call.tables(rank, 0)
    if rank == 1:
        spoil(tables, table, at, value, offset)
    got = call.run(memory, 0, tables)
    word = told(memory)
    if not offset:
        wrong = (got != call.expected(rank, 0)).nonzero()
        assert len(wrong.unique(dim=0)[:, 0].unique()) <= 1, "other bags were touched"
    assert not got.isnan().any()
    check(call.run(memory, 1), call.expected(rank, 1), call, memory)
    dist.barrier()
    return word


class FakeWorkspace:
    """As `GpuWorkspace`, of CPU ranks."""

    def __init__(self, memory: PeerMemory) -> None:
        assert dist.group.WORLD is not None
        self.memory, self.rank = memory, memory.rank
        self.group_name = dist.group.WORLD.group_name
        self.engine = None
        self.group, self.calls, self.again = dist.group.WORLD, dict[Any, Any](), Mock()
        self.device = torch.device("cpu")
        self.descriptors = Descriptors(
            lambda to, words: to[: len(words) // 8].copy_(torch.frombuffer(words, dtype=torch.int64)),
            lambda size: torch.zeros(size, dtype=torch.int64),
        )

    def enter(self, *args: Any) -> tuple[PeerMemory, int, bool]:
        args[2]()
        return self.memory, SITE, False

    def leave(self) -> None:
        pass


def run_way(rank: int, world: int, way: str, call: Exchange) -> None:
    """A call as `lowering.gpu.embedding.run` makes it."""
    memory = peer_memory(rank, world, call.need(world))
    problem = ExchangeProblem(call.b, tuple(call.columns), call.layout, call.wire, 1)
    found_way = replace(ways_of(problem)[way], config=call.config)
    given = call.tables(rank, 0)
    tables = tables_of(
        given.weights, given.indices, given.offsets, given.samples, call.mode, call.last, call.padding
    )
    workspace: Any = FakeWorkspace(memory)
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        found = exchange(workspace, found_way, problem, tables, "here")
    assert found is not None
    check(found, call.expected(rank, 0), call, memory)
    dist.barrier()


def lose(rank: int, world: int, call: Exchange, lost: int) -> list[int]:
    """The failure record where rank `lost` never makes the call; the kernel ends nevertheless."""
    memory = peer_memory(rank, world, call.need(world), polls=50)
    if rank != lost:
        call.run(memory, 0)
        assert memory.state[2] == 1
        assert memory.state[State.EPOCH : State.FIRM].tolist() == [1] + 10 * [0], "the epoch did not end"
    dist.barrier()
    return memory.record.tolist()


def same_bits(rank: int, world: int, call: Exchange) -> None:
    """Two runs on random values give the same bits, near those of an fp64 reference."""
    memory = peer_memory(rank, world, call.need(world))

    def random_tables(of: int) -> Tables:
        tables = call.tables(of, 0)
        generator = torch.Generator().manual_seed(of)
        for values in (*tables.weights, *tables.samples):
            values.copy_(torch.randn(values.shape, generator=generator))
        return tables

    with straggling(rank):
        first, second = (call.run(memory, 0, random_tables(rank)) for _ in range(2))
    assert torch.equal(first, second)
    part = embedding_layout.part
    for source in range(world):
        t, b = random_tables(source), call.b
        pooled = [
            F.embedding_bag(i, w.double(), o, mode="sum", per_sample_weights=s.double())
            for w, i, o, s in zip(t.weights, t.indices, t.offsets, t.samples, strict=True)
        ]
        wanted = torch.cat(pooled, 1)[rank * b : (rank + 1) * b]
        got = part(first, call.layout, source, b, call.columns).reshape(wanted.shape)
        eps = torch.finfo(call.wire).eps / 2  # one rounding, of sums of at most `pooling` terms of fp32
        small = 4 * call.pooling**2 * torch.finfo(torch.float32).eps
        assert ((got.double() - wanted).abs() <= eps * (1 + eps) * wanted.abs() + small).all()
    dist.barrier()
