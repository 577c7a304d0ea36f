"""Numbers of a rank's own for which Inductor would change the graph before the fusion."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from tests.passes.harness import passes_only
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]


def _weighted(rank: int, world: int, weights: list[int]) -> list[str]:
    """A rank without tokens brings nothing to the sum."""
    torch._dynamo.reset()
    group, x, w, weight = fresh_group(), integers(rank, 4, 6), integers(7 + rank, 6, 8), weights[rank]

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce((x @ w * weight).relu(), "sum", group)

    with autofuse.debug() as report, torch.no_grad():
        assert torch.equal(torch.compile(fn, backend=passes_only())(x, w), fn(x, w))
    return [str(site.pattern) for site in report.fused]


@pytest.mark.parametrize("weights", [[3, 0], [True, False]], ids=str)
def test_a_product_times_zero(ranks: Ranks, weights: list[int]) -> None:
    assert ranks(2).run(_weighted, weights, timeout=40) == [["matmul_all_reduce"]] * 2
