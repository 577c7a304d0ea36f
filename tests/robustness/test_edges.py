"""Operands at the edge: without elements, with elements that share memory, with more than 32 bits can count.

CPU ranks compute them; of GPUs, what the call decides before a launch.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autofuse import ops
from autofuse.lowering.gpu.choice.kernel import fused_ways, ways_of
from autofuse.lowering.gpu.dense.call import CALLS, _row, run_gather, run_publish, run_reduce
from autofuse.lowering.gpu.dense.ways import DenseProblem
from autofuse.lowering.gpu.experts.call import combine_call, dispatch_call
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, ExpertProblem
from autofuse.lowering.ops.all_gather_matmul import AllGatherMatmul
from autofuse.lowering.ops.all_to_all_expert_matmul import AllToAllExpertMatmul
from autofuse.lowering.ops.expert_matmul_all_to_all import ExpertMatmulAllToAll
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.native_kernels.gpu.memory import is_tma
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
BF16 = torch.bfloat16
DENSE = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")


def weights(k: int, n: int) -> dict[str, Tensor]:
    """Of quarters, whose products and sums are exact."""
    plain = (torch.arange(k * n) % 7 - 3).view(k, n) / 4
    row, col = (torch.arange(n) % 5 - 2.0) / 4, (torch.arange(k) % 5 - 2.0) / 4
    return {
        "plain": plain,
        "one row": row.expand(k, n),
        "one column": col[:, None].expand(k, n),
        "one number": torch.tensor(0.25).expand(k, n),
        "transposed": plain.t().contiguous().t(),
        "overlapping": torch.arange(k + n).div(4).as_strided((k, n), (1, 1)),
    }


def _dense(rank: int, world: int) -> None:
    for m, k, n in product((0, 1, 2), (0, 3), (0, 5)):
        for name, w in weights(k, n).items():
            xs = [(torch.arange(m * world * k) % 5 + r - 2).view(m * world, k) / 4 for r in range(world)]
            x, bias = xs[rank], torch.tensor(0.5).expand(n)
            total = torch.stack([xi @ w.clone() + bias for xi in xs]).sum(0)
            gathered = torch.cat(xs) @ w.clone() + bias
            case = (m, k, n, name)
            assert torch.equal(ops.matmul_all_reduce(x, w, bias), total), case
            mine = total.view(world, m, n)[rank]
            assert torch.equal(ops.matmul_reduce_scatter(x, w, bias), mine), case
            assert torch.equal(ops.all_gather_matmul(x, w, bias), gathered), case
            assert torch.equal(ops.matmul_all_gather(x, w, bias, dim=0), gathered), case
            assert torch.equal(ops.matmul_all_reduce(x[None], w, bias), total[None]), case


def test_dense_ops_on_cpu_ranks(ranks: Ranks) -> None:
    ranks(2).run(_dense, timeout=100)


@pytest.mark.parametrize("name", weights(64, 64))
def test_tma_of_elements_that_share_memory(name: str) -> None:
    """The driver refuses a map of such a matrix, or takes another one for it."""
    w = weights(64, 64)[name]
    assert is_tma(w.to(BF16) if name in ("plain", "transposed") else w) == (name in ("plain", "transposed"))


def test_a_matrix_of_one_row_may_have_any_stride() -> None:
    assert is_tma(torch.zeros(8, 64, dtype=BF16)[:1].expand(1, 64))
    assert is_tma(torch.zeros(64, dtype=BF16).as_strided((1, 64), (0, 1)))


def test_kernels_read_a_bias_whose_entries_lie_side_by_side() -> None:
    bias = torch.tensor(0.5).expand(64)
    found = _row(bias)
    assert found is not None
    assert found.stride() == (1,)
    assert torch.equal(found, bias)
    assert _row(None) is None


@pytest.mark.parametrize("op", DENSE)
def test_gpus_leave_what_is_empty(op: str) -> None:
    """No kernel of ours runs it: there is nothing to wait for, and TMA has no maps of nothing. What a rank
    alone may not have, K or the columns of a gather, is compared first (test_gpu_enter.py)."""
    for m, k, n in ((0, 64, 64), (64, 0, 64), (64, 64, 0)):
        assert fused_ways(DenseProblem(op, m, k, n, 4, BF16)) == []
        if (n if op == "all_gather_matmul" else k) == 0:
            continue
        x, w = torch.zeros(m, k, dtype=BF16), torch.zeros(k, n, dtype=BF16)
        last = ("a group that nobody asks for", "direct", "here")
        given: Any
        if op == "all_gather_matmul":
            given = AllGatherMatmul(x, [w], [], 0, 1, False, *last)
            assert run_gather(given) is NotImplemented
        elif op == "matmul_all_gather":
            given = FUSED_OPS[op].arguments([x], [w], [], "mm", 0, 1, False, False, *last)
            assert run_publish(given) is NotImplemented
        elif op == "matmul_all_reduce":
            given = FUSED_OPS[op].arguments([x], [w], [], "mm", "sum", False, [], "", "", *last)
            assert run_reduce(op, given) is NotImplemented
        else:
            continue
        assert CALLS[op](given) is None


@pytest.mark.parametrize("splits", [[], [2, 2]])
def test_gpus_leave_experts_without_columns(splits: list[int]) -> None:
    last = ("a group that nobody asks for", "direct", "here")
    dropless = bool(splits)
    ends = torch.tensor([2, 4], dtype=torch.int32) if dropless else None
    how = (0, ends, None, splits, splits, 1, 1, False, *last)
    w = torch.zeros(2, 64, 0, dtype=BF16)
    x = torch.zeros((4, 64) if dropless else (2, 4, 64), dtype=BF16)
    assert combine_call(ExpertMatmulAllToAll([x], [w], [], [], "mm", *how)) is None
    x = x if dropless else x.unflatten(1, (2, 2)).transpose(0, 1)
    assert dispatch_call(AllToAllExpertMatmul(x, [w], [], "", *how)) is None


HUGE = (1 << 16, 1 << 18, (1 << 19) - 256)


def test_sizes_of_kernels_fit_in_32_bits() -> None:
    """Rows, columns and what lies between them count in 32 bits; what is larger runs no kernel of ours."""
    ran = 0
    for op, m, k, n, world in product(DENSE, (64, *HUGE, 1 << 25), HUGE, HUGE, (2, 8)):
        for way in ways_of(DenseProblem(op, m, k, n, world, BF16)).values():
            if way.fused:
                ran += 1
                assert max(vars(way.need).values()) <= 1 << 30
                assert m * max(k, n) < 1 << 40
                assert max(k, n) * 2 <= 1 << 20
    assert ran
    for op, rows, k, n in product((COMBINE, DISPATCH), (1 << 10, 1 << 20), HUGE, HUGE):
        for way in ways_of(ExpertProblem(op, 8, rows, k, n, 8, BF16)).values():
            assert max(vars(way.need).values()) <= 4 << 30
