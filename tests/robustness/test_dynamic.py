"""One compilation serves every number of tokens."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import autofuse
from tests.passes.dense import group as everybody
from tests.passes.harness import passes_only
from tests.ranks import RankPool
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]
Program = Callable[..., Tensor]
TOKENS = range(1, 34)


def matmul_all_reduce(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", everybody()) * 2


def matmul_reduce_scatter(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x @ w, "sum", 0, everybody()) * 2


def matmul_reduce_scatter_on_dim_1(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(torch.stack([x, x + 1]) @ w, "sum", 1, everybody()) * 2


def all_gather_matmul(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, everybody()) @ w


def embedding_bag_all_to_all(offsets: Tensor, indices: Tensor, table: Tensor) -> Tensor:
    world = dist.get_world_size()
    pooled = F.embedding_bag(indices, table, offsets, mode="sum")
    out = funcol.wait_tensor(funcol.all_to_all_single(pooled, None, None, everybody()))
    return out.view(world, -1, table.shape[1]).transpose(0, 1).reshape(-1, world * table.shape[1])


def expert_matmul_all_to_all(x: Tensor, w: Tensor) -> Tensor:
    """Two experts, `tokens` rows of each for every rank."""
    rows = x.permute(2, 1, 0, 3).reshape(2, -1, x.shape[3])
    y = (rows @ w).view(2, dist.get_world_size(), -1, w.shape[2]).transpose(0, 1).contiguous()
    return funcol.wait_tensor(funcol.all_to_all_single(y, None, None, everybody())) * 2


def all_to_all_expert_matmul(x: Tensor, w: Tensor) -> Tensor:
    sent = x.permute(1, 2, 0, 3).contiguous()
    rows = funcol.wait_tensor(funcol.all_to_all_single(sent, None, None, everybody()))
    return rows.transpose(0, 1).reshape(2, -1, w.shape[1]) @ w


def _args(program: Program, rank: int, tokens: int) -> tuple[list[Tensor], Tensor]:
    """What depends on the number of tokens, in dim 0, and the weight."""
    world = dist.get_world_size()
    if program is embedding_bag_all_to_all:
        generator = torch.Generator().manual_seed(tokens + 100 * rank)
        indices = torch.randint(0, 50, (3 * tokens * world,), generator=generator)
        return [torch.arange(tokens * world) * 3, indices], integers(rank, 50, 7)
    if program in (expert_matmul_all_to_all, all_to_all_expert_matmul):
        return [integers(tokens + 100 * rank, tokens, world, 2, 12)], integers(rank, 2, 12, 8)
    rows = tokens * world if "reduce_scatter" in program.__name__ else tokens
    return [integers(rows + 100 * rank, rows, 12)], integers(rank, 12, 8)


def _serves(rank: int, world: int, program: Program, generated: bool, marked: bool) -> tuple[int, int]:
    """Compilations and fused sites after all numbers of tokens."""
    torch._dynamo.reset()
    backend = "autofuse" if generated else passes_only()
    compiled = torch.compile(program, backend=backend, dynamic=None if marked else True)
    static = world if program is matmul_reduce_scatter_on_dim_1 else 1
    with autofuse.debug() as report, torch.no_grad():
        for tokens in (5, *TOKENS):  # torch compiles anew for a dim (here a part of it) of 1
            varying, weight = _args(program, rank, tokens)
            for t in varying:
                if marked and t.shape[0] > static:
                    torch._dynamo.mark_dynamic(t, 0)
            assert torch.equal(compiled(*varying, weight), program(*varying, weight)), tokens
    return len(report.graphs), len(report.fused)


PROGRAMS = [
    matmul_all_reduce,
    matmul_reduce_scatter,
    matmul_reduce_scatter_on_dim_1,
    all_gather_matmul,
    embedding_bag_all_to_all,
    expert_matmul_all_to_all,
    all_to_all_expert_matmul,
]


@pytest.mark.parametrize(
    ("program", "marked"),
    [
        pytest.param(program, marked, marks=[] if marked == bool(i % 2) else pytest.mark.full)
        for i, program in enumerate(PROGRAMS)
        for marked in (False, True)
    ],
)
def test_token_counts(ranks: Ranks, program: Program, marked: bool) -> None:
    for graphs, fused in ranks(2).run(_serves, program, False, marked, timeout=120):
        assert graphs <= 2
        assert fused == graphs


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            marks=[] if program == matmul_all_reduce else pytest.mark.full,
        )
        for program in PROGRAMS
    ],
)
def test_generated_code(ranks: Ranks, program: Program) -> None:
    for graphs, fused in ranks(2).run(_serves, program, True, False, timeout=120):
        assert graphs <= 2
        assert fused == graphs


def _grows(rank: int, world: int) -> list[int]:
    """Neither marked nor dynamic: torch compiles for the first shape, then once for all others."""
    torch._dynamo.reset()
    compiled = torch.compile(matmul_all_reduce, backend=passes_only())
    w = integers(rank, 12, 8)
    counts = []
    with autofuse.debug() as report, torch.no_grad():
        for tokens in (5, 8, 13, 21, 34, 5):
            x = integers(tokens + rank, tokens, 12)
            assert torch.equal(compiled(x, w), matmul_all_reduce(x, w))
            counts.append(len(report.fused))
    return counts


def test_shapes_that_change_unannounced(ranks: Ranks) -> None:
    assert ranks(2).run(_grows) == [[1, 2, 2, 2, 2, 2]] * 2
