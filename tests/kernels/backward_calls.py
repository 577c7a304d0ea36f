"""Calls of `embedding_backward` on ranks that are CPU processes; every call is checked bit by bit.

Gradients and weights are small multiples of 1/4, and bags of a mean have up to two indices: sums are exact in
fp32, so that the only rounding is that to the dtype of the tables.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.embedding.call import gradients_of
from autofuse.lowering.gpu.embedding.places import backward_places
from autofuse.lowering.gpu.embedding.run import exchange_backward
from autofuse.lowering.gpu.embedding.ways import BACKWARD, ExchangeProblem
from autofuse.lowering.reference import embedding_layout
from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.gpu.state import State
from autofuse.native_kernels.triton.embedding_backward import launch_embedding_backward
from autofuse.native_kernels.triton.embedding_entries import sorted_entries
from autofuse.native_kernels.triton.embedding_tables import (
    BackwardConfig,
    Tables,
    backward_needs,
    backward_words,
)
from tests.kernels.calls import SITE, peer_memory, placed, straggling
from tests.kernels.embedding_calls import Exchange, FakeWorkspace, check, spoil, told

CONFIG = BackwardConfig(tile=64, strip=8, per_sm=2, adding=1)


@dataclass(frozen=True)
class Backward:
    """The backward of a call, whose tables are all of `of.dtypes[0]`. push: not what NCCL has exchanged."""

    of: Exchange
    keep: bool = False
    push: bool = True
    config: BackwardConfig = field(default=CONFIG)

    def tables(self, rank: int, seed: int) -> Tables:
        """As the forward has them, but with gradients of NaN for weights."""
        tables = self.of.tables(rank, seed)
        return replace(tables, weights=[torch.full_like(w, torch.nan) for w in tables.weights])

    def exchanged(self, rank: int, seed: int) -> Tensor:
        """G of a rank, [B, C]."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        shape = self.of.b * len(self.of.dims), self.of.columns[rank]
        return (torch.randint(-8, 9, shape, generator=generator) / 4).to(self.of.wire)

    def grad(self, rank: int, seed: int) -> Tensor:
        """The gradient of what a rank has got, in its layout."""
        of, mine = self.of, slice(rank * self.of.b, (rank + 1) * self.of.b)
        shape = embedding_layout.shape(of.layout, of.b, of.columns, of.dims[rank])
        grad = torch.empty([int(n) for n in shape], dtype=of.wire)
        for source in range(len(of.dims)):
            part = embedding_layout.part(grad, of.layout, source, of.b, of.columns)
            part.copy_(self.exchanged(source, seed)[mine].view(part.shape))
        return grad

    def need(self, world: int) -> Need:
        return backward_needs(self.of.b, self.of.columns, self.of.wire.itemsize)

    def run(
        self, memory: PeerMemory, seed: int, tables: Tables | None = None, grad: Tensor | None = None
    ) -> list[Tensor]:
        """Launch on this rank; the gradients and, with `keep`, G."""
        rank, of = memory.rank, self.of
        tables = self.tables(rank, seed) if tables is None else tables
        grad = self.grad(rank, seed) if grad is None else grad
        places = backward_places(of.layout, rank, of.b, of.columns, of.dims[rank])
        words = torch.tensor(backward_words(tables, places, self.config), dtype=torch.int64)
        entries = sorted_entries(memory, words, tables, of.b * memory.world, SITE)
        exchanged = torch.full_like(self.exchanged(rank, seed), torch.nan) if self.keep else None
        if not self.push:
            exchanged = self.exchanged(rank, seed)
        launch_embedding_backward(
            memory, words, tables, places, entries, grad if self.push else None, exchanged, self.config, SITE
        )
        return [*tables.weights, exchanged] if exchanged is not None else list(tables.weights)

    def expected(self, rank: int, seed: int) -> list[Tensor]:
        """The sums, rounded once; and G."""
        weights = self.of.tables(rank, seed).weights
        found = [g.float().to(w.dtype) for w, g in zip(weights, self.sums(rank, seed), strict=True)]
        return [*found, self.exchanged(rank, seed)] if self.keep or not self.push else found

    def sums(self, rank: int, seed: int) -> list[Tensor]:
        """Entry by entry, in fp64."""
        tables, found = self.of.tables(rank, seed), []
        for t, piece in enumerate(self.exchanged(rank, seed).double().split(list(self.of.dims[rank]), 1)):
            total = torch.zeros(tables.weights[t].shape, dtype=torch.float64)
            indices = tables.indices[t]
            bounds = [*tables.offsets[t].tolist()[: piece.shape[0]], len(indices)]
            for bag, (start, stop) in enumerate(pairwise(bounds)):
                rows = indices[start:stop].long()
                keep = (rows != self.of.padding) & (rows >= 0) & (rows < total.shape[0])
                scale = torch.ones(int(keep.sum()), dtype=torch.float64)
                if self.of.weighted:
                    scale = tables.samples[t][start:stop][keep].double()
                if self.of.mode == 1:
                    scale = scale / max(1, len(scale))
                total.index_add_(0, rows[keep], scale[:, None] * piece[bag])
            found.append(total)
        return found


def check_all(call: Backward, memory: PeerMemory, seed: int) -> None:
    rank = memory.rank
    for got, expected in zip(call.run(memory, seed), call.expected(rank, seed), strict=True):
        check(got, expected, call, memory)


def run_backwards(
    rank: int, world: int, calls: list[Backward | Exchange], before: int = 0, late: int | None = None
) -> None:
    """One call after another on one memory, with no barrier between, by ranks that straggle.

    before: the epoch of the call before; late: a seed, of programs that are placed late.
    """
    need = Need()
    for call in calls:
        need |= call.need(world)
    memory = peer_memory(rank, world, need)
    memory.epoch.fill_(before)
    with straggling(rank), placed(rank, memory, late) as memory:
        for number, call in enumerate(calls):
            if isinstance(call, Backward):
                check_all(call, memory, number)
            else:
                check(call.run(memory, number), call.expected(rank, number), call, memory)
    epochs = sum(call.push if isinstance(call, Backward) else not call.send for call in calls)
    assert memory.state[State.EPOCH : State.FIRM].tolist() == [before + epochs] + 10 * [0]
    dist.barrier()  # peers may still store
    assert not memory.signals.views[rank].any(), "counters are left over"
    assert not memory.done.any()


def run_backward_way(rank: int, world: int, way: str, call: Backward) -> None:
    """A call as `lowering.gpu.embedding.run` makes it."""
    memory, of = peer_memory(rank, world, call.need(world)), call.of
    problem = ExchangeProblem(of.b, tuple(of.columns), of.layout, of.wire, 1, BACKWARD)
    found_way = replace(ways_of(problem)[way], config=call.config)
    given = call.tables(rank, 0)
    tables = gradients_of(
        [w.shape[0] for w in given.weights], given.dims, of.dtypes[0], list(given.indices),
        list(given.offsets), list(given.samples), of.mode, of.last, of.padding,
    )  # fmt: skip
    workspace: Any = FakeWorkspace(memory)
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        found = exchange_backward(
            workspace, found_way, problem, tables, call.grad(rank, 0), call.keep, "here"
        )
    assert found is not None
    for got, expected in zip(found, call.expected(rank, 0), strict=True):
        check(got, expected, call, memory)
    dist.barrier()


def same_sums(rank: int, world: int, call: Backward) -> None:
    """Two runs on random values give the same bits, near those of an fp64 reference."""
    memory, of = peer_memory(rank, world, call.need(world)), call.of

    def values(rank: int) -> tuple[Tables, Tensor]:
        tables, generator = call.tables(rank, 0), torch.Generator().manual_seed(rank)
        for sample in tables.samples:
            sample.copy_(torch.randn(sample.shape, generator=generator))
        return tables, torch.randn(call.exchanged(rank, 0).shape, generator=generator).to(of.wire)

    exchanged = [values(r)[1] for r in range(world)]
    with patch.object(Backward, "exchanged", lambda self, source, seed: exchanged[source]), straggling(rank):
        grad = call.grad(rank, 0)
        first, second = (call.run(memory, 0, values(rank)[0], grad) for _ in range(2))
    tables = values(rank)[0]
    for t, piece in enumerate(exchanged[rank].double().split(list(of.dims[rank]), 1)):
        assert torch.equal(first[t], second[t])
        weight = torch.zeros(tables.weights[t].shape, dtype=torch.float64, requires_grad=True)
        pooled = F.embedding_bag(
            tables.indices[t], weight, tables.offsets[t], mode=("sum", "mean")[of.mode],
            per_sample_weights=tables.samples[t].double() if of.weighted else None,
            include_last_offset=of.last, padding_idx=of.padding if of.padding >= 0 else None,
        )  # fmt: skip
        pooled.backward(piece)
        assert weight.grad is not None
        wanted, got = weight.grad, first[t].double()
        eps = torch.finfo(first[t].dtype).eps / 2  # one rounding, of sums of fp32
        terms = len(tables.indices[t])
        small = 8 * terms * torch.finfo(torch.float32).eps
        assert ((got - wanted).abs() <= eps * (1 + eps) * wanted.abs() + small).all()
    dist.barrier()


def reported(rank: int, world: int, call: Backward, value: int, offset: bool) -> int:
    """The word of rank 1's record after rank 1 has put `value` into the indices (offsets) of table 1.

    Gradients of other tables are right on all ranks, and so is the next call.
    """
    memory = peer_memory(rank, world, call.need(world))
    tables = call.tables(rank, 0)
    if rank == 1:
        spoil(tables, 1, 2, value, offset)
    got = call.run(memory, 0, tables)
    word = told(memory)
    for t, (found, expected) in enumerate(zip(got, call.expected(rank, 0), strict=True)):
        assert not found.isnan().any()
        if rank != 1 or t != 1:
            check(found, expected, call, memory)
    check_all(call, memory, 1)
    dist.barrier()
    return word


def lose_backward(rank: int, world: int, call: Backward, lost: int) -> list[int]:
    """The failure record where rank `lost` never makes the call; the kernel ends nevertheless."""
    memory = peer_memory(rank, world, call.need(world), polls=50)
    if rank != lost:
        call.run(memory, 0)
        assert memory.state[2] == 1
        assert memory.state[State.EPOCH : State.FIRM].tolist() == [1] + 10 * [0], "the epoch did not end"
    dist.barrier()
    return memory.record.tolist()
