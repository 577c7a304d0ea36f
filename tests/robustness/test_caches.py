"""Inductor's cache of compiled graphs: the report is complete, ranks share what is in it, and it answers only
where all that a decision depends on is the same. And Inductor's modes."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from autofuse import backend, config
from autofuse.native_kernels import cpu
from autofuse.passes import circumstances, mark_inputs
from autofuse.passes.graph.anchors import Anchor
from tests.passes.dense import group as everybody
from tests.passes.harness import fake_group
from tests.ranks import RankPool
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]
Result = tuple[list[dict[str, Any]], int, int]


def model(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """What a rank computes depends on its number: its rows of the sum."""
    hidden = funcol.all_gather_tensor_autograd(x, 0, everybody()) @ v
    return funcol.reduce_scatter_tensor_autograd(hidden.relu() @ w, "sum", 0, everybody())


def _trains(rank: int, world: int, directory: str) -> Result:
    """Sites, and hits and misses of the cache, of a forward and a backward."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory.format(rank=rank)
    torch._inductor.config.cpp_cache_precompile_headers = False  # which takes longer than the code does
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results = []
    with autofuse.debug() as report:
        for fn in (model, torch.compile(model, backend="autofuse")):
            leaves = [integers(rank + 10 * i, 8, 8).requires_grad_() for i in range(3)]
            y = fn(*leaves)
            (y * integers(50 + rank, 8, 8)).sum().backward()
            results.append([y, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    counts = torch._dynamo.utils.counters["inductor"]
    sites = [
        {"graph": g.kind, "pattern": s.pattern, "now": s.state.value, "world": s.world, "nbytes": s.nbytes}
        for g in report.graphs
        for s in g.sites
    ]
    return sites, counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]


def test_a_second_process_and_another_rank_find_what_rank_0_compiled(fresh: Ranks, tmp_path: Path) -> None:
    cold = fresh(2).run(_trains, str(tmp_path / "{rank}"), timeout=120)
    warm = fresh(2).run(_trains, str(tmp_path / "0"), timeout=120)
    expected, hits, misses = cold[0]
    assert (hits, misses) == (0, 2)
    patterns = [(site["graph"], site["pattern"]) for site in expected]
    assert patterns[:2] == [("forward", "all_gather_matmul"), ("forward", "matmul_reduce_scatter")]
    assert {graph for graph, _ in patterns} == {"forward", "backward"}
    assert all(site["now"] == "fused" for site in expected)
    for sites, _, _ in cold:
        assert sites == expected
    for sites, hits, misses in warm:
        assert sites == expected
        assert (hits, misses) == (2, 0)


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", everybody()).relu()


def _compile(world: int = 2) -> tuple[bool, list[tuple[bool, str | None]]]:
    """Whether the cache had the graph, and its sites."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    with fake_group(world), autofuse.debug() as report:
        torch.compile(reduced, backend="autofuse")(torch.ones(4, 6), torch.ones(6, 8))
    hit = counters["inductor"]["fxgraph_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 1 - hit
    return hit, [(site.fused, site.source) for site in report.sites]


CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "policy": lambda: config.patch(policy="never"),
    "order": lambda: config.patch(order="ring"),
    "patterns": lambda: config.patch(patterns="all_gather_matmul"),
    "sources": lambda: patch.object(backend, "_sources_digest", lambda: "other"),
    "kernels": lambda: patch.multiple(cpu, _library=None, _why_not="install a compiler"),
    "processors": lambda: patch.object(os, "cpu_count", lambda: 1000),
    "hosts": lambda: patch.dict(os.environ, LOCAL_WORLD_SIZE="1"),
    "line": lambda: patch.object(Anchor, "source", "model.py:4"),
}


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[None]:
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)):
        yield


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        summed = funcol.all_reduce(x @ w, "sum", everybody()) + residual
        return torch.nn.functional.rms_norm(summed, (8,), self.gamma)


@pytest.mark.usefixtures("cold")
def test_proofs_are_found_though_the_cache_has_the_code() -> None:
    counters, proofs = torch._dynamo.utils.counters, []
    for number in range(2):
        torch._dynamo.reset()
        counters.clear()
        silent = patch.object(backend.log, "isEnabledFor", lambda level: False)
        wrapped = patch.object(backend, "Agreed", wraps=backend.Agreed)
        with fake_group(2), torch.no_grad(), silent, wrapped as agreed:
            model, options = Normed(), {"policy": "always", "schedule": "owner"}
            autofuse.replicated(model, parameters=["gamma"], inputs=["residual"])
            compiled = torch.compile(model, backend="autofuse", options=options)
            compiled(torch.ones(4, 6), torch.ones(6, 8), torch.ones(4, 8))
        assert counters["inductor"]["fxgraph_cache_hit"] == number
        proofs.append(agreed.call_args.args[2])
    assert proofs[0] == proofs[1] != ()


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_decision_depends_on_misses_the_cache(name: str) -> None:
    first = _compile()
    with CHANGES[name]():
        changed = _compile()
    assert (first[0], changed[0]) == (False, False)
    assert changed[1] != first[1] or name in ("order", "sources", "processors")
    assert _compile() == (True, first[1])


@pytest.mark.usefixtures("cold")
def test_another_number_of_ranks_misses_the_cache() -> None:
    """The graph of an all_reduce does not tell how many ranks there are."""
    ((_, alone), (_, two), (hit, four)) = (_compile(world) for world in (1, 2, 4))
    assert (hit, [fused for fused, _ in (*alone, *two, *four)]) == (False, [False, True, True])


def test_circumstances_tell_neither_rank_nor_folder() -> None:
    found = set()
    for rank in range(3):
        with fake_group(3, rank), patch.object(Anchor, "source", f"/checkouts/{rank}/model.py:4"):
            gm = make_fx(reduced, tracing_mode="fake")(torch.ones(4, 6), torch.ones(6, 8))
            assert isinstance(gm, fx.GraphModule)
            found.add(circumstances(gm.graph))
    (text,) = found
    assert "model.py:4" in text
    assert "checkouts" not in text


def test_circumstances_tell_which_inputs_are_permutations() -> None:
    """The code of a backward graph does not say how the forward graph made its inputs."""

    def backward(marks: bool) -> str:
        gm = make_fx(lambda x, w, places: reduced(x[places], w), tracing_mode="fake")(
            torch.ones(4, 6), torch.ones(6, 8), torch.arange(4)
        )
        assert isinstance(gm, fx.GraphModule)
        joint = make_fx(lambda keys: keys.argsort(), tracing_mode="fake")(torch.arange(4))
        order = joint.graph.output_node().args[0]
        if marks:
            mark_inputs(joint.graph)
        (*_, places) = (n for n in gm.graph.nodes if n.op == "placeholder")
        assert isinstance(order, fx.Node)
        places.meta = order.meta  # as the partition does
        return circumstances(gm.graph)

    with fake_group(2):
        assert backward(marks=True) != backward(marks=False)


def _caches_all(rank: int, world: int, directory: str) -> tuple[list[int], int]:
    """Graphs reported per round, with AOTAutograd's cache asked for, and its hits."""
    torch._dynamo.utils.counters.clear()
    counts = []
    with (
        patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=directory),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            with autofuse.debug() as report:
                leaves = [integers(rank + 10 * i, 8, 8).requires_grad_() for i in range(3)]
                torch.compile(model, backend="autofuse")(*leaves).sum().backward()
            counts.append(sum(len(graph.sites) for graph in report.graphs))
    return counts, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


def test_a_cache_that_would_skip_the_pass_is_not_asked(ranks: Ranks, tmp_path: Path) -> None:
    for (first, second), hits in ranks(2).run(_caches_all, str(tmp_path), timeout=120):
        assert (first, hits) == (second, 0)
        assert first >= 4


def _in_mode(rank: int, world: int, mode: str | None, options: dict[str, Any]) -> list[str]:
    torch._dynamo.reset()
    x, w = integers(rank, 4, 6), integers(7, 6, 8)
    compiled = torch.compile(reduced, backend="autofuse", mode=mode, options=options or None)
    with autofuse.debug() as report, torch.no_grad():
        for _ in range(3):  # a graph that is captured runs twice before it is replayed
            assert torch.equal(compiled(x, w), reduced(x, w))
    assert len(report.sites) == 1
    return [site.reason.value for site in report.kept if site.reason]


@pytest.mark.parametrize(
    ("mode", "options", "kept"),
    [
        ("reduce-overhead", {}, []),
        ("max-autotune", {}, []),
        (None, {"freezing": True}, []),
        pytest.param(None, {"cpp_wrapper": True}, ["unsupported_variant"], marks=pytest.mark.full),
    ],
    ids=["reduce-overhead", "max-autotune", "freezing", "cpp_wrapper"],
)
def test_modes(ranks: Ranks, mode: str | None, options: dict[str, Any], kept: list[str]) -> None:
    assert ranks(2).run(_in_mode, mode, options, timeout=120) == [kept] * 2
