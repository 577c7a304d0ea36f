"""autofuse.optim on GPUs, beside torch's optimizers in float64 on the batches of all ranks."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autofuse
from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.gpu.choice.calls import GpuCall, captured_too
from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.optimizer.again import Step
from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather
from autofuse.lowering.update_rules import LR, RULES, adam_terms, lamb_terms, numbers_at, trust
from tests.gpu.conftest import WORLDS
from tests.gpu.expected import group_of_all
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


def _loss(network: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = network(x.to(next(network.parameters()).dtype))
    return (y - 1).square().mean()


@contextmanager
def in_way(name: str) -> Iterator[list[str]]:
    """Calls that the kernel takes run in this way; which ones ran, prepared steps among them."""
    ran: list[str] = []
    prepared = Step.again

    def run(call: GpuCall) -> Any:
        ran.append(name)
        return captured_too(call.run(ways_of(call.problem)[name]), call.op, ways_of(call.problem)[name])

    def again(step: Step, args: ReduceUpdateGather) -> Tensor | None:
        result = prepared(step, args)
        ran.extend(() if result is None else (name,))
        return result

    room = "autofuse.lowering.gpu.optimizer.call"
    with (
        patch(f"{room}.run_call", run),
        patch(f"{room}.is_first", lambda *_: False),
        patch(f"{room}.is_measured", lambda _: True),
        patch.object(Step, "again", again),
    ):
        yield ran


def _train_in_way(rank: int, world: int, way: str, name: str, options: dict[str, Any]) -> float:
    with in_way(way) as ran:
        total = _train(rank, world, name, options)
    assert len(ran) >= 5
    return total


def _train(rank: int, world: int, name: str, options: dict[str, Any]) -> float:
    torch.manual_seed(3)
    sizes = (65, 300, 7)
    network = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).cuda()
    exact = copy.deepcopy(network).double()
    clip = options.get("max_norm")
    ours = getattr(autofuse.optim, name)(network.named_parameters(), **OPTIONS[name], **options)
    torchs = getattr(torch.optim, name)(exact.parameters(), **OPTIONS[name])
    for step in range(5):
        generators = [torch.Generator("cuda").manual_seed(9 * step + r) for r in range(world)]
        x = [torch.randn(9, 65, generator=g, device="cuda") for g in generators]
        _loss(network, x[rank]).backward()
        ours.step()
        ours.zero_grad()
        torch.stack([_loss(exact, each) for each in x]).mean().backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(exact.parameters(), clip)
            torch.testing.assert_close(ours.grad_norm.double(), norm, rtol=1e-4, atol=0)
        torchs.step()
        torchs.zero_grad()
        for a, b in zip(network.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    torchs.load_state_dict(ours.full_state_dict())
    ours.load_state_dict(torchs.state_dict())
    bias = network.get_parameter("0.bias")
    bias.grad = torch.ones_like(bias) if rank else None
    if not options.get("in_backward"):
        with pytest.raises(ValueError, match=r"0.bias has no gradient on ranks \[0\]"):
            ours.step()
    return float(sum(p.double().sum() for p in network.parameters()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"max_norm": 0.1}),
        ("AdamW", {"in_backward": True}),
        ("SGD", {"master_weights": True}),
    ],
)
def test_as_torch(
    gpu_ranks: Callable[[int], RankPool], world: int, name: str, options: dict[str, Any]
) -> None:
    sums = gpu_ranks(world).run(_train, name, options, timeout=120)
    assert sums == [sums[0]] * world


STEPS: list[tuple[str, str, dict[str, Any]]] = [
    ("buckets", "AdamW", {}),
    ("buckets per_sm=3", "AdamW", {"master_weights": True}),
    ("buckets", "AdamW", {"in_backward": True}),
    ("buckets", "SGD", {}),
    ("packets", "AdamW", {}),
    ("packets", "AdamW", {"in_backward": True}),
    ("packets", "SGD", {"master_weights": True}),
    ("clipped", "AdamW", {"max_norm": 0.1}),
    ("clipped per_sm=3", "SGD", {"max_norm": 0.1, "master_weights": True}),
]
LAMB_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("lamb", {}),
    ("lamb per_sm=3", {"master_weights": True}),
    ("lamb", {"in_backward": True}),
    ("lamb_clipped", {"max_norm": 0.1}),
    ("lamb_packets", {"master_weights": True}),
    ("lamb_packets", {"in_backward": True}),
]
"""Ways, and arguments of the optimizer. tests/kernels/test_by_name.py looks whether the ways exist."""


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("way", "name", "options"), STEPS)
def test_kernel_as_torch(
    gpu_ranks: Callable[[int], RankPool], world: int, way: str, name: str, options: dict[str, Any]
) -> None:
    sums = gpu_ranks(world).run(_train_in_way, way, name, options, timeout=120)
    assert sums == [sums[0]] * world


def _lamb(rank: int, world: int, way: str, options: dict[str, Any]) -> float:
    """Steps in the kernel beside those of torch and NCCL."""
    torch.manual_seed(3)
    first = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise((65, 300, 7)))).cuda()
    networks = first, copy.deepcopy(first)
    ours, others = (
        autofuse.optim.LAMB(
            [
                {"params": [p for p in network.parameters() if p.dim() > 1]},
                {"params": [p for p in network.parameters() if p.dim() == 1], "adapt": False},
            ],
            lr=0.01, weight_decay=0.1, **options,
        )
        for network in networks
    )  # fmt: skip
    ran: list[str] = []
    for step in range(5):
        x = torch.randn(9, 65, generator=torch.Generator("cuda").manual_seed(9 * step + rank), device="cuda")
        for network, optimizer in zip(networks, (ours, others), strict=True):
            with in_way(way) if optimizer is ours else nullcontext(ran) as seen:
                _loss(network, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            ran = ran + seen if optimizer is ours else ran
        for a, b in zip(*(network.parameters() for network in networks), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        if "max_norm" in options:
            torch.testing.assert_close(ours.grad_norm, others.grad_norm, rtol=1e-4, atol=0)
    assert len(ran) >= 5
    return float(sum(p.double().sum() for p in first.parameters()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("way", "options"), LAMB_STEPS)
def test_lamb(gpu_ranks: Callable[[int], RankPool], world: int, way: str, options: dict[str, Any]) -> None:
    sums = gpu_ranks(world).run(_lamb, way, options, timeout=120)
    assert sums == [sums[0]] * world


MANY = 3 << 25


def many(
    rank: int, world: int, dtype: torch.dtype, longest: int = MANY, way: str = "buckets", clip: float = 0,
    replays: int = 2,
) -> None:  # fmt: skip
    """A tensor longer than a launch takes, others, a straggler; then a graph, whose numbers change.

    way: of Adam, or of LAMB; clip: the gradients are clipped to this norm, if it is not 0. replays: without
    any, nothing is captured.
    """
    sizes = (longest, 1000, 12, 70_000)
    buckets = buckets_of(sizes, world)
    generators = [torch.Generator("cuda").manual_seed(r) for r in range(world)]
    every = [[torch.randn(n, generator=g, device="cuda").to(dtype) for n in sizes] for g in generators]
    params = [torch.ones(n, device="cuda", dtype=dtype) for n in sizes]
    states = [torch.zeros(buckets.owned(rank), device="cuda") for _ in range(2)]
    exact = [p.double() for p in params]
    m, v = [torch.zeros_like(p) for p in exact], [torch.zeros_like(p) for p in exact]
    means = [torch.stack([t.double() for t in of]).mean(0) for of in zip(*every, strict=True)]
    if clip:
        norm = torch.nn.utils.get_total_norm(means)
        means = [t * min(1.0, clip / (float(norm) + 1e-6)) for t in means]

    rule = "lamb" if way.startswith("lamb") else "adam"

    def numbers(t: int) -> Tensor:
        betas, eps = (0.9, 0.99), 1e-3
        adam, lamb = adam_terms(betas, eps, 0.1, True), [lamb_terms(betas, eps, 0.1, n != 12) for n in sizes]
        rows = [numbers_at(terms, t, 0.1) for terms in (lamb if rule == "lamb" else [adam] * len(sizes))]
        return torch.tensor(rows)

    def step(rates: Tensor) -> None:
        torch.ops.autofuse.reduce_update_gather(
            params, every[rank], states, rates, rule, "avg", clip, False, [f"p{n}" for n in sizes],
            group_of_all().group_name, "direct", "many",
        )  # fmt: skip

    def check(t: int) -> None:
        rows = numbers(t).double().tolist()
        for row, p, g, a, b, got in zip(rows, exact, means, m, v, params, strict=True):
            u = RULES[rule].update(p, g, (a, b), row)
            if u is not None:
                p.sub_(u, alpha=row[LR] * trust(row, float(p.square().sum()), float(u.square().sum())))
            torch.testing.assert_close(got.double(), p, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
            p.copy_(got)
        told = [torch.empty_like(params[1]) for _ in range(world)]
        dist.all_gather(told, params[1])
        assert all(torch.equal(each, params[1]) for each in told)

    with in_way(way):
        for t in (1, 2, 3):
            if t == 2 and rank:
                torch.cuda._sleep(50_000_000)
            step(numbers(t))
            check(t)
        given = numbers(4).cuda()
        step(given)
        check(4)
        graph = torch.cuda.CUDAGraph()
        if replays:
            with torch.cuda.graph(graph):
                step(given)
        for t in range(5, 5 + replays):
            given.copy_(numbers(t))
            graph.replay()
            check(t)
        autofuse.check()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("way", "clip"), [("buckets", 0.0), ("lamb", 0.0), ("lamb_clipped", 0.1)])
def test_kernel_of_many_elements(
    gpu_ranks: Callable[[int], RankPool], world: int, dtype: torch.dtype, way: str, clip: float
) -> None:
    gpu_ranks(world).run(many, dtype, MANY, way, clip, timeout=120)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["packets", "lamb_packets"])
def test_packets_of_many_elements(
    gpu_ranks: Callable[[int], RankPool], world: int, dtype: torch.dtype, way: str
) -> None:
    gpu_ranks(world).run(many, dtype, 100 << 10, way, timeout=120)


def _captured(rank: int, world: int, name: str, max_norm: float | None) -> float:
    """Steps of a graph, with a rate that changes, beside torch's."""
    torch.manual_seed(3)
    sizes, rate = (1000, 4, 70_000), torch.tensor(OPTIONS[name]["lr"], device="cuda")
    params = [nn.Parameter(torch.randn(n, device="cuda")) for n in sizes]
    exact = [p.detach().double().requires_grad_() for p in params]
    for p in params:
        p.grad = torch.empty_like(p)
    refused = getattr(autofuse.optim, name)(params, **OPTIONS[name])
    options = OPTIONS[name] | {"lr": rate, "max_norm": max_norm}
    ours = getattr(autofuse.optim, name)(params, **options, capturable=True)
    torchs = getattr(torch.optim, name)(exact, **OPTIONS[name])

    def gradients(step: int) -> None:
        every = [torch.Generator("cuda").manual_seed(9 * step + r) for r in range(world)]
        for p, e in zip(params, exact, strict=True):
            parts = [torch.randn(len(p), generator=g, device="cuda") for g in every]
            assert p.grad is not None
            p.grad.copy_(parts[rank])
            e.grad = sum((part.double() for part in parts), torch.zeros_like(e)) / world

    def check() -> None:
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(exact, max_norm)
        torchs.step()
        for p, e in zip(params, exact, strict=True):
            torch.testing.assert_close(p.detach().double(), e.detach(), rtol=1e-4, atol=1e-5)

    for step in range(2):
        gradients(step)
        ours.step()
        check()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="capturable=True"):
            refused.step()
        ours.step()
    for step in range(2, 6):
        gradients(step)
        if step == 4:
            rate.mul_(0.5)
            torchs.param_groups[0]["lr"] *= 0.5
        graph.replay()
        check()
    assert ours.state_dict()["state"][0]["step"] == 6
    gradients(6)
    ours.step()
    check()
    autofuse.check()
    return float(sum(p.double().sum() for p in params))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("name", "max_norm"), [("AdamW", None), ("SGD", None), ("AdamW", 0.5)])
def test_captured(
    gpu_ranks: Callable[[int], RankPool], world: int, name: str, max_norm: float | None
) -> None:
    sums = gpu_ranks(world).run(_captured, name, max_norm, timeout=120)
    assert sums == [sums[0]] * world
