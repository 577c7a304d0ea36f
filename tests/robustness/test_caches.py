"""Inductor's cache of compiled graphs: the report is complete, and ranks share what is in it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from tests.passes.dense import group as everybody
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
        {"graph": g.kind, "pattern": s.pattern, "fused": s.fused, "world": s.world, "nbytes": s.nbytes}
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
    assert all(site["fused"] for site in expected)
    for sites, _, _ in cold:
        assert sites == expected
    for sites, hits, misses in warm:
        assert sites == expected
        assert (hits, misses) == (2, 0)
