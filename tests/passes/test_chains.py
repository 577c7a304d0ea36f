"""Random chains round a collective: what can be expressed is fused, and the numbers are those of eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from tests.ranks import RankPool

from . import lockstep
from .chains import CHAINS, MATMUL, READ, Chain, Collectives, Replicated, Trained, arguments, program, trained
from .harness import fake_group, passes_only
from .oracle import verdict

FUSED = {
    "all_reduce": torch.ops.autofuse.matmul_all_reduce.default,
    "reduce_scatter": torch.ops.autofuse.matmul_reduce_scatter.default,
    "all_gather": torch.ops.autofuse.all_gather_matmul.default,
}


def drawn(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def graph_of(chain: Chain) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(program(chain), tracing_mode="fake")(*arguments(chain))


def rewrite(gm: fx.GraphModule) -> str | None:
    """Rewrite the graph of a chain; the reason if its site was kept."""
    (site,) = autofuse.rewrite(gm).sites
    return None if site.reason is None else site.reason.value


def place(gm: fx.GraphModule, collective: str) -> tuple[int, int] | None:
    """`(dim, outer)` of the fused op."""
    (node,) = gm.graph.find_nodes(op="call_function", target=FUSED[collective])
    first = {"all_reduce": None, "reduce_scatter": 5, "all_gather": 3}[collective]
    return None if first is None else tuple(node.args[first : first + 2])


# Once kept or broken, or kept with another reason.
FOUND = {
    "views of views": (
        Chain("all_reduce", 2, (6, 8), (("reshape", (8, 6)), ("reshape", (8, 3, 2)))),
        None,
    ),
    "an input that is flat to the collective": (
        Chain("reduce_scatter", 2, (6, 16), (("permute", (1, 0)), ("reshape", (12, 8)))),
        None,
    ),
    "views of views of what was gathered": (
        Chain("all_gather", 2, (6, 6), (), (("reshape", (8, 9)), ("reshape", (6, 12)), READ, MATMUL)),
        None,
    ),
    "no digits of the product": (
        Chain("reduce_scatter", 2, (12, 8), (("reshape", (16, 6)), ("permute", (1, 0)))),
        "layout",
    ),
    "no digits of what was gathered": (
        Chain("all_gather", 4, (4, 6), (), (("reshape", (6, 16)), ("permute", (1, 0)))),
        "layout",
    ),
    "a view of the permuted result": (
        Chain("reduce_scatter", 4, (24, 8), (), (("reshape", (48, 1)), READ), dim=1),
        None,
    ),
    "a reader with digits of its own": (
        Chain(
            "all_gather",
            2,
            (12, 6),
            (),
            (
                *(("reshape", (4, 6, 6)), ("permute", (1, 0, 2)), MATMUL),
                *(("permute", (1, 0, 2)), ("reshape", (6, 4, 6)), ("permute", (1, 0, 2)), READ),
            ),
        ),
        None,
    ),
}


def check(chain: Chain) -> str | None:
    """Decision, place and numbers of a chain; the reason if it was kept."""
    expected, gm = verdict(chain), graph_of(chain)
    args = [arguments(chain, rank) for rank in range(chain.world)]
    outputs = lockstep.run(gm, args)
    reason = rewrite(gm)
    assert reason == expected.reason, chain
    if reason is None and chain.collective != "all_reduce":
        assert place(gm, chain.collective) in expected.places, chain
    for before, after in zip(outputs, lockstep.run(gm, args), strict=True):
        torch.testing.assert_close(after, before)
    return reason


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    chain, reason = FOUND[name]
    with fake_group(chain.world), autofuse.config.patch(policy="always"):
        assert check(chain) == reason


def some_chains(collective: str, count: int) -> list[Chain]:
    found: list[Chain] = []

    @drawn(count)
    @given(CHAINS[collective](2))
    def collect(chain: Chain) -> None:
        found.append(chain)

    collect()
    return found


def compare(rank: int, world: int, chains: list[Chain], use: type[Collectives]) -> list[tuple]:
    """By chain the errors of outputs (and gradients, in training) and the reason by kind of graph."""
    training, found = use is not Collectives, []
    for chain in chains:
        fn, args = program(chain, use), arguments(chain, rank)
        for arg in args[:2]:
            arg.requires_grad_(training)
        with torch.set_grad_enabled(training):
            expected = outputs_and_gradients(fn, args)
            torch._dynamo.reset()
            with autofuse.debug() as report:
                actual = outputs_and_gradients(torch.compile(fn, backend=passes_only()), args)
        kinds = {g.name: g.kind for g in report.graphs}
        reasons = {kinds[s.graph]: s.reason and s.reason.value for s in report.sites}
        found.append((list(map(error, actual, expected)), reasons))
    return found


def outputs_and_gradients(fn: Callable[..., tuple[Tensor, ...]], args: tuple[Tensor, ...]) -> list[Tensor]:
    outputs = fn(*args)
    leaves = [a for a in args if a.requires_grad]
    loss = sum(((o.flatten() * torch.arange(o.numel()).cos()).sum() for o in outputs), torch.zeros(()))
    return [*outputs, *(torch.autograd.grad(loss, leaves) if leaves else ())]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative to the largest value, in units of what the dtype allows."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    scale = expected.abs().max().clamp(min=1e-30)
    allowed = 1e-5 if actual.dtype == torch.float32 else 1e-2
    return float((actual - expected).abs().max() / scale / allowed)


@pytest.mark.parametrize("examples", [7, pytest.param(24, marks=pytest.mark.full)])
@pytest.mark.parametrize("collective", CHAINS)
def test_numbers(collective: str, examples: int, ranks: Callable[[int], RankPool]) -> None:
    chains = some_chains(collective, examples)
    for found in ranks(2).run(compare, chains, Collectives, timeout=180):
        for chain, (errors, reasons) in zip(chains, found, strict=True):
            assert max(errors) < 1, (chain, errors)
            assert reasons == {"inference": verdict(chain).reason}, chain


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_training(collective: str, ranks: Callable[[int], RankPool]) -> None:
    pairs = [trained(chain) for chain in some_chains(collective, 6)]
    for found in ranks(2).run(compare, [chain for chain, _ in pairs], Trained, timeout=180):
        for (chain, backward), (errors, reasons) in zip(pairs, found, strict=True):
            assert max(errors) < 1, (chain, errors)
            assert reasons == {"forward": verdict(chain).reason, "backward": verdict(backward).reason}, chain


def test_training_of_all_reduce(ranks: Callable[[int], RankPool]) -> None:
    forward = [trained(chain)[0] for chain in some_chains("all_reduce", 5)]
    for found in ranks(2).run(compare, forward, Trained, timeout=180):
        for chain, (errors, reasons) in zip(forward, found, strict=True):
            assert max(errors) < 1, (chain, errors)
            assert reasons == {"forward": verdict(chain).reason}, chain
    pairs = [trained(chain) for chain in some_chains("all_gather", 6)]
    for found in ranks(2).run(compare, [chain for chain, _ in pairs], Replicated, timeout=180):
        for (chain, backward), (errors, reasons) in zip(pairs, found, strict=True):
            assert max(errors) < 1, (chain, errors)
            reduced = replace(backward, collective="all_reduce", dim=0)
            assert reasons == {"backward": verdict(reduced).reason}, chain


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("collective", CHAINS)
def test_decisions(collective: str, world: int) -> None:
    reasons: Counter[str | None] = Counter()

    @drawn(60)
    @given(CHAINS[collective](world))
    def decide(chain: Chain) -> None:
        reasons[check(chain)] += 1

    with fake_group(world), autofuse.config.patch(policy="always"):
        decide()
    assert reasons[None] > 30, reasons
