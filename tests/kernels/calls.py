"""Calls of the Triton kernels on ranks that are CPU processes; every call is checked bit by bit.

Inputs are small multiples of 1/4: their products and sums are exact in fp32, so that the only roundings are
those that the kernels promise, whatever the order of the terms: of the parts before they are added, and of
their sum.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from autofuse.lowering.cpu import rendezvous
from autofuse.lowering.reference.layout import whole
from autofuse.lowering.torch_internals import group_store
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, Region, new_state
from autofuse.native_kernels.gpu.state import RECORD_WORDS, Record, State
from autofuse.native_kernels.triton import interpreter
from autofuse.native_kernels.triton.gather_matmul import GatherConfig, gather_needs, launch_gather_matmul
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig, few_needs, launch_gather_matmul_few
from autofuse.native_kernels.triton.kept_rows import launch_kept_rows
from autofuse.native_kernels.triton.matmul_gather import PublishConfig, launch_matmul_gather, publish_needs
from autofuse.native_kernels.triton.matmul_gather_packets import (
    PublishPacketsConfig,
    launch_matmul_gather_packets,
    publish_packets_needs,
)
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig, launch_matmul_packets, packets_needs
from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig, launch_matmul_reduce, reduce_needs
from tests.kernels import at_once
from tests.ranks import WAIT_S

POLL_NS = 20_000  # what a poll counts for in the interpreter
SITE = 5  # stands in failure records
BF16, FP16 = torch.bfloat16, torch.float16
REDUCE_CONFIG = ReduceConfig(bm=16, bn=16, bk=16, bt=16, br=16)
PACKETS_CONFIG = PacketsConfig(bn=16, bk=16)

T = TypeVar("T")

_installed = False


def peer_memory(rank: int, world: int, need: Need, polls: int = 3_000_000) -> PeerMemory:
    """Memory of one rank, as the launchers take it, in POSIX shared memory: NaN where tiles go, else 0."""
    global _installed
    if not _installed:
        interpreter.install()
        at_once.install()
        _installed = True
    needs = need.inbox, need.finished, need.packets, need.words, need.signals, 4 * world
    sizes = [-(-max(n, 1) // 256) * 256 for n in needs]
    store = group_store(dist.group.WORLD)
    _, segments, unlink = rendezvous.meet(store, "kernels", rank, [None] * world, sum(sizes), WAIT_S)
    *regions, presence = zip(*(segment.split(sizes) for segment in segments), strict=True)
    inbox, finished, packets, words, signals = map(Region.of, regions)
    for region in (inbox, finished):
        region.views[rank].fill_(0xFF)
    record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
    state = new_state(record, [p.view(torch.int32) for p in presence], 1, torch.device("cpu"))
    state[State.LIMIT] = polls * POLL_NS
    pieces, done = torch.full((need.pieces,), torch.nan), torch.zeros(need.done, dtype=torch.int32)
    dist.barrier()
    unlink()
    nothing = Region.of([segment[:0] for segment in segments])
    return PeerMemory(
        rank, world, 1, inbox, finished, packets, words, nothing, nothing, nothing, signals, nothing, state,
        record, pieces, done, segments[rank][:0],
    )  # fmt: skip


def random_matrix(seed: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, (rows, cols), generator=generator) / 4).to(dtype)


def random_weight(seed: int, k: int, n: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    """[K, N], stored the other way round if `transposed`."""
    return random_matrix(seed, n, k, dtype).t() if transposed else random_matrix(seed, k, n, dtype)


def nan(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows, cols), torch.nan, dtype=dtype)


@dataclass(frozen=True)
class Reduction:
    """What the two kernels that reduce have in common: sum over ranks of `[M, K] @ [K, N]`, of one matmul or
    of a sum of several, whose other lengths K are `more`."""

    m: int
    n: int
    k: int
    all_ranks: bool = True
    dtype: torch.dtype = BF16
    transposed: bool = True
    mean: bool = False
    more: tuple[int, ...] = ()

    def inputs(self, rank: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """x and w of each term."""
        x, w = list[Tensor](), list[Tensor]()
        for term, k in enumerate((self.k, *self.more)):
            at = 10_000 * term + 100 * seed + rank
            x.append(random_matrix(at, self.m, k, self.dtype))
            w.append(random_weight(at + 50, k, self.n, self.dtype, self.transposed))
        return x, w

    def expected(self, world: int, seed: int) -> Tensor:
        inputs = (self.inputs(r, seed) for r in range(world))
        parts = [torch.cat(x, 1).double() @ torch.cat(w).double() for x, w in inputs]
        total = sum((part.to(self.dtype).float() for part in parts), torch.zeros(self.m, self.n))
        return (total / world if self.mean else total).to(self.dtype)


@dataclass(frozen=True)
class Reduce(Reduction):
    """A call of `matmul_reduce`; by rows, chunk r is digit r of the rows as (outer, W, inner)."""

    outer: int = 1
    order: int = 0
    config: ReduceConfig = REDUCE_CONFIG
    computing: int = 2

    def need(self, world: int) -> Need:
        return reduce_needs(self.m, self.n, self.outer, 2, world, self.all_ranks, self.config)

    def run(self, memory: PeerMemory, seed: int) -> None:
        rank, world, config = memory.rank, memory.world, self.config
        expected = self.expected(world, seed)
        if not self.all_ranks and config.by_rows:
            expected = expected.view(self.outer, world, -1, self.n)[:, rank].reshape(-1, self.n)
        elif not self.all_ranks:
            expected = expected.chunk(world, 1)[rank]
        out = nan(*expected.shape, self.dtype)
        launch_matmul_reduce(
            replace(memory, programs=self.computing + config.communicating), *self.inputs(rank, seed), out,
            self.mean, self.all_ranks, self.outer, self.order, config, SITE,
        )  # fmt: skip
        check(out, expected, self, memory)


@dataclass(frozen=True)
class Packets(Reduction):
    """A call of `matmul_packets`."""

    config: PacketsConfig = PACKETS_CONFIG
    programs: int = 2

    def need(self, world: int) -> Need:
        return packets_needs(self.m, self.n, world, self.config)

    def run(self, memory: PeerMemory, seed: int) -> None:
        rank, world = memory.rank, memory.world
        expected = self.expected(world, seed)
        if not self.all_ranks:
            expected = expected.split(-(-self.m // world))[rank]
        out = nan(*expected.shape, self.dtype)
        launch_matmul_packets(
            replace(memory, programs=self.programs), *self.inputs(rank, seed), out,
            self.mean, self.all_ranks, self.config, SITE,
        )  # fmt: skip
        check(out, expected, self, memory)
        if self.all_ranks:  # then every rank receives sums
            epoch = int(memory.state[State.EPOCH])
            half = memory.packets.views[rank].view(torch.int32).chunk(2)[epoch % 2]
            tag = torch.tensor(epoch % (2**32 - 1) or -1).int()
            assert bool((half == tag).any()), f"no packet of call {epoch} lies in its half"


@dataclass(frozen=True)
class Gather:
    """A call of `gather_matmul` or, with a FewConfig, `gather_matmul_few`: parts `[C, K]`, weight `[K, N]`;
    of the first also with several weights, whose other widths N are `more`.

    Rows of the gathered matrix are (outer, W, inner), those of part r digit r of the middle.
    """

    chunk: int
    n: int
    k: int
    config: GatherConfig | FewConfig
    dtype: torch.dtype = BF16
    transposed: bool = True
    outer: int = 1
    computing: int = 2
    biased: bool = False
    more: tuple[int, ...] = ()

    def need(self, world: int) -> Need:
        if isinstance(self.config, FewConfig):
            return few_needs(self.chunk, self.k, self.n, 2, world, self.config)
        return gather_needs(self.chunk, self.k, self.widths, self.outer, 2, world, self.config)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.n, *self.more

    def run(self, memory: PeerMemory, seed: int) -> None:
        rank, world, config = memory.rank, memory.world, self.config
        parts = [random_matrix(100 * seed + r, self.chunk, self.k, self.dtype) for r in range(world)]
        w, bias, out = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, n in enumerate(self.widths):
            at = 10_000 * i + 100 * seed
            w.append(random_weight(at + 50, self.k, n, self.dtype, self.transposed))
            bias += [random_matrix(at + 60, 1, n, self.dtype)[0]] if self.biased else []
            out.append(nan(world * self.chunk, n, self.dtype))
        if isinstance(config, FewConfig):
            only = bias[0] if bias else None
            gathered = launch_gather_matmul_few(memory, parts[rank], w[0], out[0], config, SITE, bias=only)
        else:
            programs = self.computing + (0 if config.shared else config.movers)
            gathered = launch_gather_matmul(
                replace(memory, programs=programs), parts[rank], w, out, self.outer, config, site=SITE,
                bias=bias,
            )  # fmt: skip
        gathered_x = torch.stack([part.view(self.outer, -1, self.k) for part in parts], 1).flatten(0, 2)
        for i, y in enumerate(out):
            expected = gathered_x.double() @ w[i].double()
            expected = expected + bias[i].double() if bias else expected
            check(y, expected.to(self.dtype), self, memory)
        kept = nan(world * self.chunk, self.k, self.dtype)
        launch_kept_rows(memory, gathered, parts[rank], self.outer, kept)
        check(kept, gathered_x, self, memory)


@dataclass(frozen=True)
class Publish:
    """A call of `matmul_gather` or, with a PublishPacketsConfig, `matmul_gather_packets`: `[M, K] @ [K, N]`.

    With dim 0 rows of the result are (outer, W, inner), those of rank r digit r of the middle.
    """

    m: int
    n: int
    k: int
    config: PublishConfig | PublishPacketsConfig
    dim: int = 1
    outer: int = 1
    dtype: torch.dtype = BF16
    transposed: bool = True
    biased: bool = False
    programs: int = 2

    def need(self, world: int) -> Need:
        if isinstance(self.config, PublishPacketsConfig):
            return publish_packets_needs(self.m, self.n, world, self.config)
        return publish_needs(self.m, self.n, self.outer, 2, world, self.config)

    def inputs(self, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        x = random_matrix(100 * seed + rank, self.m, self.k, self.dtype)
        w = random_weight(100 * seed + rank + 50, self.k, self.n, self.dtype, self.transposed)
        return x, w, random_matrix(100 * seed + rank + 80, 1, self.n, self.dtype)[0] if self.biased else None

    def expected(self, world: int, seed: int) -> Tensor:
        products = []
        for x, w, bias in (self.inputs(r, seed) for r in range(world)):
            p = x.double() @ w.double()
            products.append((p if bias is None else p + bias.double()).to(self.dtype))
        return whole(torch.stack(products), self.dim, self.outer)

    def run(self, memory: PeerMemory, seed: int) -> None:
        config, expected = self.config, self.expected(memory.world, seed)
        x, w, bias = self.inputs(memory.rank, seed)
        out = nan(*expected.shape, self.dtype)
        if isinstance(config, PublishPacketsConfig):
            memory = replace(memory, programs=self.programs)
            launch_matmul_gather_packets(memory, x, w, out, self.dim, self.outer, config, SITE, bias=bias)
        else:
            memory = replace(memory, programs=self.programs + config.communicating)
            launch_matmul_gather(memory, x, w, out, self.dim, self.outer, config, SITE, bias=bias)
        check(out, expected, self, memory)


Call = Reduce | Packets | Gather | Publish


def check(got: Tensor, expected: Tensor, call: Call, memory: PeerMemory) -> None:
    """AssertionError unless bitwise equal and nobody gave up waiting."""
    assert not memory.record.any(), f"rank {memory.rank}, {call}: gave up with {memory.record.tolist()}"
    number = int(memory.state[3])
    bits = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    wrong = (got.view(bits) != expected.contiguous().view(bits)) & ~((got == 0) & (expected == 0))
    assert not wrong.any(), (
        f"rank {memory.rank}, call {number}, {call}: {int(wrong.sum())} of {wrong.numel()} differ, "
        f"first at {wrong.nonzero()[0].tolist()}: {got[wrong][0]} instead of {expected[wrong][0]}"
    )


@contextmanager
def straggling(rank: int) -> Iterator[None]:
    """Now and then this rank pauses, also in the middle of a kernel: before it reads something."""
    chance, load = random.Random(rank), InterpreterBuilder.create_masked_load

    def late(*args: Any, **kwargs: Any) -> Any:
        if chance.random() < 0.002:
            time.sleep(chance.random() * 0.05)
        return load(*args, **kwargs)

    with patch.object(InterpreterBuilder, "create_masked_load", late):
        yield


@contextmanager
def placed(rank: int, memory: PeerMemory, late: int | None) -> Iterator[PeerMemory]:
    """The memory for calls of which some programs are placed late, if `late` is a seed: of two
    multiprocessors, of which one is the margin."""
    if late is None:
        yield memory
        return
    memory.state[State.LIMIT] = 100_000 * POLL_NS
    with at_once.late(100 * late + rank):
        yield replace(memory, programs=2)


def run_calls(
    rank: int, world: int, calls: Sequence[Call], before: int = 0, firm: int = 1, late: int | None = None
) -> None:
    """One call after another on one memory, with no barrier between, by ranks that straggle.

    before: the epoch of the call before; firm: programs that wait for a peer that has not started a call;
    late: a seed, of programs that are placed late.
    """
    need = Need()
    for call in calls:
        need |= call.need(world)
    memory = peer_memory(rank, world, need)
    memory.epoch.fill_(before)
    memory.state[State.FIRM] = firm
    with straggling(rank), placed(rank, memory, late):
        for number, call in enumerate(calls):
            call.run(memory, number)
    assert memory.state[State.EPOCH : State.FIRM].tolist() == [before + len(calls)] + 10 * [0]
    dist.barrier()  # peers may still store
    assert not memory.signals.views[rank].any(), "counters are left over"
    assert not memory.words.views[rank].any(), "words are left over"
    assert not memory.done.any()
    assert not memory.claims.any()


def at_random(calls: Sequence[T], count: int, seed: int) -> list[T]:
    """`count` of `calls`; none twice more often than another, so that a short list has most of them."""
    chance, found = random.Random(seed), list[T]()
    while len(found) < count:
        found += chance.sample(calls, len(calls))
    return found[:count]


def give_up(rank: int, world: int, call: Call, lost: int, stopped: bool) -> list[int]:
    """The failure record of a rank where rank `lost` never makes the call; the kernel ends nevertheless:
    after its limit, or because the host has said that rank `lost` will not come."""
    memory = peer_memory(rank, world, call.need(world), polls=3_000_000 if stopped else 250)
    if stopped:
        memory.record[Record.STOP] = 1 << lost
    if rank != lost:
        with suppress(AssertionError):  # what it computed is wrong
            call.run(memory, 0)
        assert memory.state[2] == 1
        assert memory.state[State.EPOCH : State.FIRM].tolist() == [1] + 10 * [0], "the epoch did not end"
        assert not memory.claims.any()
    dist.barrier()
    return memory.record.tolist()


def stopped_in_vain(rank: int, world: int, call: Call) -> None:
    """Waits for other ranks than the one that the host names go on."""
    memory = peer_memory(rank, world, call.need(world))
    memory.record[Record.STOP] = 1 << world
    with suppress(AssertionError):  # the record is not empty
        call.run(memory, 0)
    assert memory.record.tolist() == [1 << world if i == Record.STOP else 0 for i in range(RECORD_WORDS)]
    dist.barrier()


def recover(rank: int, world: int, calls: Sequence[Call], lost: int) -> list[int]:
    """Rank `lost` makes the first call when its peers have given up. Memory that was reset then is as new."""
    memory = peer_memory(rank, world, reduce(or_, (call.need(world) for call in calls)), polls=50)
    if rank == lost:
        dist.barrier()
    with suppress(AssertionError):
        calls[0].run(memory, 0)
    if rank != lost:
        dist.barrier()
    record = memory.record.tolist()
    dist.barrier()  # no kernel runs
    memory.clear()
    memory.record.zero_()
    memory.state[State.LIMIT] = 3_000_000 * POLL_NS
    dist.barrier()
    for number, call in enumerate(calls):
        call.run(memory, number)
    assert memory.state[State.EPOCH] == len(calls)
    return record
