"""Reductions of rows that each rank reads from its own table (the product `rows`), against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autofuse.lowering.reference.layout import parts
from tests.ops.dense import DTYPES, ORDERS, poison, seeded, world_group
from tests.ranks import RankPool

TABLE, PRODUCT = 7, "rows; masked_fill %0 0.0; mul 0.5"
CASES = [(None, 1, 13, 5), (None, 1, 600, 24), (0, 1, 6, 9), (0, 3, 40, 8), (1, 1, 5, 40)]
"""Dim and outer of the scatter, rows or columns of a stretch, the other extent; for an all_reduce [M, N]."""


def _inputs(rank: int, m: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    table = seeded(rank, TABLE, n, dtype=dtype)
    generator = torch.Generator().manual_seed(100 + rank)
    places = torch.randint(0, TABLE, (m, 1), generator=generator)
    return places, table, torch.rand(m, 1, generator=generator) < 0.3


def _exact(rank: int, m: int, n: int, dtype: torch.dtype) -> Tensor:
    places, table, mask = _inputs(rank, m, n, dtype)
    return table.double()[places[:, 0]].masked_fill(mask, 0) * 0.5


def _check(rank: int, world: int, order: str, dtype: torch.dtype) -> None:
    for dim, outer, length, other in CASES:
        cut = length if dim is None else length * outer * world
        m, n = (other, cut) if dim == 1 else (cut, other)
        places, table, mask = _inputs(rank, m, n, dtype)
        poison(world_group())
        place = () if dim is None else (dim, outer)
        op = torch.ops.autofuse.matmul_all_reduce if dim is None else torch.ops.autofuse.matmul_reduce_scatter
        out, kept = op(
            [places], [table], [mask], PRODUCT, "sum", *place, True, [], "", "", world_group(), order, "test"
        )
        every = torch.stack([_exact(r, m, n, dtype) for r in range(world)])
        wanted = every.sum(0)
        if dim is not None:
            wanted = parts(wanted, dim, outer, world)[rank]
        assert torch.equal(kept.double(), every[rank]), (dim, outer)
        torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_against_float64(ranks: Callable[[int], RankPool], order: str, dtype: torch.dtype) -> None:
    ranks(2).run(_check, order, dtype)


def _gradients(rank: int, world: int) -> None:
    m, n = 6 * world, 5
    places, table, mask = _inputs(rank, m, n, torch.float32)
    leaf = table.requires_grad_()
    (out,) = torch.ops.autofuse.matmul_reduce_scatter(
        [places], [leaf], [mask], PRODUCT, "sum", 0, 1, False, [], "", "", world_group(), "direct", "test"
    )
    (out * (1 + rank)).sum().backward()
    of_rows = (1.0 + torch.arange(world)).repeat_interleave(6)[:, None].expand(m, n).masked_fill(mask, 0) / 2
    wanted = torch.zeros(TABLE, n).index_add(0, places[:, 0], of_rows)
    torch.testing.assert_close(leaf.grad, wanted)


def test_gradients(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(_gradients)
