"""Calls of every fused op on GPUs, of sizes that its kernels take, with their exact results.

All numbers are -1, 0 and 1, few of them not 0: every partial sum is an integer that bfloat16 holds, so a
result must be exact whatever the way, the order and the world. Every rank makes the inputs of all ranks.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from autofuse import ops
from autofuse.lowering.gpu.choice import choose
from autofuse.lowering.gpu.choice.correction import Predicted, Predictor
from autofuse.lowering.gpu.choice.kernel import Problem, replaced, ways_of
from autofuse.lowering.update_rules import numbers_at, sgd_terms

BF16 = torch.bfloat16
SHARE = 0.25
"""Of the numbers that may be other than 0."""

TOKENS = (1, 2, 7, 16, 32, 128, 512, 2048)
WEIGHTS = ((256, 1024), (1024, 512), (4096, 4096))
ROWS, TABLES, DIM, BAGS, POOLING = 5000, 4, 128, 256, 8
EXPERTS, HIDDEN = 4, 512
EXPERT_ROWS = (8, 40, 256)
ELEMENTS = (3, 20_000, 1_000_000)
SIZES = 6
"""Sizes of dense ops in one episode."""


@dataclass(frozen=True)
class Case:
    """A call, by name, and its exact result."""

    name: str
    run: Callable[[], Tensor]
    exact: Tensor


def numbers(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    signs = torch.randint(-1, 2, shape, generator=generator, device="cuda")
    kept = torch.rand(shape, generator=generator, device="cuda") < SHARE
    return (signs * kept).to(BF16)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Exact: fp64 holds all sums."""
    return (x.double() @ w.double()).to(BF16)


def _one(found: object) -> Tensor:
    """What an op returns that was given one weight, not a list."""
    assert isinstance(found, Tensor)
    return found


def _dense(rank: int, world: int, group: ProcessGroup, m: int, k: int, n: int) -> Iterator[Case]:
    size = f"{m} x {k} x {n}"
    x = [numbers(r, m, k) for r in range(world)]
    w = [numbers(100 + r, k, n) for r in range(world)]
    products = [_product(a, b) for a, b in zip(x, w, strict=True)]
    total = torch.stack(products).double().sum(0).to(BF16)
    yield Case(
        f"matmul_all_reduce {size}", lambda: ops.matmul_all_reduce(x[rank], w[rank], group=group), total
    )
    yield Case(
        f"matmul_all_gather {size}",
        lambda: ops.matmul_all_gather(x[rank], w[rank], group=group),
        torch.cat(products, -1),
    )
    if m % world == 0:
        yield Case(
            f"matmul_reduce_scatter {size}",
            lambda: ops.matmul_reduce_scatter(x[rank], w[rank], group=group),
            total.chunk(world)[rank],
        )
        parts = [t[: m // world].contiguous() for t in x]
        yield Case(
            f"all_gather_matmul {size}",
            lambda: _one(ops.all_gather_matmul(parts[rank], w[rank], group=group)),
            _product(torch.cat(parts), w[rank]),
        )


def _fixed(rank: int, world: int, rows: int, group: ProcessGroup) -> Iterator[Case]:
    """Experts of fixed capacity: `rows` an expert from each rank."""
    w = [numbers(200 + r, EXPERTS, HIDDEN, HIDDEN) for r in range(world)]
    x = [numbers(300 + r, EXPERTS, world * rows, HIDDEN) for r in range(world)]
    sent = [_product(a, b).view(EXPERTS, world, rows, HIDDEN) for a, b in zip(x, w, strict=True)]
    yield Case(
        f"combine {rows} rows",
        lambda: ops.expert_matmul_all_to_all(x[rank], w[rank], group=group),
        torch.stack([s[:, rank] for s in sent]),
    )
    held = [t.view(EXPERTS, world, rows, HIDDEN).transpose(0, 1).contiguous() for t in x]
    gathered = torch.stack([t[rank] for t in held], 1).reshape(EXPERTS, world * rows, HIDDEN)
    yield Case(
        f"dispatch {rows} rows",
        lambda: _one(ops.all_to_all_expert_matmul(held[rank], w[rank], group=group)),
        _product(gathered, w[rank]),
    )


def _dropless(rank: int, world: int, rows: int, group: ProcessGroup) -> Iterator[Case]:
    """About `rows` rows from each rank to each, other numbers for each pair, and all experts uneven."""
    sends = [[rows + 13 * ((a + 2 * b) % 3) for b in range(world)] for a in range(world)]
    w = [numbers(400 + r, EXPERTS, HIDDEN, HIDDEN) for r in range(world)]
    receives = [sends[s][rank] for s in range(world)]

    def ends(count: int) -> Tensor:
        return torch.tensor([count // 5, count // 5, count // 2, count], dtype=torch.int32, device="cuda")

    def by_expert(x: Tensor, weights: Tensor) -> Tensor:
        stops = ends(len(x)).tolist()
        starts = [0, *stops[:-1]]
        return torch.cat([_product(x[a:b], weights[e]) for e, (a, b) in enumerate(zip(starts, stops))])  # noqa: B905

    x = [numbers(500 + r, sum(sends[r]), HIDDEN) for r in range(world)]
    arrived = torch.cat([t.split(sends[s])[rank] for s, t in enumerate(x)])
    offsets = ends(len(arrived))
    yield Case(
        f"dropless dispatch {rows} rows",
        lambda: _one(
            ops.all_to_all_expert_matmul(
                x[rank],
                w[rank],
                offsets=offsets,
                output_splits=receives,
                input_splits=sends[rank],
                group=group,
            )
        ),
        by_expert(arrived, w[rank]),
    )
    own = ends(len(x[rank]))
    products = [by_expert(t, w[r]) for r, t in enumerate(x)]
    yield Case(
        f"dropless combine {rows} rows",
        lambda: ops.expert_matmul_all_to_all(
            x[rank], w[rank], offsets=own, output_splits=receives, input_splits=sends[rank], group=group
        ),
        torch.cat([p.split(sends[s])[rank] for s, p in enumerate(products)]),
    )


def _bags(rank: int, world: int, group: ProcessGroup) -> Iterator[Case]:
    tables = [[numbers(600 + 10 * r + t, ROWS, DIM) for t in range(TABLES)] for r in range(world)]
    generator = torch.Generator("cuda").manual_seed(7)
    shape = BAGS * world, POOLING
    indices = [
        [torch.randint(0, ROWS, shape, generator=generator, device="cuda") for _ in range(TABLES)]
        for _ in range(world)
    ]
    mine = slice(rank * BAGS, (rank + 1) * BAGS)
    pooled = [
        F.embedding_bag(i[mine], t.float(), mode="sum").to(BF16)
        for r in range(world)
        for i, t in zip(indices[r], tables[r], strict=True)
    ]
    yield Case(
        "bags",
        lambda: ops.embedding_bag_all_to_all(tables[rank], indices[rank], group=group),
        torch.cat(pooled, 1),
    )


def _step(rank: int, world: int, elements: int, group: ProcessGroup) -> Iterator[Case]:
    """A step of SGD from 0 with lr = -1, by which parameters become sums. Its numbers are on the device, so
    that it can be captured."""
    sizes = (elements, 0, 700)
    grads = [[numbers(1000 + 10 * r + i, n) for i, n in enumerate(sizes)] for r in range(world)]
    row = numbers_at(sgd_terms(0.0, 0.0, 0.0, False), 1, -1.0)
    rates = torch.tensor([row] * len(sizes), dtype=torch.float64, device="cuda")

    def run() -> Tensor:
        params = [torch.zeros(n, dtype=BF16, device="cuda") for n in sizes]
        torch.ops.autofuse.reduce_update_gather(
            params, grads[rank], [], rates, "sgd", "sum", 0.0, False, ["a", "b", "c"], group.group_name,
            "direct", "soak",
        )  # fmt: skip
        return torch.cat(params)

    yield Case(f"step of {elements} elements", run, torch.stack([torch.cat(g) for g in grads]).sum(0))


Maker = Callable[[int, int, ProcessGroup], Iterator[Case]]


def makers(draw: random.Random) -> list[Maker]:
    """Some sizes of every op; each new way takes seconds to compile."""
    sizes = draw.sample([(m, k, n) for m in TOKENS for k, n in WEIGHTS], SIZES)
    rows, elements = draw.choice(EXPERT_ROWS), draw.choice(ELEMENTS)
    return [
        *(partial(_dense, m=m, k=k, n=n) for m, k, n in sizes),
        lambda r, w, g: _fixed(r, w, rows, g),
        lambda r, w, g: _dropless(r, w, rows, g),
        lambda r, w, g: _step(r, w, elements, g),
        _bags,
    ]


def draw_ways(seed: int) -> None:
    """Every problem takes some way of ours from now on, drawn alike on all ranks, in place of the fastest."""

    def drawn(problem: Problem, predictor: Predictor, serial: bool) -> list[Predicted]:
        ways = [way for way in ways_of(problem).values() if way.fused and not way.is_update]
        names = [way.name for way in ways if not (serial and way.is_copied)] or [replaced(problem).name]
        return [Predicted(names[crc32(f"{seed} {problem}".encode()) % len(names)], 0.0)]

    patch.object(choose, "_possible", drawn).start()
