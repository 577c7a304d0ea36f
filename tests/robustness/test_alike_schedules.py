"""Schedules that rest on proofs, where ranks compare these, and what is a rank's own differs."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import autofuse
from tests.passes.harness import passes_only
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]
ROWS, COLUMNS = 16, 8


class Normed(nn.Module):
    """A reduction with a norm behind it, whose operands are declared to be the same on all ranks."""

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        self.gamma = nn.Parameter(integers(2, COLUMNS))
        self.group, self.bias = fresh_group(), bias
        autofuse.replicated(self, parameters=["gamma"], inputs=["residual"], group=self.group)

    def forward(self, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        total = funcol.all_reduce(F.linear(x, w, self.bias), "sum", self.group)
        return F.rms_norm(total + residual, (COLUMNS,), self.gamma)


def _by_owners(rank: int, world: int, inner: list[tuple[int, int]], biased: int) -> list[str]:
    """`inner`: the contracted dim in each call, on each rank; `biased`: the rank that adds a bias."""
    torch._dynamo.reset()
    model = Normed(integers(9, COLUMNS) if rank == biased else None)
    compiled = torch.compile(model, backend=passes_only(schedule="owner"))
    with autofuse.debug() as report, torch.no_grad():
        for sizes in inner:
            args = integers(rank, ROWS, sizes[rank]), integers(7 + rank, COLUMNS, sizes[rank])
            residual = integers(3, ROWS, COLUMNS)
            torch.testing.assert_close(compiled(*args, residual), model(*args, residual))
    return [site.tail_form for site in report.fused]


@pytest.mark.parametrize(
    ("inner", "biased"),
    [([(6, 7)], -1), ([(6, 6)], 0), ([(6, 6), (6, 9), (6, 6)], -1)],
    ids=["uneven", "bias on one rank", "changes on one rank"],
)
def test_owners_apply_the_tail_of_products_that_differ(
    ranks: Ranks, inner: list[tuple[int, int]], biased: int
) -> None:
    for forms in ranks(2).run(_by_owners, inner, biased):
        assert set(forms) == {"owner"}
