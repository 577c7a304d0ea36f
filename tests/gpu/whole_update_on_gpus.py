"""What the tests of all_reduce_update run on ranks with GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from autofuse.lowering.ops.all_reduce_update import OP
from autofuse.lowering.update_rules import RULES, SIGN, adam_terms, numbers_at, sgd_terms
from tests.gpu.expected import group_of_all

SIZES = (5, 1000, 12, 70_000, 2048, 1)
LONGEST = 300_000
LR, B1, B2, EPS, DECAY = 0.1, 0.9, 0.99, 1e-3, 0.1


def numbers(rule: str, t: int) -> Tensor:
    """Two rows, for step t."""
    if rule in ("sgd", "momentum"):
        every = [sgd_terms(0.9, 0.0, DECAY * i, rule == "momentum") for i in (0, 1)]
    else:
        every = [adam_terms((B1, B2), EPS, DECAY, i == 0) for i in (0, 1)]
    return torch.tensor([numbers_at(terms, t, LR) for terms in every], dtype=torch.float32)


@dataclass
class Tensors:
    """Tensors of this rank, equal on all ranks, beside what they are in float64."""

    rule: str
    dtypes: tuple[torch.dtype, torch.dtype]
    sizes: Sequence[int]
    mean: bool

    def __post_init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        self.params = [
            torch.randn(n, generator=generator, device="cuda").to(self.dtypes[1]) for n in self.sizes
        ]
        names = RULES[self.rule].states
        self.states = [torch.zeros(n, device="cuda") for _ in names for n in self.sizes]
        self.grads = [torch.empty(n, device="cuda", dtype=self.dtypes[0]) for n in self.sizes]
        self.exact = [t.double() for t in (*self.params, *self.states)]
        self.rows = [t % 2 for t in range(len(self.sizes))]
        self.kept = [t % 3 == 0 for t in range(len(self.sizes))]
        self.sums: list[Tensor] = []

    def arguments(self, rates: Tensor) -> tuple[Any, ...]:
        return (
            self.params, self.states, self.grads, rates, self.rows, None, self.rule,
            "avg" if self.mean else "sum", self.kept, group_of_all().group_name, "direct", "test",
        )  # fmt: skip

    def fill(self, t: int) -> None:
        """The gradients of step t, and what the ranks' are together."""
        world, dtype = dist.get_world_size(), self.dtypes[0]
        generators = [torch.Generator("cuda").manual_seed(1000 * t + r) for r in range(world)]
        every = [
            [torch.randn(n, generator=g, device="cuda").to(dtype) for n in self.sizes] for g in generators
        ]
        for mine, g in zip(self.grads, every[dist.get_rank()], strict=True):
            mine.copy_(g)
        self.sums = []
        for of_ranks in zip(*every, strict=True):
            total = torch.zeros_like(of_ranks[0], dtype=torch.float32)
            for g in of_ranks:
                total += g.float()
            rounded = total.to(dtype)
            self.sums.append((rounded.float() * (1 / world)).to(dtype) if self.mean else rounded)

    def check(self, t: int, sums: Tensor) -> None:
        """Behind step t: the sums bit by bit, tensors near the rule in float64, equal ones on all ranks."""
        assert torch.equal(sums, torch.cat([s for s, k in zip(self.sums, self.kept, strict=True) if k])), t
        count, rows = len(self.sizes), numbers(self.rule, t).double().tolist()
        for i, total in enumerate(self.sums):
            row = rows[self.rows[i]]
            RULES[self.rule].update(
                self.exact[i], total.double() * row[SIGN], self.exact[count + i :: count], row
            )
        found = [*self.params, *self.states]
        for i, (got, wanted) in enumerate(zip(found, self.exact, strict=True)):
            rtol = 2 * torch.finfo(got.dtype).eps if i < count else 1e-5
            torch.testing.assert_close(
                got.double(), wanted, rtol=rtol, atol=1e-5, msg=partial("{}: {}".format, i)
            )
            wanted.copy_(got)
        equal_everywhere(found)


def equal_everywhere(tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        told = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(told, t)
        assert all(torch.equal(each, t) for each in told), "ranks have other bits"


def straggle(t: int) -> None:
    """One rank is late on the GPU, another one on the host."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == t % world:
        torch.cuda._sleep(50_000_000)
    if rank == (t + 1) % world:
        time.sleep(0.05)


def by_name(
    rank: int,
    world: int,
    rule: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: Sequence[int],
    mean: bool,
) -> list[str]:
    """Every way of the kernel: numbers on the host and on the GPU, launched and in a captured graph."""
    from autofuse.lowering.gpu import by_name as ways

    names: list[str] = ways.names(OP, Tensors(rule, dtypes, sizes, mean).arguments(numbers(rule, 1)), False)
    for name in names:
        tensors = Tensors(rule, dtypes, sizes, mean)
        for t in (1, 2, 3, 4):
            tensors.fill(t)
            straggle(t)
            rates = numbers(rule, t)
            _, sums = ways.run(name, OP, tensors.arguments(rates.cuda() if t % 2 else rates))
            tensors.check(t, sums)
        rates = numbers(rule, 5).cuda()
        tensors.fill(5)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, sums = ways.run(name, OP, tensors.arguments(rates))
        for t in (5, 6, 7):
            tensors.fill(t)
            rates.copy_(numbers(rule, t))
            straggle(t)
            graph.replay()
            tensors.check(t, sums)
        torch.cuda.synchronize()  # before the graph is freed
    autofuse.check()
    return names


def back_to_back(rank: int, world: int, times: int) -> None:
    """Nothing but the packets holds the ranks together; the sums of sgd steps tell of every call."""
    from autofuse.lowering.gpu import by_name as ways

    sizes = (3000, 7, 1024)
    params = [torch.zeros(n, device="cuda") for n in sizes]
    grads = [torch.full((n,), float(rank + 1), device="cuda") for n in sizes]
    row = torch.zeros(1, 12, device="cuda")
    row[0, 0] = row[0, SIGN] = 1.0
    given: tuple[Any, ...] = (
        params, [], grads, row, [0, 0, 0], None, "sgd", "sum", [False] * 3,
        group_of_all().group_name, "direct", "pace",
    )  # fmt: skip
    (name, *_) = ways.names(OP, given, False)
    for i in range(times):
        if i % 50 == 17 * rank % 50:
            torch.cuda._sleep(1_000_000)
        ways.run(name, OP, given)
    expected = -float(times * world * (world + 1) // 2)
    for p in params:
        assert bool((p == expected).all()), (p.unique().tolist(), expected)
    autofuse.check()


@contextmanager
def in_kernels(ran: list[str]) -> Iterator[None]:
    """Calls of the op run in the kernel."""
    from autofuse.lowering.gpu.choice.calls import GpuCall, captured_too
    from autofuse.lowering.gpu.choice.kernel import ways_of

    def run(call: GpuCall | None) -> Any:
        assert call is not None
        way = next(way for way in ways_of(call.problem).values() if way.fused)
        ran.append(way.name)
        return captured_too(call.run(way), call.op, way)

    room = "autofuse.lowering.gpu.optimizer.whole_call"
    with (
        torch._inductor.config.patch(force_disable_caches=True),  # it may have graphs that were kept
        patch(f"{room}.run_call", run),
    ):
        yield


def _step(params: Sequence[Tensor], grads: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor],
          t: Tensor, lr: Tensor) -> None:  # fmt: skip
    """AdamW in tensor ops, capturable: the step and the rate are tensors on the GPU."""
    t.add_(1)
    for p, g, of_m, of_v in zip(params, grads, m, v, strict=True):
        total = funcol.all_reduce(g, "avg", group_of_all()).float()
        of_m.lerp_(total, 1 - B1)
        of_v.mul_(B2).addcmul_(total, total, value=1 - B2)
        u = (of_m / (1 - B1**t)) / ((of_v / (1 - B2**t)).sqrt() + EPS)
        p.copy_(p.float() - lr * (u + DECAY * p.float()))


def compiled_steps(
    rank: int, world: int, dtype: torch.dtype, sizes: Sequence[int], captured: bool
) -> tuple[list[str], int]:
    """Steps of a compiled program beside those of eager; the ops of the sites, and how many calls were in
    the kernel."""
    torch._dynamo.reset()
    eager, fused = ([*_state(dtype, sizes)] for _ in range(2))
    ran: list[str] = []
    step = torch.compile(_step, backend="autofuse", fullgraph=True, options={"policy": "always"})

    def both(t: int, call: Callable[[], object]) -> None:
        for given in (eager, fused):
            for i, g in enumerate(given[1]):
                torch.manual_seed(100 * t + 10 * i + rank)
                # Multiples of 1 / 8, whose sums are exact in any order, also that of NCCL.
                g.copy_(torch.randint(-8, 9, g.shape, device="cuda") / 8)
            given[5].fill_(LR / t)
        straggle(t)
        _step(*eager)
        call()
        for mine, wanted in zip(fused[0], eager[0], strict=True):
            rtol = 2e-5 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(mine, wanted, rtol=rtol, atol=1e-5)
            wanted.copy_(mine)  # of 16 bits, another rounding would grow
        assert float(fused[4]) == t

    with in_kernels(ran), autofuse.debug() as report, torch.no_grad():
        for t in (1, 2, 3):
            both(t, lambda: step(*fused))
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            before = [tensor.clone() for tensor in _flat(fused)]
            with torch.cuda.stream(side):
                step(*fused)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(*fused)
            for tensor, old in zip(_flat(fused), before, strict=True):
                tensor.copy_(old)
            for t in (4, 5, 6):
                both(t, graph.replay)
            torch.cuda.synchronize()
    equal_everywhere(fused[0])
    autofuse.check()
    return [site.op or "" for site in report.sites], len(ran)


def _flat(given: Sequence[Any]) -> list[Tensor]:
    return [tensor for part in given for tensor in (part if isinstance(part, list) else [part])]


def _state(dtype: torch.dtype, sizes: Sequence[int]) -> Iterator[Any]:
    """The arguments of `_step`."""
    torch.manual_seed(7)
    params = [torch.randn(n, device="cuda").to(dtype) for n in sizes]
    yield params
    yield [torch.empty_like(p) for p in params]
    for _ in range(2):
        yield [torch.zeros(n, device="cuda") for n in sizes]
    yield torch.zeros((), device="cuda")
    yield torch.tensor(LR, device="cuda")
