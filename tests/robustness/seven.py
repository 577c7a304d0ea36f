"""One call of each eager op, of any size, with its exact result.

All numbers are small integers, so that every sum is exact in float32 whatever its order, and a fused result
must equal the float64 one bit by bit. Every rank can make the inputs of all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from autofuse import ops

Maker = Callable[[int, int, int, str], "Case"]


@dataclass(frozen=True)
class Case:
    """`run(factor)` calls the op with inputs times `factor`: for a small integer that is `exact * factor`."""

    run: Callable[[float], Tensor]
    exact: Tensor
    replicated: bool = False
    """Whether all ranks must get the same bits."""


def integers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def matmul_all_reduce(rank: int, world: int, size: int, group: str) -> Case:
    m, k, n = size, size + 2, 2 * size + 1
    x = [integers(10 * r + 1, m, k) for r in range(world)]
    w = [integers(10 * r + 2, k, n) for r in range(world)]
    exact = sum(a.double() @ b.double() for a, b in zip(x, w, strict=True))
    assert isinstance(exact, Tensor)
    return Case(lambda f: ops.matmul_all_reduce(x[rank] * f, w[rank], group=group), exact, replicated=True)


def matmul_reduce_scatter(rank: int, world: int, size: int, group: str) -> Case:
    dim = size % 2
    m, k, n = (size * world, size + 1, size + 2) if dim == 0 else (size + 1, size, size * world)
    x = [integers(10 * r + 3, m, k) for r in range(world)]
    w = [integers(10 * r + 4, k, n) for r in range(world)]
    exact = sum(a.double() @ b.double() for a, b in zip(x, w, strict=True))
    assert isinstance(exact, Tensor)
    part = exact.chunk(world, dim)[rank]
    return Case(lambda f: ops.matmul_reduce_scatter(x[rank] * f, w[rank], dim=dim, group=group), part)


def all_gather_matmul(rank: int, world: int, size: int, group: str) -> Case:
    x = [integers(10 * r + 5, size, size + 1) for r in range(world)]
    w = integers(6, size + 1, size + 3)
    return Case(
        lambda f: ops.all_gather_matmul(x[rank] * f, w, group=group),  # type: ignore[arg-type,return-value]
        torch.cat(x).double() @ w.double(),
        replicated=True,
    )


def matmul_all_gather(rank: int, world: int, size: int, group: str) -> Case:
    dim = size % 2
    x = [integers(10 * r + 11, size, size + 1) for r in range(world)]
    w = [integers(10 * r + 12, size + 1, size + 2) for r in range(world)]
    exact = torch.cat([a.double() @ b.double() for a, b in zip(x, w, strict=True)], dim)
    return Case(
        lambda f: ops.matmul_all_gather(x[rank] * f, w[rank], dim=dim, group=group), exact, replicated=True
    )


def embedding_bag_all_to_all(rank: int, world: int, size: int, group: str) -> Case:
    tables, indices = _tables(world, size)
    pooled = [
        torch.cat([F.embedding_bag(i, t.double(), mode="sum") for t, i in zip(*pair, strict=True)], 1)
        for pair in zip(tables, indices, strict=True)
    ]
    exact = torch.cat([p[rank * size : (rank + 1) * size] for p in pooled], 1)
    columns = [p.shape[1] for p in pooled]
    return Case(
        lambda f: ops.embedding_bag_all_to_all(
            [t * f for t in tables[rank]], indices[rank], columns=columns, group=group
        ),
        exact,
    )


def all_to_all_embedding_bag_backward(rank: int, world: int, size: int, group: str) -> Case:
    tables, indices = _tables(world, size)
    columns = [sum(t.shape[1] for t in mine) for mine in tables]
    grads = [integers(10 * r + 7, size, sum(columns)) for r in range(world)]
    mine = torch.cat([g.split(columns, 1)[rank] for g in grads]).double()
    dims = [t.shape[1] for t in tables[rank]]
    exact = []
    for table, index, grad in zip(tables[rank], indices[rank], mine.split(dims, 1), strict=True):
        rows = grad.repeat_interleave(index.shape[1], 0)
        exact.append(torch.zeros_like(table, dtype=torch.float64).index_add(0, index.flatten(), rows))

    def run(f: float) -> Tensor:
        found = ops.all_to_all_embedding_bag_backward(
            grads[rank] * f,
            indices[rank],
            num_embeddings=[len(t) for t in tables[rank]],
            dims=dims,
            columns=columns,
            group=group,
        )
        assert isinstance(found, list)
        return torch.cat(found, 1)

    return Case(run, torch.cat(exact, 1))


def expert_matmul_all_to_all(rank: int, world: int, size: int, group: str) -> Case:
    """Combine, dropless: rank a sends `(a + b + size) % 3` rows to rank b."""
    x, w, ends = _experts(world, size, sent=True)
    products = [_grouped(*rank_of) for rank_of in zip(x, w, ends, strict=True)]
    exact = torch.cat([p.split(_sends(world, size, s))[rank] for s, p in enumerate(products)])
    sends, receives = _sends(world, size, rank), [_sends(world, size, s)[rank] for s in range(world)]
    return Case(
        lambda f: ops.expert_matmul_all_to_all(
            x[rank] * f, w[rank], offsets=ends[rank], output_splits=receives, input_splits=sends, group=group
        ),
        exact,
    )


def all_to_all_expert_matmul(rank: int, world: int, size: int, group: str) -> Case:
    """Dispatch, dropless, with the rows in reverse."""
    x = [integers(10 * r + 8, sum(_sends(world, size, r)), size) for r in range(world)]
    _, w, ends = _experts(world, size, sent=False)
    sends, receives = _sends(world, size, rank), [_sends(world, size, s)[rank] for s in range(world)]
    arrived = torch.cat([t.split(_sends(world, size, s))[rank] for s, t in enumerate(x)]).flip(0)
    positions = torch.arange(len(arrived)).flip(0)
    return Case(
        lambda f: ops.all_to_all_expert_matmul(  # type: ignore[arg-type,return-value]
            x[rank] * f,
            w[rank],
            offsets=ends[rank],
            positions=positions,
            output_splits=receives,
            input_splits=sends,
            group=group,
        ),
        _grouped(arrived, w[rank], ends[rank]),
    )


MAKERS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        matmul_all_reduce,
        matmul_reduce_scatter,
        all_gather_matmul,
        matmul_all_gather,
        embedding_bag_all_to_all,
        all_to_all_embedding_bag_backward,
        expert_matmul_all_to_all,
        all_to_all_expert_matmul,
    )
}


def _tables(world: int, size: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Tables and indices `[B, 3]` of every rank; rank r has 1 + r % 2 tables."""
    tables, indices = [], []
    for r in range(world):
        generator = torch.Generator().manual_seed(r)
        tables.append([integers(10 * r + t, 20, size + t) for t in range(1 + r % 2)])
        indices.append([torch.randint(0, 20, (size * world, 3), generator=generator) for _ in tables[-1]])
    return tables, indices


def _sends(world: int, size: int, rank: int) -> list[int]:
    return [(rank + dest + size) % 3 for dest in range(world)]


def _experts(world: int, size: int, sent: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Rows, two experts and the ends of their rows, of every rank; `sent`: the rows that it sends."""
    rows = [
        sum(_sends(world, size, r) if sent else [_sends(world, size, s)[r] for s in range(world)])
        for r in range(world)
    ]
    x = [integers(10 * r + 9, n, size) for r, n in enumerate(rows)]
    w = [integers(10 * r + 4, 2, size, size + 1) for r in range(world)]
    return x, w, [torch.tensor([n // 3, n], dtype=torch.int32) for n in rows]


def _grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    first = int(ends[0])
    return torch.cat([x[:first].double() @ w[0].double(), x[first:].double() @ w[1].double()])
