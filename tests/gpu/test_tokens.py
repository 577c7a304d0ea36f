"""Rows of experts that are added up token by token and over the ranks, on GPUs: every way, and compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.conftest import WORLDS
from tests.gpu.expected import MOST_ERROR, error_of, every_result, group_of_all
from tests.passes.tensor_parallel_experts import EXPERTS, Experts
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

REDUCE, SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
BF16, FP32 = torch.bfloat16, torch.float32
TAKEN = "grouped %0; take %1; mul %2; sum {}; to bfloat16"
"""As Mixtral in Hugging Face has it: of each token the rows of the experts that it has chosen, weighted."""
ADDED = "grouped %0; mul %2; take %1; sum {}; to bfloat16; add %3"
EVERY = "grouped; mul %0; fold {}"


@dataclass(frozen=True)
class Case:
    op: str
    tokens: int
    columns: int
    product: str
    top: int = 2
    experts: int = 8
    depth: int = 64

    def operands(self, rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x, w, and operands; some experts have no rows."""
        torch.manual_seed(70 + rank)
        rows = self.tokens * self.top
        x = torch.randn(rows, self.depth, device="cuda", dtype=BF16)
        w = torch.randn(self.experts, self.depth, self.columns, device="cuda", dtype=BF16) / self.depth**0.5
        if self.product == EVERY:
            return x, w, [torch.rand(rows, 1, device="cuda", dtype=BF16)]
        chosen = torch.randint(0, self.experts - 1, (rows,), device="cuda").sort()[0]
        ends = torch.searchsorted(
            chosen, torch.arange(self.experts, device="cuda"), right=True, out_int32=True
        )
        back = torch.randperm(rows, device="cuda")
        added = torch.randn(self.tokens, self.columns, device="cuda", dtype=BF16)
        return x, w, [ends[:, None], back[:, None], torch.rand(rows, 1, device="cuda"), added]

    def arguments(self, rank: int) -> tuple[Any, ...]:
        x, w, operands = self.operands(rank)
        scattered = (0, 1) if self.op == SCATTER else ()
        given = [x], [w], operands, self.product.format(self.top), "sum"
        return *given, *scattered, True, [], "", "", group_of_all().group_name, "direct", "tokens"

    def expected(self, rank: int, world: int) -> Tensor:
        """Of rounded rows, in fp64."""
        x, w, operands = self.operands(rank)
        if self.product == EVERY:
            rows = torch.bmm(x.view(self.experts, -1, self.depth), w).flatten(0, 1).double()
            total = (rows * operands[0].double()).view(self.top, self.tokens, -1).sum(0)
        else:
            ends, back, factors, added = operands
            expert = torch.searchsorted(ends[:, 0], torch.arange(len(x), device="cuda"), right=True)
            rows = torch.cat([x[expert == e].double() @ w[e].double() for e in range(self.experts)])
            rows, taken = rows.to(BF16).double(), self.product == TAKEN
            weighted = rows[back[:, 0]] * factors if taken else (rows * factors)[back[:, 0]]
            total = weighted.view(self.tokens, self.top, -1).sum(1) + (0 if taken else added.double())
        total = total.to(BF16).double()
        dist.all_reduce(total)
        return total if self.op == REDUCE else total.chunk(world)[rank]


def _all_ways(rank: int, world: int, case: Case) -> dict[str, float]:
    """Of every way its error, of calls back to back and of replays of a graph."""
    from autofuse.lowering.gpu import by_name

    given, expected, found = case.arguments(rank), case.expected(rank, world), {}
    for way in by_name.names(case.op, given, True):
        found[way] = max(error_of(sums, expected) for sums, _ in every_result(way, case.op, given))
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(REDUCE, 1, 4096, TAKEN),
        Case(REDUCE, 700, 520, ADDED, top=8, experts=32),
        Case(REDUCE, 96, 1024, EVERY, top=4, experts=4),
        Case(SCATTER, 512, 256, TAKEN, top=6),
        Case(SCATTER, 4096, 2048, ADDED),
    ],
    ids=str,
)
def test_all_ways(gpu_ranks: Callable[[int], RankPool], world: int, case: Case) -> None:
    for errors in gpu_ranks(world).run(_all_ways, case, timeout=150):
        assert any(way.startswith("tokens") for way in errors)
        assert {way: error for way, error in errors.items() if error > MOST_ERROR} == {}


def _compiled(rank: int, world: int, how: str) -> tuple[float, list[str], list[str]]:
    """The error of a compiled layer of experts, its fused ops, and why sites are kept."""
    import autofuse

    torch.manual_seed(rank)
    model = Experts(how).to("cuda", BF16)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.gate.weight)
    x = torch.randn(64, model.gate.in_features, device="cuda", dtype=BF16)
    with torch.no_grad(), autofuse.debug() as report:
        wanted = model(x).double()
        run = torch.compile(model, backend="autofuse", options={"policy": "always"})
        found = [run(x).double() for _ in range(3)]
    kept = [f"{site.reason}: {site.detail}" for site in report.sites if not site.fused]
    errors = [float((each - wanted).norm() / wanted.norm()) for each in found]
    return max(errors), [str(site.op) for site in report.fused], kept


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["sum", "every", "matrices and vectors"])
def test_a_compiled_layer(gpu_ranks: Callable[[int], RankPool], world: int, how: str) -> None:
    assert EXPERTS <= 16
    for error, fused, kept in gpu_ranks(world).run(_compiled, how, timeout=150):
        assert (fused, kept) == ([f"autofuse::{REDUCE}"], [])
        assert error < 2e-2  # eager rounds the weighted rows of the products, too
