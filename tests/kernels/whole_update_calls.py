"""Calls of the kernels of all_reduce_update on ranks that are CPU processes, beside the rules in float64.

Sums are compared bit by bit with sums in float32, in rank order, that are rounded. Means are
rounded again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.buckets import Buckets, buckets_of
from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.optimizer.tables import bucket_words, rates_of, unit_of
from autofuse.lowering.gpu.optimizer.whole_call import whole_update_call
from autofuse.lowering.gpu.optimizer.whole_tables import whole_words
from autofuse.lowering.ops.all_reduce_update import OP, AllReduceUpdate
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.update_rules import RULES, SIGN
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv
from autofuse.native_kernels.gpu.state import State
from autofuse.native_kernels.triton.whole_update_packets import (
    WholePacketsConfig,
    launch_whole_update_packets,
    whole_packets_needs,
)
from tests.kernels.calls import SITE, peer_memory, placed, straggling
from tests.kernels.embedding_calls import FakeWorkspace
from tests.kernels.optimizer_calls import Update

GUARD = 32
"""Elements behind each tensor, which nobody may change."""


def guarded(values: Tensor) -> Tensor:
    """A copy with GUARD elements of 7 behind it."""
    found = torch.full((values.numel() + GUARD,), 7, dtype=values.dtype)
    found[: values.numel()] = values
    return found


@dataclass(frozen=True)
class WholeUpdate:
    """`like` has the tensors, the rule and its numbers; `kept`: numbers of the tensors whose sum is kept."""

    like: Update
    kept: tuple[int, ...] = ()
    config: WholePacketsConfig = field(default_factory=WholePacketsConfig)
    large: float = 1.0
    """Factor of the gradients."""

    def buckets(self, world: int) -> Buckets:
        return buckets_of(self.like.numels, world)

    @property
    def count(self) -> int:
        return sum(cdiv(n, 1024) for n in self.like.numels)

    def need(self, world: int) -> Need:
        return whole_packets_needs(self.count, self.like.dtypes[0].itemsize, world)

    def grads(self, rank: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        every = [self.large * torch.randn(n, generator=generator) for n in self.like.numels]
        return [g.to(self.like.dtypes[0]) for g in every]

    def states(self, seed: int) -> list[Tensor]:
        """State i of tensor t is number i * T + t."""
        return [part.clone() for s in self.like.states(seed) for part in s.split([*self.like.numels])]

    def sums(self, world: int, seed: int) -> list[Tensor]:
        totals = [torch.zeros(n) for n in self.like.numels]
        for rank in range(world):
            for total, g in zip(totals, self.grads(rank, seed), strict=True):
                total += g.float()
        scale = torch.tensor(1 / world if self.like.mean else 1.0)
        rounded = [total.to(self.like.dtypes[0]) for total in totals]
        return [(total.float() * scale).to(total.dtype) for total in rounded]

    def expected(self, world: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """All parameters and all states, in fp64."""
        rule, rows = RULES[self.like.rule], self.like.numbers().tolist()
        params = [p.double() for p in self.like.params(seed)]
        states, count = [s.double() for s in self.states(seed)], len(params)
        for t, total in enumerate(self.sums(world, seed)):
            rule.update(params[t], total.double() * rows[t][SIGN], states[t::count], rows[t])
        return params, states

    def run(self, memory: PeerMemory, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """This rank's parameters and states, and the kept sums; all with a guard."""
        buckets, like = self.buckets(memory.world), self.like
        params, states = [guarded(p) for p in like.params(seed)], [guarded(s) for s in self.states(seed)]
        keeps = [t in self.kept for t in range(len(params))]
        length = sum(n for n, keep in zip(like.numels, keeps, strict=True) if keep)
        sums = guarded(torch.full((length,), torch.nan, dtype=like.dtypes[0]))
        rates, rows = rates_of(like.numbers())
        grads = [guarded(g) for g in self.grads(memory.rank, seed)]
        words = whole_words(buckets, grads, params, states, rows, sums, keeps)
        launch_whole_update_packets(
            memory, torch.frombuffer(bytearray(words), dtype=torch.int64), bucket_words(buckets),
            torch.frombuffer(bytearray(rates), dtype=torch.float32), self.count, like.dtypes,
            unit_of(buckets), RULES[like.rule].code, like.mean, self.config, SITE,
        )  # fmt: skip
        return params, states, sums

    def check(self, memory: PeerMemory, seed: int) -> None:
        params, states, sums = self.run(memory, seed)
        assert not memory.record.any(), f"gave up: {memory.record.tolist()}"
        for each in (*params, *states, sums):
            assert bool((each[-GUARD:] == 7).all()), f"{self}: written behind the end"
        totals = self.sums(memory.world, seed)
        wanted = torch.cat([totals[0][:0], *(totals[t] for t in sorted(self.kept))])
        assert torch.equal(sums[:-GUARD], wanted), f"{self}: other sums"
        of_params, of_states = self.expected(memory.world, seed)
        for t, (got, expected) in enumerate(zip(params, of_params, strict=True)):
            eps = torch.finfo(self.like.dtypes[1]).eps
            torch.testing.assert_close(
                got[:-GUARD].double(), expected, rtol=eps, atol=2e-6, msg=lambda m, t=t: f"{self}, {t}: {m}"
            )
        for got, expected in zip(states, of_states, strict=True):
            torch.testing.assert_close(got[:-GUARD].double(), expected, rtol=1e-6, atol=1e-6)
        of_ranks: list[list[Tensor]] = [[] for _ in range(memory.world)]
        dist.all_gather_object(of_ranks, [*params, *states])
        for theirs in of_ranks:
            assert all(map(torch.equal, [*params, *states], theirs)), "ranks have other parameters"


def run_whole_updates(
    rank: int, world: int, calls: Sequence[WholeUpdate], programs: int = 3, firm: int = 3,
    late: int | None = None, begins_late: bool = False,
) -> None:  # fmt: skip
    """One call after another on one memory, by ranks that straggle. begins_late: a rank makes its call when
    the programs of the others have waited."""
    need = Need()
    for call in calls:
        need |= call.need(world)
    memory = peer_memory(rank, world, need)
    memory.state[State.FIRM] = firm
    with straggling(rank), placed(rank, memory, late) as given:
        for number, call in enumerate(calls):
            time.sleep(1.0 if begins_late and rank == number % world else 0)
            call.check(replace(given, programs=programs), number)
    assert memory.state[State.EPOCH : State.FIRM].tolist() == [len(calls)] + 10 * [0]
    dist.barrier()
    assert not memory.claims.any()


def run_without_pause(rank: int, world: int, call: WholeUpdate, times: int) -> None:
    """Nothing but the packets holds ranks together, and one of them is slower; the last call is compared."""
    memory = replace(peer_memory(rank, world, call.need(world)), programs=2)
    memory.state[State.FIRM] = 2
    with straggling(rank):
        for number in range(times):
            call.run(memory, number)
        call.check(memory, times)
    dist.barrier()


@contextmanager
def as_on_gpus(workspace: Any, on_device: bool) -> Iterator[None]:
    """Ops of tensors on CPUs go the way of those on GPUs."""
    call = "autofuse.lowering.gpu.optimizer"
    with (
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch(f"{call}.whole_call.workspace_of", lambda *_: workspace),
        patch(f"{call}.whole_call._is_there", lambda _: on_device),
        patch(f"{call}.call.apart", lambda _, work: work()),
    ):
        yield


def run_whole_op(rank: int, world: int, call: WholeUpdate, on_device: bool) -> None:
    """Calls as the op makes them on GPUs; some tensors are not contiguous, or not aligned. on_device: the
    kernel reads the numbers where they lie."""
    memory = replace(peer_memory(rank, world, call.need(world)), programs=2)
    memory.state[State.FIRM] = 2
    workspace: Any = FakeWorkspace(memory)
    workspace.world, workspace.programs = world, 2
    like, kept = call.like, [t in call.kept for t in range(len(call.like.numels))]
    every = like.numbers()
    rows, order = every.unique(dim=0, return_inverse=True)
    for step in range(3):
        params = [torch.stack([p, p], 1)[:, 0] for p in like.params(step)]
        states = [torch.cat([s[:1], s])[1:] for s in call.states(step)]
        given = AllReduceUpdate(
            params, states, call.grads(rank, step), rows.float(), order.tolist(), None, like.rule,
            "avg" if like.mean else "sum", kept, workspace.group_name, "direct", "here",
        )  # fmt: skip
        with as_on_gpus(workspace, on_device):
            found = whole_update_call(given)
            assert found is not None
            (way, *_) = [way for way in ways_of(found.problem).values() if way.fused]
            squares, sums = found.run(replace(way, config=call.config))
            workspace.calls.clear()  # nothing is prepared for calls on CPUs
            halves = [s.bfloat16() for s in states]
            assert not states or whole_update_call(given._replace(states=halves)) is None
        assert squares.shape == (0,)
        assert squares.dtype == torch.float64
        totals = call.sums(world, step)
        assert torch.equal(sums, torch.cat([totals[0][:0], *(totals[t] for t in sorted(call.kept))]))
        of_params, of_states = call.expected(world, step)
        for got, expected in zip(params, of_params, strict=True):
            eps = torch.finfo(like.dtypes[1]).eps
            torch.testing.assert_close(got.double(), expected, rtol=eps, atol=2e-6)
            assert got._version
        for got, expected in zip(states, of_states, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
            assert got._version
    dist.barrier()


def as_the_reference(rank: int, world: int, call: WholeUpdate) -> None:
    """Sums, parameters and states of the kernel beside those of the op with plain collectives."""
    like, memory = call.like, peer_memory(rank, world, call.need(world))
    found = call.run(replace(memory, programs=2), 0)
    params, states = like.params(0), call.states(0)
    numbers, rows = like.numbers().unique(dim=0, return_inverse=True)
    group, kept = dist.group.WORLD, [t in call.kept for t in range(len(like.numels))]
    assert group is not None
    given = AllReduceUpdate(
        params, states, call.grads(rank, 0), numbers.float(), rows.tolist(), None, like.rule,
        "avg" if like.mean else "sum", kept, group.group_name, "direct", "here",
    )  # fmt: skip
    _, sums = FUSED_OPS[OP].reference(given)
    assert torch.equal(found[2][:-GUARD], sums)
    for got, wanted in zip((*found[0], *found[1]), (*params, *states), strict=True):
        eps = max(1e-6, torch.finfo(wanted.dtype).eps)
        torch.testing.assert_close(got[:-GUARD], wanted, rtol=eps, atol=2e-6, equal_nan=True)
    dist.barrier()


def give_up_whole(rank: int, world: int, call: WholeUpdate, lost: int) -> list[int]:
    """The failure record of a rank where rank `lost` never makes the call, and nothing changes."""
    memory = peer_memory(rank, world, call.need(world), polls=50)
    if rank != lost:
        params, states, sums = call.run(memory, 0)
        before = [*call.like.params(0), *call.states(0)]
        after = [t[:-GUARD] for t in (*params, *states)]
        assert all(map(torch.equal, before, after)), "something has changed"
        assert bool(sums[:-GUARD].isnan().all())
        assert memory.state[State.EPOCH : State.FIRM].tolist() == [1] + 10 * [0], "the epoch did not end"
    dist.barrier()
    return memory.record.tolist()


def whole_cases() -> dict[str, WholeUpdate]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    many, aligned = (4096, 20, 1, 1024, 2000, 64), (4096, 20, 1024, 2000, 64)
    return {
        "adam": WholeUpdate(Update(aligned)),
        "bf16": WholeUpdate(Update(aligned, "adam", (bf16, bf16), rows=2), kept=(0, 3)),
        "amsgrad of odd lengths": WholeUpdate(Update(many, "amsgrad", (fp16, fp16), mean=False, rows=3)),
        "odd lengths, kept": WholeUpdate(Update(many, "adam", (bf16, fp32), rows=2), kept=(1, 2, 4, 5)),
        "momentum": WholeUpdate(Update(many, "momentum", (fp32, fp32), rows=4), kept=(0, 2, 3)),
        "fp16 of fp32": WholeUpdate(Update(aligned, "momentum", (fp16, fp32), mean=False)),
        "sgd": WholeUpdate(Update(many, "sgd", (bf16, bf16), rows=2), kept=(5,)),
        "fp32 of fp16": WholeUpdate(Update(many, "sgd", (fp32, fp16), mean=False)),
        "one bucket": WholeUpdate(Update((5,), "amsgrad", (bf16, bf16)), kept=(0,)),
        "one element": WholeUpdate(Update((1,), "sgd"), kept=(0,)),
        "empty tensors": WholeUpdate(Update((0, 7, 0, 2050, 0), rows=2), kept=(0, 1, 2, 3)),
    }
