"""all_gather_matmul over real ranks, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autofuse.ops
from autofuse.lowering.reference.layout import whole
from tests.ops.dense import DTYPES, ORDERS, assert_close, poison, same_on_all_ranks, seeded, world_group
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

# (dim, outer, rows of a part, columns of a part)
CASES = [
    (0, 1, 1, 8),
    (0, 1, 3, 7),
    (0, 1, 260, 9),
    (0, 3, 6, 8),
    (0, 2, 520, 8),
    (0, 1, 260, 0),
    (1, 1, 1, 5),
    (1, 1, 9, 16),
    (1, 2, 5, 6),
]


def _call(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    dim: int,
    outer: int,
    keep: bool = False,
    order: str = "direct",
) -> list[Tensor]:
    result: list[Tensor] = torch.ops.autofuse.all_gather_matmul(
        x, w, bias, dim, outer, keep, world_group(), order, "test"
    )
    return result


def _plain(rank: int, world: int, dtype: torch.dtype, order: str) -> None:
    for i, (dim, outer, rows, cols) in enumerate(CASES):
        xs = [seeded(100 * i + r, rows, cols, dtype=dtype) for r in range(world)]
        gathered = whole(torch.stack(xs), dim, outer)
        k = gathered.shape[1]
        # Two consumers, of widths that differ from rank to rank, one with a bias, one transposed.
        w = [seeded(rank, k, 4 + rank, dtype=dtype), seeded(rank + 5, 3, k, dtype=dtype).t()]
        bias = [seeded(rank + 9, 4 + rank, dtype=dtype), torch.empty(0, dtype=dtype)]
        poison(world_group())
        *ys, kept = _call(xs[rank], w, bias, dim, outer, True, order)
        again = _call(xs[rank], w, bias, dim, outer, False, order)
        assert torch.equal(kept, gathered)
        assert all(torch.equal(a, b) for a, b in zip(ys, again, strict=True))
        same_on_all_ranks(kept)
        for y, wi, b in zip(ys, w, (bias[0], torch.zeros(3)), strict=True):
            exact = gathered.double() @ wi.double() + b.double()
            size = gathered.double().abs() @ wi.double().abs() + b.double().abs()
            assert_close(y, exact, size, k + 1, 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_plain(ranks: Ranks, world: int, dtype: torch.dtype, order: str) -> None:
    ranks(world).run(_plain, dtype, order)


def _large(rank: int, world: int, order: str) -> None:
    """Parts of several tiles, with rows in one stretch and in many; a bias for every element."""
    for dim, outer, rows, cols in [
        (0, 1, 1100, 600),
        (0, 4, 1040, 600),
        (1, 1, 520, 1100),
        (1, 4, 520, 1100),
    ]:
        xs = [seeded(r, rows, cols) for r in range(world)]
        gathered = whole(torch.stack(xs), dim, outer)
        w = seeded(7, gathered.shape[1], 8)
        poison(world_group())
        b = seeded(8, gathered.shape[0], 8)
        y, biased, kept = _call(xs[rank], [w, w], [torch.empty(0), b], dim, outer, True, order)
        assert torch.equal(kept, gathered)
        size, exact = gathered.double().abs() @ w.double().abs(), gathered.double() @ w.double()
        assert_close(y, exact, size, gathered.shape[1], 1)
        assert_close(biased, exact + b.double(), size + b.double().abs(), gathered.shape[1] + 1, 2)


@pytest.mark.parametrize("order", ORDERS)
def test_several_tiles(ranks: Ranks, order: str) -> None:
    ranks(2).run(_large, order)


def _gradients(rank: int, world: int, dim: int, return_gathered: bool) -> None:
    xs = [seeded(r, 4, 6, 8) for r in range(world)]
    k = 8 * world if dim == 2 else 8
    weights = [[seeded(10 * r + i, k, 3 + i) for i in range(2)] for r in range(world)]
    biases = [seeded(r + 30, 3) for r in range(world)]
    exact_x = [x.double().requires_grad_() for x in xs]
    exact_w = [[w.double().requires_grad_() for w in row] for row in weights]
    exact_b = [b.double().requires_grad_() for b in biases]
    gathered = torch.cat(exact_x, dim)
    loss = gathered.new_zeros(())
    for (w0, w1), b in zip(exact_w, exact_b, strict=True):
        loss = loss + ((gathered @ w0 + b) ** 2).sum() + (gathered @ w1).sum()
        if return_gathered:
            loss = loss + (gathered**3).sum()
    loss.backward()

    x, bias = xs[rank].requires_grad_(), biases[rank].requires_grad_()
    w = [each.requires_grad_() for each in weights[rank]]
    result = autofuse.ops.all_gather_matmul(
        x, w, [bias, None], dim=dim, group=None, return_gathered=return_gathered
    )
    (y0, y1), kept = result if return_gathered else (result, None)
    mine = (y0**2).sum() + y1.sum()
    if return_gathered:
        torch.testing.assert_close(kept.double(), gathered)
        mine = mine + (kept**3).sum()
    mine.backward()
    for ours, theirs in [(x, exact_x[rank]), (bias, exact_b[rank]), *zip(w, exact_w[rank], strict=True)]:
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("return_gathered", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients(ranks: Ranks, dim: int, return_gathered: bool) -> None:
    ranks(2).run(_gradients, dim, return_gathered)


def _only_some_gradients(rank: int, world: int) -> None:
    """Not kept, one consumer unused, weights frozen; and the gathered matrix alone."""
    x, w = seeded(rank, 4, 3).requires_grad_(), seeded(9, 3, 5)
    first, _ = _call(x, [w, w], [], 0, 1)
    first.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, world * torch.ones(4, 5) @ w.t())
    x.grad = None
    _call(x, [w], [], 0, 1, keep=True)[-1].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, world * torch.ones(4, 3))


def test_gradients_of_some(ranks: Ranks) -> None:
    ranks(2).run(_only_some_gradients)


def _many(rank: int, world: int) -> None:
    for i in range(300):
        rows, cols, order, dim = 1 + i * 7 % 90, 1 + i * 11 % 30, ORDERS[i % 3], i % 2
        xs = [seeded(i + r, rows, cols) for r in range(world)]
        gathered = torch.cat(xs, dim)
        w = seeded(i, gathered.shape[1], 5)
        (y,) = _call(xs[rank], [w], [], dim, 1, order=order)
        torch.testing.assert_close(y.double(), gathered.double() @ w.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_300_calls_of_changing_shapes(ranks: Ranks, world: int) -> None:
    ranks(world).run(_many)


def _opcheck(rank: int, world: int) -> None:
    for dim, outer, keep in [(0, 1, False), (0, 2, True), (1, 1, True)]:
        x = seeded(rank, 4, 4).requires_grad_()
        w = seeded(5, 4 * (world if dim else 1), 8).requires_grad_()
        args = (x, [w], [seeded(6, 8).requires_grad_()], dim, outer, keep, world_group(), "direct", "opcheck")
        torch.library.opcheck(torch.ops.autofuse.all_gather_matmul.default, args)


def test_opcheck(ranks: Ranks) -> None:
    ranks(2).run(_opcheck)


def _other_dtypes(rank: int, world: int) -> None:
    xs = [seeded(r, 4, 3, dtype=torch.float64) for r in range(world)]
    w = seeded(9, 6, 5, dtype=torch.float64)
    y = autofuse.ops.all_gather_matmul(xs[rank], w, dim=-1)
    torch.testing.assert_close(y, torch.cat(xs, 1) @ w)


def test_dtypes_without_a_kernel(ranks: Ranks) -> None:
    ranks(2).run(_other_dtypes)


def _bad_input(rank: int, world: int) -> None:
    op = autofuse.ops.all_gather_matmul
    with pytest.raises(ValueError, match="cannot multiply"):
        op(torch.ones(3, 4), torch.ones(5, 4))
    with pytest.raises(ValueError, match="cannot multiply"):
        op(torch.ones(3, 4), torch.ones(4, 4), dim=1)
    with pytest.raises(ValueError, match="got 1 weights and 2 biases"):
        op(torch.ones(3, 4), torch.ones(4, 4), [None, None])
    with pytest.raises(ValueError, match="dim 2 is out of range"):
        op(torch.ones(3, 4), torch.ones(4, 4), dim=2)


def test_bad_input_raises_before_any_communication(ranks: Ranks) -> None:
    ranks(2).run(_bad_input)
