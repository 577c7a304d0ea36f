"""Bags of tables that are sharded by rows, reduced over the ranks on GPUs: every way, and captured graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding_bag

from tests.gpu.conftest import WORLDS
from tests.gpu.expected import MOST_ERROR, error_of, every_result, group_of_all
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

REDUCE, SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """`pooling`: entries of a bag on average; `only`: the rank that has entries, None: all."""

    op: str
    bags: int
    dims: tuple[int, ...] = (256,) * 4
    dtype: torch.dtype = BF16
    mode: str = "sum"
    pooling: int = 5
    only: int | None = None

    def inputs(self, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Indices, tables and offsets of a rank."""
        torch.manual_seed(50 + rank)
        count = self.bags * self.pooling if self.only in (None, rank) else 0
        tables = [torch.randn(5000, d, device="cuda").to(self.dtype) for d in self.dims]
        indices = [torch.randint(0, 5000, (count,), device="cuda") for _ in self.dims]
        starts = [torch.randint(0, count + 1, (self.bags - 1,), device="cuda").sort()[0] for _ in self.dims]
        return indices, tables, [torch.cat([t.new_zeros(1), t]) for t in starts]

    def expected(self, rank: int, world: int) -> Tensor:
        """Pooled in fp64 and rounded, the sum over the ranks in fp64."""
        pooled = [
            embedding_bag(i, w.double(), o, mode=self.mode)
            for i, w, o in zip(*self.inputs(rank), strict=True)
        ]
        total = torch.cat(pooled, 1).to(self.dtype).double()
        dist.all_reduce(total)
        return total if self.op == REDUCE else total.chunk(world)[rank]

    def arguments(self, rank: int) -> tuple[Any, ...]:
        indices, tables, offsets = self.inputs(rank)
        given = indices, tables, offsets, f"bags {self.mode} 0 -1", "sum"
        scattered = (0, 1) if self.op == SCATTER else ()
        return *given, *scattered, False, [], "", "", group_of_all().group_name, "direct", "bag sums"


def _all_ways(rank: int, world: int, case: Case) -> dict[str, float]:
    """Of every way its error, of calls back to back and of replays of a graph."""
    from autofuse.lowering.gpu import by_name

    given, expected, found = case.arguments(rank), case.expected(rank, world), {}
    for way in by_name.names(case.op, given, True):
        found[way] = max(error_of(each, expected) for (each,) in every_result(way, case.op, given))
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(REDUCE, 1),
        Case(REDUCE, 700, (64, 8, 1032), pooling=20),
        Case(REDUCE, 96, dtype=FP32, mode="mean"),
        Case(SCATTER, 512, dtype=FP16, mode="max"),
        Case(SCATTER, 4096, dtype=FP32, pooling=1),
        Case(SCATTER, 64, (16, 24), only=1),
    ],
    ids=str,
)
def test_all_ways(gpu_ranks: Callable[[int], RankPool], world: int, case: Case) -> None:
    for errors in gpu_ranks(world).run(_all_ways, case, timeout=150):
        assert any(way.startswith("bags") for way in errors)
        assert {way: error for way, error in errors.items() if error > MOST_ERROR} == {}
