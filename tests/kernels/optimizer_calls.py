"""Calls of the kernels of optimizers on ranks that are CPU processes, beside the rules in float64."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.gpu.choice.kernel import Kernel, ways_of
from autofuse.lowering.gpu.optimizer.call import update_call
from autofuse.lowering.gpu.optimizer.tables import (
    bucket_words,
    longest_run,
    rates_of,
    tensor_words,
    unit_of,
)
from autofuse.lowering.gpu.optimizer.ways import (
    LAMB_PACKETS,
    PACKETS,
    UpdateProblem,
    kept_of,
    kernel_of,
)
from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather
from autofuse.lowering.update_rules import (
    ADAPTS,
    RULES,
    SIGN,
    UNGUARDED,
    adam_terms,
    clip,
    lamb_terms,
    numbers_at,
    sgd_terms,
    trust,
)
from autofuse.lowering.update_rules import LR as RATE
from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.gpu.state import State
from autofuse.native_kernels.triton.clipped_update import Clipping, launch_clipped_update
from autofuse.native_kernels.triton.lamb_packets import launch_lamb_packets
from autofuse.native_kernels.triton.lamb_update import launch_lamb_update
from autofuse.native_kernels.triton.update_exchange import launch_update_exchange
from autofuse.native_kernels.triton.update_launch import UpdateConfig
from autofuse.native_kernels.triton.update_packet_parts import UpdatePacketsConfig
from autofuse.native_kernels.triton.update_packets import launch_update_packets
from tests.kernels.calls import SITE, peer_memory, placed, straggling
from tests.kernels.embedding_calls import FakeWorkspace

CONFIG = UpdateConfig(ahead=4, per_sm=2)
LR = 0.125


@dataclass(frozen=True)
class Update:
    """`numels`: of the tensors; `missing`: numbers of those without a gradient; `max_norm`: None in a step
    that needs no norm, 0 where it clips nothing; `eps`, `most`: for LAMB; `zero`:
    numbers of tensors of zeros; `still`: of those whose gradients and moments are 0."""

    numels: tuple[int, ...]
    rule: str = "adam"
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    master: bool = False
    missing: tuple[int, ...] = ()
    mean: bool = True
    rows: int = 1
    config: UpdateConfig | UpdatePacketsConfig = field(default=CONFIG)
    max_norm: float | None = None
    eps: float = 2.0**-6
    most: float = math.inf
    zero: tuple[int, ...] = ()
    still: tuple[int, ...] = ()

    def problem(self, world: int) -> UpdateProblem:
        buckets = buckets_of(self.numels, world)
        return UpdateProblem(
            buckets.offsets[-1], longest_run(buckets), self.rule, self.dtypes, len(RULES[self.rule].states),
            world, clips=self.max_norm is not None,
        )  # fmt: skip

    @property
    def kernel(self) -> Kernel[UpdateProblem, Any]:
        if isinstance(self.config, UpdatePacketsConfig):
            return LAMB_PACKETS if self.rule == "lamb" else PACKETS
        return kernel_of(self.rule, self.max_norm is not None)

    def need(self, world: int) -> Need:
        return self.kernel.needs(self.config, self.problem(world))

    def launches(self, world: int) -> int:
        if isinstance(self.config, UpdatePacketsConfig):
            return 1
        pieces = -(-max(self.problem(world).longest, 1) // self.config.run(world))
        clips = self.max_norm is not None
        if self.rule == "lamb":
            return 2 * pieces + clips
        return (1 + clips) * pieces

    def grads(self, rank: int, seed: int) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        found = [torch.randint(-8, 9, (n,), generator=generator) / 4 for n in self.numels]
        for i in self.still:
            found[i].zero_()
        return [None if i in self.missing else g.to(self.dtypes[0]) for i, g in enumerate(found)]

    def params(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        found = [torch.randint(-8, 9, (n,), generator=generator) / 4 for n in self.numels]
        for i in self.zero:
            found[i].zero_()
        return [p.to(self.dtypes[1]) for p in found]

    def numbers(self) -> Tensor:
        kinds = []
        for i in range(self.rows):
            lr, t = LR * (1 + i), 3 + i
            if self.rule in ("adam", "amsgrad"):
                terms = adam_terms((0.5, 0.75), self.eps, 0.25, bool(i % 2), bool(i % 3))
                kinds.append(numbers_at(terms, t, lr))
            elif self.rule == "lamb":
                terms = lamb_terms((0.5, 0.75), self.eps, 0.0 if i == 2 else 0.25, i % 2 == 0, i == 1)
                row = numbers_at(terms, t, lr)
                row[ADAPTS] = UNGUARDED if i == 3 else row[ADAPTS]
                kinds.append([self.most, *row[1:]])
            else:
                kinds.append(numbers_at(sgd_terms(0.5, 0.25, 0.125, bool(i % 2), bool(i % 3)), t, lr))
        if self.rows == 1:
            return torch.tensor(kinds, dtype=torch.float64).expand(len(self.numels), -1)
        return torch.tensor([kinds[t % self.rows] for t in range(len(self.numels))], dtype=torch.float64)

    def states(self, seed: int) -> list[Tensor]:
        """Of all elements; the last one is what `master` has."""
        generator = torch.Generator().manual_seed(seed + 7)
        total, count = sum(self.numels), len(RULES[self.rule].states)
        found = [torch.randint(1, 9, (total,), generator=generator) / 8 for _ in range(count)]
        offsets = [0, *accumulate(self.numels)]
        for i in self.still:
            for state in found:
                state[offsets[i] : offsets[i + 1]] = 0
        if self.master:
            found.append(torch.cat([p.float() * (1 + 2.0**-12) for p in self.params(seed)]))
        return found

    def means(self, world: int, seed: int) -> list[Tensor]:
        """Reduced gradients, in fp64; 0 of tensors that have none."""
        zero = [torch.zeros(n, dtype=torch.float64) for n in self.numels]
        for rank in range(world):
            for total, g in zip(zero, self.grads(rank, seed), strict=True):
                total += 0.0 if g is None else g.double()
        return [total / (world if self.mean else 1) for total in zero]

    def norm(self, world: int, seed: int) -> float:
        """Of all reduced gradients."""
        return math.sqrt(sum(float(g.square().sum()) for g in self.means(world, seed)))

    def expected(self, world: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """All parameters and all states, in fp64."""
        rule, numbers, buckets = RULES[self.rule], self.numbers().tolist(), buckets_of(self.numels, world)
        states, params = [s.double() for s in self.states(seed)], [p.double() for p in self.params(seed)]
        means = self.means(world, seed)
        factor = clip(self.norm(world, seed), self.max_norm or 0.0)
        for t, p in enumerate(params):
            at = slice(*buckets.offsets[t : t + 2])
            if t in self.missing:
                continue
            if self.master:
                p.copy_(states[-1][at])
            g = means[t] * factor * numbers[t][SIGN]
            u = rule.update(p, g, [s[at] for s in states[: len(rule.states)]], numbers[t])
            if u is not None:
                of_p, of_u = (float(x.square().sum()) for x in (p, u))
                p.sub_(u, alpha=numbers[t][RATE] * trust(numbers[t], of_p, of_u))
            if self.master:
                states[-1][at] = p
        return params, states

    def run(self, memory: PeerMemory, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parameters and its part of the states."""
        buckets = buckets_of(self.numels, memory.world)
        mine = slice(*buckets.starts[memory.rank : memory.rank + 2])
        params, states = self.params(seed), [s[mine].clone() for s in self.states(seed)]
        rates, rows = rates_of(self.numbers())
        words = tensor_words(buckets, memory.rank, grads := self.grads(memory.rank, seed), params, rows)
        given = (
            torch.frombuffer(bytearray(words), dtype=torch.int64), bucket_words(buckets),
            torch.frombuffer(bytearray(rates), dtype=torch.float32), states[: len(states) - self.master],
            states[-1] if self.master else None,
        )  # fmt: skip
        most = longest_run(buckets)
        how = most, self.dtypes, unit_of(buckets)
        clipping, before = None, [p.clone() for p in params]

        def check() -> None:
            torch.testing.assert_close(float(norm), self.norm(memory.world, seed), rtol=1e-6, atol=0)
            assert all(map(torch.equal, before, params)), "a parameter has changed before"

        if self.max_norm is not None:
            clipping = Clipping(norm := torch.full((), math.nan), self.max_norm, check)
        if isinstance(self.config, UpdatePacketsConfig):
            if self.rule == "lamb":
                launch_lamb_packets(memory, *given, *how, self.mean, self.config, SITE)
            else:
                launch_update_packets(
                    memory, *given, *how, RULES[self.rule].code, self.mean, self.config, SITE
                )
            return params, states
        sizes = kept_of(self.config, self.problem(memory.world), buckets.owned(memory.rank), len(params))
        squares, sums, steps = sizes.split(torch.full((sizes.words,), math.nan, dtype=torch.float64))
        code, rest = RULES[self.rule].code, (self.config, SITE)
        if self.rule == "lamb":
            launch_lamb_update(memory, *given, squares, sums, steps, *how, self.mean, clipping, *rest)
        elif clipping is None:
            launch_update_exchange(memory, *given, *how, code, self.mean, *rest)
        else:
            launch_clipped_update(memory, *given, squares, sums, *how, code, self.mean, clipping, *rest)
        assert len(grads) == len(params)
        return params, states

    def check(self, memory: PeerMemory, seed: int) -> None:
        assert not memory.record.any(), f"gave up: {memory.record.tolist()}"
        params, states = self.run(memory, seed)
        assert not memory.record.any(), f"gave up: {memory.record.tolist()}"
        of_params, of_states = self.expected(memory.world, seed)
        starts = buckets_of(self.numels, memory.world).starts
        mine = slice(*starts[memory.rank : memory.rank + 2])
        for t, (got, expected) in enumerate(zip(params, of_params, strict=True)):
            eps = torch.finfo(self.dtypes[1]).eps
            torch.testing.assert_close(
                got.double(), expected, rtol=eps, atol=2e-6, msg=lambda m, t=t: f"{self} tensor {t}: {m}"
            )
        for got, expected in zip(states, of_states, strict=True):
            torch.testing.assert_close(got.double(), expected[mine], rtol=1e-6, atol=1e-6)
        of_ranks: list[list[Tensor]] = [[] for _ in range(memory.world)]
        dist.all_gather_object(of_ranks, params)
        for theirs in of_ranks:
            assert all(map(torch.equal, params, theirs)), "ranks have other parameters"


def run_updates(
    rank: int, world: int, calls: Sequence[Update], late: int | None = None, firm: int = 1
) -> None:
    """One call after another on one memory, by ranks that straggle."""
    need = Need()
    for call in calls:
        need |= call.need(world)
    memory = peer_memory(rank, world, need)
    memory.state[State.FIRM] = firm
    launches = 0
    with straggling(rank), placed(rank, memory, late) as given:
        for number, call in enumerate(calls):
            call.check(given, number)
            launches += call.launches(world)
    assert memory.state[State.EPOCH : State.FIRM].tolist() == [launches] + 10 * [0]
    dist.barrier()
    assert not memory.signals.views[rank].any(), "counters are left over"
    assert not memory.words.views[rank].any(), "words are left over"
    assert not memory.done.any()
    assert not memory.claims.any()


@contextmanager
def as_on_gpus(workspace: Any) -> Iterator[None]:
    """Ops of tensors on CPUs go the way of those on GPUs."""
    call = "autofuse.lowering.gpu.optimizer.call"
    with (
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch(f"{call}.workspace_of", lambda *_: workspace),
        patch(f"{call}.current", nullcontext),
        patch(f"{call}.apart", lambda _, work: work()),
    ):
        yield


def run_op(rank: int, world: int, call: Update) -> None:
    """A call as the op makes it on GPUs: the hosts agree, then the kernel runs, or nothing does."""
    memory = peer_memory(rank, world, call.need(world))
    workspace: Any = FakeWorkspace(memory)
    workspace.world, workspace.programs = world, 1
    buckets = buckets_of(call.numels, world)
    mine = slice(*buckets.starts[rank : rank + 2])
    for step in range(3):
        first, *rest = call.params(step)
        params = [torch.stack([first, first], 1)[:, 0], *rest]  # not contiguous
        states = [s[mine].clone() for s in call.states(step)]
        missing = step == 1 and rank == 1
        grads = [None, *call.grads(rank, step)[1:]] if missing else call.grads(rank, step)
        numbers = call.numbers() * (1 + (step == 2 and rank == 0))
        given = ReduceUpdateGather(
            params, grads, states, numbers, call.rule, "avg" if call.mean else "sum", call.max_norm or 0.0,
            call.max_norm == 0,
            [f"p{t}" for t in range(len(params))], workspace.group_name, "direct", "here",
        )  # fmt: skip
        before = [t.clone() for t in (*params, *states)]
        with as_on_gpus(workspace):
            if step:
                says = "p0 has no gradient on ranks \\[1\\]" if step == 1 else "other rates"
                with pytest.raises(ValueError, match=says):
                    update_call(given)
                assert all(map(torch.equal, before, (*params, *states)))
                continue
            found = update_call(given)
            assert found is not None
            kinds = {way.name.split(" ")[0]: way for way in ways_of(found.problem).values() if way.fused}
            fused = kinds[call.kernel.kind]
            way = replace(fused, config=call.config)
            norm = found.run(way)
            if call.max_norm is not None:
                torch.testing.assert_close(float(norm), call.norm(world, step), rtol=1e-6, atol=0)
        of_params, of_states = call.expected(world, step)
        for got, expected in zip(params, of_params, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=2e-6)
            assert got._version
        for got, expected in zip(states, of_states, strict=True):
            torch.testing.assert_close(got.double(), expected[mine], rtol=1e-6, atol=1e-6)
    dist.barrier()


def refuse(rank: int, world: int, call: Update) -> None:
    """No rank changes anything where the norm is not finite and that is an error."""
    memory = peer_memory(rank, world, call.need(world))
    workspace: Any = FakeWorkspace(memory)
    workspace.world, workspace.programs = world, 1
    buckets = buckets_of(call.numels, world)
    params, grads = call.params(0), call.grads(rank, 0)
    states = [s[slice(*buckets.starts[rank : rank + 2])].clone() for s in call.states(0)]
    if rank and grads[0] is not None:
        grads[0][0] = math.inf
    given = ReduceUpdateGather(
        params, grads, states, call.numbers(), call.rule, "avg", 1.0, True,
        [f"p{t}" for t in range(len(params))], workspace.group_name, "direct", "here",
    )  # fmt: skip
    before = [t.clone() for t in (*params, *states)]
    with as_on_gpus(workspace):
        found = update_call(given)
        assert found is not None
        with pytest.raises(RuntimeError, match="the norm of all gradients is inf; no parameter has changed"):
            found.run(replace(ways_of(found.problem)[call.kernel.kind], config=call.config))
    assert all(map(torch.equal, before, (*params, *states)))
    dist.barrier()


def give_up(rank: int, world: int, call: Update, lost: int) -> list[int]:
    """The failure record of a rank where rank `lost` never makes the call."""
    memory = peer_memory(rank, world, call.need(world), polls=50)
    if rank != lost:
        params, _ = call.run(memory, 0)
        if call.max_norm is None and (call.rule != "lamb" or isinstance(call.config, UpdatePacketsConfig)):
            assert all(map(torch.equal, params, call.params(0))), "a parameter has changed"
        assert memory.state[State.EPOCH : State.FIRM].tolist() == [1] + 10 * [0], "the epoch did not end"
    dist.barrier()
    return memory.record.tolist()


def cases() -> dict[str, Update]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    many = (4096, 20, 1, 1024, 2000, 64)
    aligned = (4096, 20, 1024, 2000, 64)
    lamb = Update(many, "lamb", (bf16, bf16), True, (0,), rows=4, zero=(3,), still=(2,), most=4.0)
    return {
        "adam": Update(aligned),
        "odd lengths": Update(many, mean=False, rows=2),
        "bf16": Update(aligned, "adam", (bf16, bf16)),
        "amsgrad, master": Update(many, "amsgrad", (bf16, bf16), True, rows=3),
        "fp16 of fp32": Update(aligned, "momentum", (fp16, fp32), rows=2),
        "momentum, master": Update(many, "momentum", (fp16, fp16), True),
        "sgd, missing": Update(many, "sgd", (bf16, fp32), missing=(0, 3)),
        "none given": Update((3, 1025), missing=(0, 1)),
        "one bucket": Update((5,)),
        "empty tensors": Update((0, 7, 0, 2050, 0), rows=2),
        "pieces": Update(many, config=replace(CONFIG, piece=4)),
        "clipped": Update(aligned, max_norm=1.5),
        "clipped, odd lengths": Update(many, "momentum", (bf16, bf16), True, (1,), False, 2, max_norm=0.25),
        "clipped, pieces": Update(many, config=replace(CONFIG, piece=4), max_norm=2.0),
        "norm of one bucket": Update((5,), "sgd", max_norm=0.0),
        "lamb": Update(aligned, "lamb"),
        "lamb, odd lengths": Update(many, "lamb", mean=False, rows=2, zero=(1, 4), still=(1, 2)),
        "lamb, master": lamb,
        "lamb, pieces": Update(many, "lamb", (bf16, fp32), config=replace(CONFIG, piece=4)),
        "lamb, clipped": Update(many, "lamb", (bf16, bf16), rows=2, max_norm=1.5),
        "lamb, clipped, pieces": Update(
            many, "lamb", master=True, config=replace(CONFIG, piece=4), max_norm=2.0, zero=(3,), still=(3,)
        ),
        "lamb, shared tensors": Update((4096, 1, 4096), "lamb", rows=3),
        "lamb, shared tensors, clipped": Update((9000, 3), "lamb", (fp16, fp16), True, max_norm=0.5),
        "lamb of one bucket": Update((5,), "lamb", eps=0.0),
        "lamb, empty tensors": Update((0, 7, 0, 2050, 0), "lamb", rows=2),
        "lamb, none given": Update((0, 3, 1025), "lamb", missing=(1, 2)),
        "packets": Update(aligned, config=UpdatePacketsConfig()),
        "packets, odd lengths": Update(
            many, "amsgrad", (bf16, bf16), True, mean=False, rows=3, config=UpdatePacketsConfig()
        ),
        "packets, missing": Update(
            many, "momentum", (fp16, fp32), missing=(0, 3), config=UpdatePacketsConfig()
        ),
        "packets of one bucket": Update((5,), "sgd", (bf16, bf16), config=UpdatePacketsConfig()),
        "packets, none given": Update((3, 1025), missing=(0, 1), config=UpdatePacketsConfig()),
        "packets, a rank with less": Update((1500, 40), config=UpdatePacketsConfig()),
        "lamb packets, a rank with less": Update((1500, 40), "lamb", config=UpdatePacketsConfig()),
        "lamb packets": Update(aligned, "lamb", config=UpdatePacketsConfig()),
        "lamb packets, odd lengths": replace(lamb, mean=False, config=UpdatePacketsConfig()),
        "lamb packets, shared tensors": Update(
            (4096, 1, 4096), "lamb", (bf16, fp32), rows=3, config=UpdatePacketsConfig()
        ),
        "lamb packets of one bucket": Update((5,), "lamb", eps=0.0, config=UpdatePacketsConfig()),
        "lamb packets, none given": Update(
            (0, 3, 1025), "lamb", missing=(1, 2), config=UpdatePacketsConfig()
        ),
        "lamb packets, a long tensor": Update(
            (140_000, 3), "lamb", (fp16, fp16), zero=(1,), still=(1,), config=UpdatePacketsConfig()
        ),
        "items of one": Update(aligned, "momentum", config=UpdateConfig(ahead=0, per_sm=1)),
    }
