"""matmul_reduce_scatter over real ranks, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autofuse.ops
from autofuse.lowering.reference.layout import parts
from tests.ops.dense import (
    DTYPES,
    EPILOGUES,
    ORDERS,
    assert_close,
    assert_gradients,
    factors,
    kept_by_all,
    poison,
    products,
    seeded,
    three_leaves,
    two_terms,
    world_group,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

# (dim, outer, rows or columns of a stretch, K, the other extent)
CASES = [
    (0, 1, 1, 8, 12),
    (0, 1, 3, 7, 5),
    (0, 1, 260, 9, 33),
    (0, 3, 2, 8, 7),
    (0, 2, 270, 8, 9),
    (1, 1, 5, 6, 1),
    (1, 1, 40, 16, 70),
    (1, 3, 4, 8, 17),
]


def _call(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    dim: int,
    outer: int,
    product: str = "mm",
    reduce_op: str = "sum",
    keep: bool = False,
    order: str = "direct",
) -> list[Tensor]:
    result: list[Tensor] = torch.ops.autofuse.matmul_reduce_scatter(
        x, w, operands, product, reduce_op, dim, outer, keep, [], "", "", world_group(), order, "test"
    )
    return result


def _shape(case: tuple[int, int, int, int, int], world: int) -> tuple[int, int, int]:
    dim, outer, inner, k, other = case
    cut = outer * world * inner
    return (cut, k, other) if dim == 0 else (other, k, cut)


def _plain(rank: int, world: int, dtype: torch.dtype, order: str) -> None:
    for i, case in enumerate(CASES):
        dim, outer = case[:2]
        m, k, n = _shape(case, world)
        inputs = factors(world, m, k, n, dtype, 100 * i)
        x, w = inputs[rank]
        w = w if i % 2 else w.contiguous()
        poison(world_group())
        (y,) = _call([x], [w], [], dim, outer, order=order)
        (again,) = _call([x], [w], [], dim, outer, order=order)
        assert torch.equal(y, again)
        exact, size = (parts(t.sum(0), dim, outer, world)[rank] for t in products(inputs))
        assert_close(y, exact, size, k + world, 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_plain(ranks: Ranks, world: int, dtype: torch.dtype, order: str) -> None:
    ranks(world).run(_plain, dtype, order)


def _large(rank: int, world: int, order: str) -> None:
    """Chunks of several tiles, whole stretches and parts of them."""
    for dim, outer, m, n in [(0, 1, 2048, 1100), (1, 1, 1100, 2048), (0, 4, 2048, 1100), (1, 8, 520, 2048)]:
        inputs = factors(world, m, 8, n)
        poison(world_group())
        (y,) = _call([inputs[rank][0]], [inputs[rank][1]], [], dim, outer, reduce_op="avg", order=order)
        exact, size = (parts(t.mean(0), dim, outer, world)[rank] for t in products(inputs))
        assert_close(y, exact, size, 8 + world, 2)


@pytest.mark.parametrize("order", ORDERS)
def test_several_tiles(ranks: Ranks, order: str) -> None:
    ranks(2).run(_large, order)


def _epilogues(rank: int, world: int, order: str) -> None:
    for case in [(0, 1, 2, 8, 12), (0, 2, 258, 8, 12), (1, 1, 6, 8, 5), (1, 2, 3, 8, 5)]:
        dim, outer = case[:2]
        m, k, n = _shape(case, world)
        for product, shapes in EPILOGUES:
            given = two_terms(rank, m, k, n, product, shapes)
            poison(world_group())
            y, p = _call(*given, dim, outer, product, "avg", True, order)
            kept = kept_by_all(p, given, product, world)
            exact = torch.stack([parts(each.double(), dim, outer, world)[rank] for each in kept])
            assert_close(y, exact.mean(0), exact.abs().mean(0), world, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_epilogues(ranks: Ranks, order: str) -> None:
    """The reduction is exact up to one rounding of the products that the ranks kept."""
    ranks(2).run(_epilogues, order)


def _gradients(rank: int, world: int, dim: int, reduce_op: str) -> None:
    xs = [seeded(r, 4, 2 * world, 8) for r in range(world)]
    ws = [seeded(r + 10, 8, 3 * world) for r in range(world)]
    exact = [[t.double().requires_grad_() for t in (x, w)] for x, w in zip(xs, ws, strict=True)]
    total = torch.stack([x @ w for x, w in exact]).sum(0) / (world if reduce_op == "avg" else 1)
    chunks = total.chunk(world, dim)
    cs = [seeded(r + 20, *chunks[r].shape) for r in range(world)]
    torch.stack([(chunk * c).sum() for chunk, c in zip(chunks, cs, strict=True)]).sum().backward()

    x, w = xs[rank].requires_grad_(), ws[rank].requires_grad_()
    y = autofuse.ops.matmul_reduce_scatter(x, w, dim=dim, reduce_op=reduce_op)
    torch.testing.assert_close(y.double(), chunks[rank], rtol=1e-5, atol=1e-5)
    (y * cs[rank]).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(x.grad.double(), exact[rank][0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), exact[rank][1].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients(ranks: Ranks, dim: int, reduce_op: str) -> None:
    ranks(2).run(_gradients, dim, reduce_op)


def _kept_product_gradient(rank: int, world: int) -> None:
    """Both outputs have a gradient, and the product has an epilogue."""
    (x, w, residual), exact, all_products = three_leaves(rank, world)
    chunks = torch.stack(all_products).sum(0).chunk(world, 0)
    (sum((c**2).sum() for c in chunks) + sum((p**3).sum() for p in all_products)).backward()  # type: ignore[union-attr]
    y, p = _call([x], [w], [residual], 0, 1, "mm; mul 0.5; sub %0", keep=True)
    ((y**2).sum() + (p**3).sum()).backward()
    assert_gradients((x, w, residual), exact[rank])


def test_gradient_of_a_kept_product(ranks: Ranks) -> None:
    ranks(2).run(_kept_product_gradient)


def _many(rank: int, world: int) -> None:
    for i in range(300):
        m, n, order, dim = world * (1 + i * 7 % 40), world * (1 + i * 11 % 60), ORDERS[i % 3], i % 2
        xs = [seeded(i + r, m, 4) for r in range(world)]
        ws = [seeded(i + r + 5, 4, n) for r in range(world)]
        (y,) = _call([xs[rank]], [ws[rank]], [], dim, 1, order=order)
        exact = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0)
        torch.testing.assert_close(y.double(), exact.chunk(world, dim)[rank], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_300_calls_of_changing_shapes(ranks: Ranks, world: int) -> None:
    ranks(world).run(_many)


def _opcheck(rank: int, world: int) -> None:
    for dim, outer, keep in [(0, 1, False), (0, 2, True), (1, 1, True)]:
        x, w = seeded(rank, 8, 4).requires_grad_(), seeded(rank + 5, 4, 8).requires_grad_()
        none: list[Tensor] = []
        args = ([x], [w], none, "mm", "sum", dim, outer, keep, [], "", "", world_group(), "direct", "opcheck")
        torch.library.opcheck(torch.ops.autofuse.matmul_reduce_scatter.default, args)


def test_opcheck(ranks: Ranks) -> None:
    ranks(2).run(_opcheck)


def _other_dtypes(rank: int, world: int) -> None:
    xs = [seeded(r, 4, 4, dtype=torch.float64) for r in range(world)]
    w = seeded(9, 4, 6, dtype=torch.float64)
    y = autofuse.ops.matmul_reduce_scatter(xs[rank], w, dim=1, reduce_op="avg")
    torch.testing.assert_close(y, (torch.stack(xs).mean(0) @ w).chunk(world, 1)[rank])


def test_dtypes_without_a_kernel(ranks: Ranks) -> None:
    ranks(2).run(_other_dtypes)


def _bad_input(rank: int, world: int) -> None:
    op = autofuse.ops.matmul_reduce_scatter
    with pytest.raises(ValueError, match=r"cannot be cut into 2 equal parts.*pad them to a multiple of 2"):
        op(torch.ones(3, 4), torch.ones(4, 4))
    with pytest.raises(ValueError, match="dim 5 is out of range for 2 dims"):
        op(torch.ones(4, 4), torch.ones(4, 4), dim=5)
    with pytest.raises(ValueError, match="cannot be cut into 2 equal parts"):
        _call([torch.ones(3, 4)], [torch.ones(4, 4)], [], 0, 1)


def test_bad_input_raises_before_any_communication(ranks: Ranks) -> None:
    ranks(2).run(_bad_input)
