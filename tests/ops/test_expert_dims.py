"""The expert ops on every dim that can be cut, and with splits but no offsets, against autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering import ops as _ops  # noqa: F401  (registers torch.ops.autofuse in the ranks)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
EXPERTS, ROWS, INNER, COLUMNS = 4, 12, 8, 16


def normals(rank: int, salt: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, generator=generator).requires_grad_()


def cut(t: Tensor, dim: int, outer: int, world: int, part: int) -> Tensor:
    """Part `part` of `t`, whose dim `dim` is `(outer, world, c)`."""
    return t.unflatten(dim, (outer, world, -1)).select(dim + 1, part).flatten(dim, dim + 1)


def compare(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def _combine(rank: int, world: int, dim: int, outer: int, keep: bool) -> None:
    x = [normals(r, 1, EXPERTS, ROWS, INNER) for r in range(world)]
    w = [normals(r, 2, EXPERTS, INNER, COLUMNS) for r in range(world)]
    y, *p = torch.ops.autofuse.expert_matmul_all_to_all(
        [x[rank]], [w[rank]], [], [], "mm", 0, None, None, [], [], dim, outer, keep,
        dist.group.WORLD.group_name, "direct", "test",
    )  # fmt: skip
    exact = [a.double() @ b.double() for a, b in zip(x, w, strict=True)]
    parts = [torch.stack([cut(e, dim, outer, world, d) for e in exact]) for d in range(world)]
    compare([y, *p], [parts[rank], *([exact[rank]] if keep else [])])
    dy = [normals(r, 3, *parts[0].shape).detach() for r in range(world)]
    loss = (y * dy[rank]).sum() + sum(t.sum() for t in p)
    total = sum((t * d).sum() for t, d in zip(parts, dy, strict=True)) + exact[rank].sum() * keep
    compare(gradients(loss, [x[rank], w[rank]]), gradients(total, [x[rank], w[rank]]))


def _dispatch(rank: int, world: int, dim: int, outer: int, keep: bool) -> None:
    whole = [EXPERTS, ROWS, INNER]
    shape = [s // world if i == dim else s for i, s in enumerate(whole)]
    x = [normals(r, 1, world, *shape) for r in range(world)]
    w = [normals(r, 2, EXPERTS, INNER, COLUMNS) for r in range(world)]
    y, *exchanged = torch.ops.autofuse.all_to_all_expert_matmul(
        x[rank], [w[rank]], [], "", 0, None, None, [], [], dim, outer, keep, dist.group.WORLD.group_name,
        "direct", "test",
    )  # fmt: skip

    def gather(dest: int) -> Tensor:
        parts = torch.stack([t[dest] for t in x]).double().unflatten(dim + 1, (outer, -1))
        return parts.movedim(0, dim + 1).flatten(dim, dim + 2)

    exact = [gather(d) for d in range(world)]
    products = [a @ b.double() for a, b in zip(exact, w, strict=True)]
    compare([y, *exchanged], [products[rank], *([exact[rank]] if keep else [])])
    dy = [normals(r, 3, *products[0].shape).detach() for r in range(world)]
    loss = (y * dy[rank]).sum() + sum(t.sum() for t in exchanged)
    total = sum((t * d).sum() for t, d in zip(products, dy, strict=True))
    total = total + sum(t.sum() for t in exact) * keep
    compare(gradients(loss, [x[rank], w[rank]]), gradients(total, [x[rank], w[rank]]))


@pytest.mark.parametrize("fn", [_combine, _dispatch])
@pytest.mark.parametrize(("dim", "outer"), [(0, 1), (0, 2), (1, 3), (2, 1), (2, 2)])
def test_every_dim(ranks: Ranks, fn: Callable[..., None], dim: int, outer: int) -> None:
    ranks(2).run(fn, dim, outer, outer == 1)


SENDS = ((6, 6), (6, 8))  # the splits of rank 0 are equal by chance


def _without_offsets(rank: int, world: int, count: int) -> None:
    """Every expert has equally many rows; splits of any size."""
    sends = [list(row) for row in SENDS]
    receives = [row[rank] for row in SENDS]
    x = normals(rank, 1, sum(sends[rank]), INNER)
    w = normals(rank, 2, count, INNER, COLUMNS)
    bias = normals(rank, 4, count, COLUMNS)
    group = dist.group.WORLD.group_name

    def exact(t: Tensor, r: int) -> Tensor:
        weight, b = (normals(r, salt, *s.shape) for salt, s in ((2, w), (4, bias)))
        rows = t.double().view(count, -1, INNER) @ weight.double() + b.double().unsqueeze(1)
        return rows.flatten(0, 1)

    def exchanged(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.split(sends[s])[rank] for s, t in enumerate(tensors)])

    inputs = [normals(r, 1, sum(sends[r]), INNER) for r in range(world)]
    (y,) = torch.ops.autofuse.expert_matmul_all_to_all(
        [x], [w], [bias], [], "mm", 0, None, None, receives, sends[rank], 1, 1, False, group, "direct", "test"
    )
    compare([y], [exchanged([exact(t, r) for r, t in enumerate(inputs)])])
    (z,) = torch.ops.autofuse.all_to_all_expert_matmul(
        x, [w], [bias], "", 0, None, None, receives, sends[rank], 1, 1, False, group, "direct", "test"
    )
    compare([z], [exact(exchanged(inputs), rank)])
    (y.sum() + z.sum()).backward()
    assert x.grad is not None
    assert w.grad is not None


@pytest.mark.parametrize("count", [1, 2])
def test_splits_without_offsets(ranks: Ranks, count: int) -> None:
    ranks(2).run(_without_offsets, count)
