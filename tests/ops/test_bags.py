"""Reductions of pooled rows of tables that ranks share (the product `bags`), against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import recipe_of
from autofuse.lowering.reference.layout import parts
from autofuse.lowering.reference.product import parse, product_reference
from tests.ops.dense import DTYPES, ORDERS, poison, seeded, world_group
from tests.ranks import RankPool
from tests.subsets import in_tiers

ROWS = 40
CASES = [
    (None, 1, 13, (5,), "bags sum 0 -1"),
    (None, 1, 1, (3, 4), "bags mean 1 -1; mul 0.5"),
    (None, 1, 700, (400, 500), "bags sum 0 3 weighted"),
    (0, 1, 300, (5, 16, 130), "bags sum 1 3 weighted; mul %6"),
    (0, 1, 600, (300, 100), "bags max 0 -1"),
    (0, 3, 4, (7,), "bags mean 0 3; add %1"),
    (1, 1, 9, (8, 4), "bags sum 1 -1"),
]
"""Dim and outer of the scatter, bags (of a rank's part along dim 0), widths of tables, product."""


def _inputs(
    rank: int, bags: int, widths: tuple[int, ...], product: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Bags of up to 3 entries, some of none; rank 0 has no entry of the first table."""
    pooling = parse(product).pooling
    assert pooling is not None
    generator = torch.Generator().manual_seed(rank)
    x, offsets = [], []
    for t in range(len(widths)):
        lengths = torch.randint(0, 4, (bags,), generator=generator) * int(bool(rank or t))
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        x.append(torch.randint(0, ROWS, (int(ends[-1]),), generator=generator))
        offsets.append(ends if pooling.last else ends[:-1])
    weights = [seeded(t, len(i), dtype=dtype) for t, i in enumerate(x)] if pooling.weighted else []
    w = [seeded(rank + t, ROWS, width, dtype=dtype) for t, width in enumerate(widths)]
    more = [seeded(9, bags, 1, dtype=dtype)] if "%" in product else []
    return x, w, [*offsets, *weights, *more]


def _exact(rank: int, *given: object, magnitude: bool = False) -> Tensor:
    """In float64, bag by bag; `magnitude`: of the absolute values, in which errors are measured."""
    x, w, operands = _inputs(rank, *given)  # type: ignore[arg-type]
    product = str(given[2])
    pooling, tables, columns = parse(product).pooling, len(x), []
    assert pooling is not None
    for t, (table, indices) in enumerate(zip(w, x, strict=True)):
        ends = [*operands[t].tolist(), len(indices)]
        table = table.double().abs() if magnitude else table.double()
        scales = operands[tables + t].double() if pooling.weighted else torch.ones(len(indices)).double()
        scales = scales.abs() if magnitude else scales
        rows = []
        for b in range(operands[0].shape[0] - pooling.last):
            used = [i for i in range(ends[b], ends[b + 1]) if int(indices[i]) != pooling.padding]
            terms = torch.stack([table[indices[i]] * scales[i] for i in used]) if used else table[:0]
            pooled = terms.amax(0) if used and pooling.mode == 2 else terms.sum(0)
            rows.append(pooled / len(used) if used and pooling.mode == 1 else pooled)
        columns.append(torch.stack(rows))
    total = torch.cat(columns, 1)
    more = operands[-1].double().abs() if magnitude else operands[-1].double()
    for stage in parse(product).stages:
        other = stage.number if stage.operand is None else more
        total = total * other if stage.name == "mul" else total + other
    return total


def _check(rank: int, world: int, order: str, dtype: torch.dtype) -> None:
    for dim, outer, bags, widths, product in CASES:
        count = bags * outer * world if dim == 0 else bags
        given = (count, widths, product, dtype)
        x, w, operands = _inputs(rank, *given)
        poison(world_group())
        place = () if dim is None else (dim, outer)
        op = torch.ops.autofuse.matmul_all_reduce if dim is None else torch.ops.autofuse.matmul_reduce_scatter
        out, kept = op(x, w, operands, product, "sum", *place, True, [], "", "", world_group(), order, "test")
        exact = sum(_exact(r, *given) for r in range(world))
        bound = sum(_exact(r, *given, magnitude=True) for r in range(world))
        assert isinstance(exact, Tensor)
        assert isinstance(bound, Tensor)
        if dim is not None:
            exact, bound = (parts(t, dim, outer, world)[rank] for t in (exact, bound))
        ulp, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        assert ((out.double() - exact).abs() <= (bound + least) * ulp * (4 + 2 * world)).all(), (
            dim,
            outer,
            widths,
            product,
        )
        mine, most = _exact(rank, *given), _exact(rank, *given, magnitude=True)
        assert ((kept.double() - mine).abs() <= (most + least) * ulp * 6).all(), product
        wanted = product_reference(x, w, operands, product)
        assert ((wanted.double() - mine).abs() <= (most + least) * ulp * 6).all(), product


@in_tiers(order=ORDERS, dtype=DTYPES)
def test_against_float64(order: str, dtype: torch.dtype, ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(_check, order, dtype)


def _of_any_number(rank: int, world: int) -> int:
    """Recipes made for calls that differ in the number of entries alone."""
    recipe_of.cache_clear()
    for seed in range(3):
        x, w, operands = _inputs(3 * rank + seed, 8, (4, 6), "bags sum 0 -1 weighted", torch.float32)
        torch.ops.autofuse.matmul_all_reduce(
            x, w, operands, "bags sum 0 -1 weighted", "sum", False, [], "", "", world_group(), "direct", "any"
        )
    return recipe_of.cache_info().misses


def test_calls_that_look_up_other_numbers_of_rows_share_a_recipe(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_of_any_number) == [1, 1]


@pytest.mark.parametrize("product", ["bags", "bags most 0 -1", "bags sum 2 -1", "bags sum 0 -1 weighed"])
def test_products_that_are_none(product: str) -> None:
    with pytest.raises(ValueError, match="malformed product"):
        parse(product)
