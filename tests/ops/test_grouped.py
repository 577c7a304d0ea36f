"""Reductions of rows of experts that are added up token by token (the product `grouped`), against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autofuse.lowering.cpu.reduce_executor import FEW_ROWS
from autofuse.lowering.cpu.token_sums import add_up
from autofuse.lowering.reference.layout import parts
from autofuse.lowering.reference.product import epilogue, parse, product_reference
from tests.ops.dense import DTYPES, ORDERS, poison, seeded, world_group
from tests.ranks import RankPool

EXPERTS, K, TOP = 3, 20, 2
TAKEN = "grouped %0; mul %1; take %2; sum 2; mul 0.5"
ADDED = "grouped %0; mul %1; index_add %3 %2"
EVERY = "grouped; mul %0; fold 3; add %1"
CASES = [
    (None, 1, 13, 5, TAKEN),
    (None, 1, 0, 5, ADDED),
    (None, 1, 40, 1100, ADDED),
    (None, 1, 7, 30, EVERY),
    (0, 1, FEW_ROWS * EXPERTS, 9, TAKEN),
    (0, 2, 4 * FEW_ROWS, 6, ADDED),
    (0, 1, FEW_ROWS, 8, EVERY),
    (0, 1, 5, 8, ADDED),
    (1, 1, 11, 20, TAKEN),
    (1, 3, 11, 4, EVERY),
]
"""Dim and outer of the scatter, tokens and columns (of a rank's part along dim), product."""


def _inputs(
    rank: int, t: int, n: int, product: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Experts of uneven numbers of rows, of which one has none; rows behind the last one belong to none."""
    generator = torch.Generator().manual_seed(rank)
    w = seeded(rank, EXPERTS, n, K, dtype=dtype).mT
    if product == EVERY:
        x = seeded(rank + 5, EXPERTS * t, K, dtype=dtype)
        return x, w, [seeded(2, EXPERTS * t, 1, dtype=dtype), seeded(3, t, n, dtype=dtype)]
    rows = t * TOP
    ends = torch.tensor([[rows // 4], [rows // 4], [rows - rows // 8]], dtype=torch.int32)
    order = torch.randperm(rows, generator=generator)
    where = order.argsort() if product == TAKEN else order // TOP
    operands = [ends, seeded(2, rows, 1, dtype=dtype), where[:, None], seeded(3, t, n, dtype=dtype)]
    return seeded(rank + 5, rows, K, dtype=dtype), w, operands


def _exact(rank: int, t: int, n: int, product: str, dtype: torch.dtype, magnitude: bool = False) -> Tensor:
    """In float64; `magnitude`: of the absolute values, in which errors are measured."""
    x, w, operands = _inputs(rank, t, n, product, dtype)
    given = [o.double() if o.is_floating_point() else o for o in (x, w, *operands)]
    x, w, *operands = (o.abs() for o in given) if magnitude else given
    return product_reference([x], [w], operands, product)


def _by_hand(rank: int, world: int) -> None:
    """The definition, row by row."""
    x, w, (ends, scales, tokens, base) = _inputs(0, 6, 4, ADDED, torch.float64)
    out = base.clone()
    for row in range(x.shape[0]):
        for expert in range(EXPERTS):
            if ([0, *ends.flatten().tolist()][expert]) <= row < int(ends[expert]):
                out[tokens[row]] += x[row] @ w[expert] * scales[row]
    torch.testing.assert_close(product_reference([x], [w], [ends, scales, tokens, base], ADDED), out)


def _check(rank: int, world: int, order: str, dtype: torch.dtype) -> None:
    for dim, outer, tokens, columns, product in CASES:
        t = tokens * outer * world if dim == 0 else tokens
        n = columns * outer * world if dim == 1 else columns
        x, w, operands = _inputs(rank, t, n, product, dtype)
        poison(world_group())
        place = () if dim is None else (dim, outer)
        op = torch.ops.autofuse.matmul_all_reduce if dim is None else torch.ops.autofuse.matmul_reduce_scatter
        out, rows = op(
            [x], [w], operands, product, "sum", *place, True, [], "", "", world_group(), order, "test"
        )
        kept, size = (
            product_reference([f(x.double())], [f(w.double())], operands, product.partition(";")[0])
            for f in (torch.clone, torch.abs)
        )
        assert rows.shape == kept.shape
        assert ((rows.double() - kept).abs() <= 4 * torch.finfo(dtype).eps * size).all(), (
            dim,
            outer,
            product,
        )
        wanted, bound = (
            torch.stack([_exact(r, t, n, product, dtype, magnitude) for r in range(world)]).sum(0)
            for magnitude in (False, True)
        )
        if dim is not None:
            wanted, bound = (parts(every, dim, outer, world)[rank] for every in (wanted, bound))
        error = (out.double() - wanted).abs() / bound / torch.finfo(dtype).eps
        assert out.shape == wanted.shape
        assert error.numel() == 0 or error.max() < 4, (dim, outer, product, error.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_against_float64(ranks: Callable[[int], RankPool], order: str, dtype: torch.dtype) -> None:
    ranks(3 if order == "direct" else 2).run(_check, order, dtype)


def test_by_hand() -> None:
    _by_hand(0, 1)


@pytest.mark.parametrize(
    "product", ["mm; take %0", "grouped; sum 0", "grouped; sum x", "grouped; index_add %0"]
)
def test_malformed(product: str) -> None:
    with pytest.raises(ValueError, match="malformed product"):
        parse(product)


FORMS = [
    ("grouped; mul %0; take %1; sum 2; to bfloat16", torch.bfloat16, torch.float32, torch.bfloat16, 4),
    ("grouped; mul %0; take %1; mul %2; sum 3; mul 0.5; add %3", *[torch.float32] * 3, 4),
    ("grouped; take %1; mul %2; sum 3", torch.float16, torch.float16, torch.float16, 3),
    ("grouped; mul %0; sum 2", torch.bfloat16, torch.bfloat16, torch.bfloat16, 2),
    ("grouped; mul %0; fold 4; relu", torch.float32, torch.float32, torch.float32, 2),
    ("grouped; sum 2; to float16", torch.float32, torch.float32, torch.float16, 2),
    ("grouped; mul %0; index_add %3 %4; mul 2", *[torch.float32] * 3, 2),
    ("grouped; mul %0; to bfloat16; index_add %3 %4", torch.bfloat16, torch.float32, torch.bfloat16, 3),
    ("grouped; index_add %3 %4", *[torch.float16] * 3, 1),
    ("grouped; mul %0; index_add %3 %4; to bfloat16", *[torch.float32] * 2, torch.bfloat16, 3),
    ("grouped; neg; sum 2", *[torch.float32] * 3, 0),
    ("grouped; mul %0; to int32; take %1; mul %2; sum 3", *[torch.float32] * 3, 0),
    ("grouped; sum 2; to float32; mul %3", torch.bfloat16, torch.float32, torch.float32, 0),
]
"""Product, dtypes of rows, factors and result, and how many of its stages are one loop."""


def test_rows_that_one_loop_adds() -> None:
    """As torch's ops, to the bit where two rows are added."""
    for product, of_rows, of_factors, of_out, count in FORMS:
        for columns in (1, 64, 150):
            stages = parse(product).stages
            (k,) = (int(s.number or 2) for s in stages if s.name in ("sum", "fold", "index_add"))
            taken = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:, None]
            factors = [seeded(seed, 24, 1, dtype=of_factors) for seed in (2, 3)]
            of_base = of_factors if product.endswith("; to bfloat16") else of_out
            rows, base = seeded(1, 24, columns, dtype=of_rows), seeded(4, 24 // k, columns, dtype=of_base)
            operands = [factors[0], taken, factors[1], base, taken // 2]
            whole = torch.full((24 // k, columns + 9), 7, dtype=of_out)
            out = whole[:, 2 : 2 + columns]
            done = add_up(out, rows, operands, stages)
            assert done == count, product
            if not done:
                continue
            first = "; ".join(product.split("; ")[: 1 + done])
            assert k != 2 or torch.equal(out, epilogue(rows, operands, first)), product
            given = [t.double() if t.is_floating_point() else t for t in (rows, *operands)]
            sized = [t.abs() for t in given]
            exactly = "; ".join(part for part in first.split("; ") if not part.startswith("to "))
            exact, size = (epilogue(t[0], t[1:], exactly) for t in (given, sized))
            least = torch.finfo(of_out).tiny
            assert ((out.double() - exact).abs() <= 3 * (size + least) * torch.finfo(of_out).eps).all(), (
                product
            )
            assert (whole[:, :2] == 7).all()
            assert (whole[:, 2 + columns :] == 7).all()


def test_a_row_that_is_none() -> None:
    rows, taken = torch.zeros(4, 8), torch.tensor([[0], [4]])
    with pytest.raises(IndexError, match="none of 4 rows"):
        add_up(torch.empty(1, 8), rows, [taken], parse("grouped; take %0; sum 2").stages)
    with pytest.raises(IndexError, match="none of 1 tokens"):
        add_up(torch.empty(1, 8), rows[:2], [rows[:1], taken], parse("grouped; index_add %0 %1").stages)
