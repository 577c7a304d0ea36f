"""Ranks compare the proofs that a schedule rests on, and accept differences that the fused op allows."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import autofuse
from autofuse.lowering import torch_internals
from tests.passes.harness import passes_only, without_code
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]
ROWS, COLUMNS = 16, 8


class Normed(nn.Module):
    """An all_reduce, then a residual and a norm. Both operands are declared to be the same on all ranks."""

    def __init__(self, bias: Tensor | None = None, check_every: int = 0) -> None:
        super().__init__()
        self.gamma = nn.Parameter(integers(2, COLUMNS))
        self.group, self.bias = fresh_group(), bias
        same = {"parameters": ["gamma"], "inputs": ["residual"]}
        autofuse.replicated(self, **same, group=self.group, check_every=check_every)  # type: ignore[arg-type]

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


def _compiled_again(rank: int, world: int, schedule: str, check_every: int) -> list[int]:
    """The contracted dim changes on rank 1 alone, then the rows on both. How many graphs there are after
    each call."""
    torch._dynamo.reset()
    model, options = Normed(check_every=check_every), {"policy": "always", "schedule": schedule}
    graphs = []
    with (
        patch.object(torch_internals, "compile_fx_inner", without_code),
        autofuse.debug() as report,
        torch.no_grad(),
    ):
        compiled = torch.compile(model, backend="autofuse", options=options)
        for rows, inner in ((ROWS, 6), (ROWS, 6 + 3 * rank), (ROWS, 6), (2 * ROWS, 6 + rank)):
            args = integers(rank, rows, inner), integers(7 + rank, COLUMNS, inner), integers(3, rows, COLUMNS)
            torch.testing.assert_close(compiled(*args), model(*args))
            graphs.append(len(report.graphs))
    return graphs


@pytest.mark.parametrize(("schedule", "check_every"), [("owner", 0), ("split", 0), ("split", 2)])
def test_a_rank_that_compiles_again_alone_compares_no_proofs(
    ranks: Ranks, schedule: str, check_every: int
) -> None:
    first, second = ranks(2).run(_compiled_again, schedule, check_every)
    assert first == [1, 1, 1, 2]
    assert second == [1, 2, 2, 3]
