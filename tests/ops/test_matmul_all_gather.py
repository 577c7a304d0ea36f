"""matmul_all_gather over real ranks, against float64 and bit by bit against the gathered products."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autofuse.ops
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.reference.layout import parts, whole
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
    same_on_all_ranks,
    seeded,
    three_leaves,
    two_terms,
    world_group,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

# (dim, outer, M, K, N) of one rank
CASES = [
    (0, 1, 1, 8, 12),
    (0, 1, 3, 7, 5),
    (0, 3, 6, 8, 7),
    (0, 2, 540, 8, 9),
    (1, 1, 1, 16, 33),
    (1, 1, 5, 6, 1),
    (1, 3, 7, 8, 12),
    (1, 1, 0, 4, 3),
    (0, 1, 2, 4, 0),
    (1, 1, 3, 0, 5),
]


def _call(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    dim: int,
    outer: int,
    product: str = "mm",
    keep: bool = False,
    order: str = "direct",
) -> list[Tensor]:
    result: list[Tensor] = torch.ops.autofuse.matmul_all_gather(
        x, w, operands, product, dim, outer, keep, False, world_group(), order, "test"
    )
    return result


def _exact(inputs: list[tuple[Tensor, Tensor]], dim: int, outer: int) -> tuple[Tensor, Tensor]:
    """The result in float64, and that of the absolute values."""
    exact, size = products(inputs)
    return whole(exact, dim, outer), whole(size, dim, outer)


def _plain(rank: int, world: int, dtype: torch.dtype, order: str) -> None:
    for i, (dim, outer, m, k, n) in enumerate(CASES):
        inputs = factors(world, m, k, n, dtype, 100 * i)
        x, w = inputs[rank]
        w = w if i % 2 else w.contiguous()
        poison(world_group())
        (y,) = _call([x], [w], [], dim, outer, order=order)
        (again,) = _call([x], [w], [], dim, outer, order=order)
        assert torch.equal(y, again)
        assert_close(y, *_exact(inputs, dim, outer), k, 1)
        same_on_all_ranks(y)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_plain(ranks: Ranks, world: int, dtype: torch.dtype, order: str) -> None:
    ranks(world).run(_plain, dtype, order)


def _large(rank: int, world: int, order: str) -> None:
    """Chunks of several tiles of columns and of rows, whole stretches and parts of them."""
    for dim, outer, m, n in [
        (0, 1, 130, 8200),
        (1, 1, 130, 8200),
        (0, 8, 4096, 260),
        (0, 1, 4100, 260),
        (1, 4, 300, 4096),
        (1, 2, 4096, 260),
    ]:
        inputs = factors(world, m, 8, n)
        poison(world_group())
        (y,) = _call([inputs[rank][0]], [inputs[rank][1]], [], dim, outer, order=order)
        assert_close(y, *_exact(inputs, dim, outer), 8, 1)
        same_on_all_ranks(y)


@pytest.mark.parametrize("order", ORDERS)
def test_several_tiles(ranks: Ranks, order: str) -> None:
    ranks(2).run(_large, order)


def _epilogues(rank: int, world: int, order: str) -> None:
    for dim, outer, m, k, n in [
        (0, 1, 4, 8, 12),
        (0, 2, 516, 8, 1100),
        (1, 1, 6, 8, 5),
        (1, 2, 300, 8, 4096),
    ]:
        for product, shapes in [("addmm %0", [(-1,)]), *EPILOGUES]:
            given = two_terms(rank, m, k, n, product, shapes)
            poison(world_group())
            y, p = _call(*given, dim, outer, product, True, order)
            assert torch.equal(y, whole(kept_by_all(p, given, product, world), dim, outer))


@pytest.mark.parametrize("order", ORDERS)
def test_epilogues(ranks: Ranks, order: str) -> None:
    """The result has the bits of the products that the ranks kept."""
    ranks(2).run(_epilogues, order)


def _unfused(rank: int, world: int) -> None:
    """The bits of the unfused program, where sums are exact: integers."""
    for i, (dim, outer, m, k, n) in enumerate(CASES):
        for dtype in DTYPES:
            x = (seeded(10 * i + rank, m, k) * 2).round().to(dtype)
            w = (seeded(10 * i + rank + 5, k, n) * 2).round().to(dtype)
            args = ([x], [w], [], "mm", dim, outer, False, False, world_group())
            op = FUSED_OPS["matmul_all_gather"]
            expected = op.reference(op.parse((*args, "direct", "test")))[0]
            for order in ORDERS:
                assert torch.equal(_call([x], [w], [], dim, outer, order=order)[0], expected)


def test_bits_of_the_unfused_program(ranks: Ranks) -> None:
    ranks(3).run(_unfused)


def _gradients(rank: int, world: int, dim: int, replicated: bool) -> None:
    xs = [seeded(r, 4, 2, 8) for r in range(world)]
    ws = [seeded(r + 10, 8, 3) for r in range(world)]
    bs = [seeded(r + 15, 3) for r in range(world)]
    exact = [[t.double().requires_grad_() for t in given] for given in zip(xs, ws, bs, strict=True)]
    total = torch.cat([x @ w + b for x, w, b in exact], dim)
    # Every rank has a loss of its own; where the gradient is replicated all have the same one.
    cs = [seeded(20 if replicated else r + 20, *total.shape) for r in range(world)]
    losses = cs[:1] if replicated else cs
    torch.stack([(total * c).sum() for c in losses]).sum().backward()

    leaves = [t[rank].requires_grad_() for t in (xs, ws, bs)]
    y = autofuse.ops.matmul_all_gather(*leaves, dim=dim, replicated=replicated)
    torch.testing.assert_close(y.double(), total.detach(), rtol=1e-5, atol=1e-5)
    (y * cs[rank]).sum().backward()
    for mine, expected in zip(leaves, exact[rank], strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients(ranks: Ranks, dim: int, replicated: bool) -> None:
    ranks(2).run(_gradients, dim, replicated)


def _kept_product_gradient(rank: int, world: int) -> None:
    """Both outputs have a gradient, and the product has an epilogue."""
    (x, w, residual), exact, all_products = three_leaves(rank, world)
    total = torch.cat(all_products, 1)
    (world * (total**2).sum() + sum((p**3).sum() for p in all_products)).backward()
    y, p = _call([x], [w], [residual], 1, 1, "mm; mul 0.5; sub %0", keep=True)
    ((y**2).sum() + (p**3).sum()).backward()
    assert_gradients((x, w, residual), exact[rank])


def test_gradient_of_a_kept_product(ranks: Ranks) -> None:
    ranks(2).run(_kept_product_gradient)


def _many(rank: int, world: int) -> None:
    for i in range(300):
        m, n, order, dim = 1 + i * 7 % 80, 1 + i * 11 % 120, ORDERS[i % 3], i % 2
        xs = [seeded(i + r, m, 4) for r in range(world)]
        ws = [seeded(i + r + 5, 4, n) for r in range(world)]
        (y,) = _call([xs[rank]], [ws[rank]], [], dim, 1, order=order)
        exact = torch.cat([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)], dim)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_300_calls_of_changing_shapes(ranks: Ranks, world: int) -> None:
    ranks(world).run(_many)


def _opcheck(rank: int, world: int) -> None:
    for dim, outer, keep, replicated in [(0, 1, False, False), (0, 2, True, True), (1, 1, True, False)]:
        x, w = seeded(rank, 8, 4).requires_grad_(), seeded(rank + 5, 4, 8).requires_grad_()
        none: list[Tensor] = []
        args = ([x], [w], none, "mm", dim, outer, keep, replicated, world_group(), "direct", "opcheck")
        torch.library.opcheck(torch.ops.autofuse.matmul_all_gather.default, args)


def test_opcheck(ranks: Ranks) -> None:
    ranks(2).run(_opcheck)


def _other_dtypes(rank: int, world: int) -> None:
    x = seeded(0, 4, 4, dtype=torch.float64)
    ws = [seeded(r, 4, 6, dtype=torch.float64) for r in range(world)]
    y = autofuse.ops.matmul_all_gather(x, ws[rank], group=dist.group.WORLD)
    torch.testing.assert_close(y, torch.cat([x @ w for w in ws], -1))


def test_dtypes_without_a_kernel(ranks: Ranks) -> None:
    ranks(2).run(_other_dtypes)


def _parts_are_products(rank: int, world: int) -> None:
    """`outer` is where the layout module has it: the part of this rank is its product."""
    x, w = seeded(rank, 6, 4), seeded(rank + 5, 4, 8)
    for dim, outer in [(0, 1), (0, 3), (1, 1), (1, 4)]:
        y, p = _call([x], [w], [], dim, outer, keep=True)
        assert torch.equal(parts(y, dim, outer, world)[rank], p)


def test_parts_are_products(ranks: Ranks) -> None:
    ranks(3).run(_parts_are_products)


def _bad_input(rank: int, world: int) -> None:
    op = autofuse.ops.matmul_all_gather
    with pytest.raises(ValueError, match="dim 5 is out of range for 2 dims"):
        op(torch.ones(4, 4), torch.ones(4, 4), dim=5)
    with pytest.raises(ValueError, match="cannot multiply"):
        op(torch.ones(4, 3), torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"not a multiple of outer=2"):
        _call([torch.ones(3, 4)], [torch.ones(4, 4)], [], 0, 2)


def test_bad_input_raises_before_any_communication(ranks: Ranks) -> None:
    ranks(2).run(_bad_input)
