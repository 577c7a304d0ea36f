"""Random chains of views, casts and scales round a collective, on real ranks against eager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import autofuse
from tests.ranks import RankPool

from .dense import group
from .harness import passes_only
from .test_layout import apply

ROWS, INNER, COLUMNS = 12, 10, 8
SEEDS = 12


def draw(rng: random.Random, shape: tuple[int, ...], lead: int = 0) -> list[tuple]:
    """A few moves of the elements of a tensor, as `apply` takes them; the first `lead` dims stay."""
    x = torch.empty(shape)
    moves: list[tuple] = []
    for _ in range(rng.randint(1, 4)):
        move: tuple = ("clone",)
        kind, dims = rng.choice(["view", "permute", "split", "unsqueeze"]), range(lead, x.dim())
        if kind == "view" and len(dims) > 0 and x.dim() < 5:
            dim = rng.choice(dims)
            minor = rng.choice([f for f in (1, 2, 4) if x.shape[dim] % f == 0])
            move = ("reshape", (*x.shape[:dim], x.shape[dim] // minor, minor, *x.shape[dim + 1 :]))
        elif kind == "permute":
            move = ("permute", (*range(lead), *rng.sample(dims, len(dims))))
        elif kind == "split" and any(x.shape[d] % 2 == 0 for d in dims):
            dim = rng.choice([d for d in dims if x.shape[d] % 2 == 0])
            move = ("split and cat", dim, x.shape[dim] // 2, rng.choice(dims))
        elif kind == "unsqueeze" and x.dim() < 5:
            dim = rng.randint(lead, x.dim())
            move = ("reshape", (*x.shape[:dim], 1, *x.shape[dim:]))
        moves.append(move)
        x = apply(x, [move])
    return moves


def all_reduce(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    before, scale, op = draw(rng, (ROWS, COLUMNS)), rng.choice([1, 0.5]), rng.choice(["sum", "avg"])
    after = draw(rng, apply(torch.empty(ROWS, COLUMNS), before).shape)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = apply(F.linear(x, w) * scale, before).contiguous()
        return apply(funcol.all_reduce(y, op, group()), after).relu()

    return fn


def reduce_scatter(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    before = draw(rng, (ROWS, COLUMNS), lead=1)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = apply(F.linear(x, w), before).contiguous()
        return funcol.reduce_scatter_tensor(y, "sum", 0, group()).relu()

    return fn


def all_gather(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    before, also = draw(rng, (ROWS, INNER)), rng.choice([False, True])
    whole = (2 * (shape := apply(torch.empty(ROWS, INNER), before).shape)[0], *shape[1:])
    after = draw(rng, whole)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        gathered = apply(funcol.all_gather_tensor(apply(x, before).contiguous(), 0, group()), after)
        y = F.linear(gathered.reshape(-1, INNER), w)
        return y + gathered.sum() if also else y

    return fn


PROGRAMS: dict[str, Callable[[random.Random], Callable[[Tensor, Tensor], Tensor]]] = {
    "matmul_all_reduce": all_reduce,
    "matmul_reduce_scatter": reduce_scatter,
    "all_gather_matmul": all_gather,
}


def compare(rank: int, world: int, name: str) -> list[tuple[float, list[str]]]:
    """(relative error, reason codes of what was kept) for every seed."""
    found: list[tuple[float, list[str]]] = []
    for seed in range(SEEDS):
        torch._dynamo.reset()
        torch.manual_seed(100 * seed + rank)
        fn, args = (
            PROGRAMS[name](random.Random(seed)),
            (torch.randn(ROWS, INNER), torch.randn(COLUMNS, INNER)),
        )
        expected = fn(*args)
        with autofuse.debug() as report, torch.no_grad():
            actual = torch.compile(fn, backend=passes_only())(*args)
        assert actual.shape == expected.shape
        error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        found.append((float(error), [s.reason.value for s in report.kept if s.reason is not None]))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_chains(name: str, ranks: Callable[[int], RankPool]) -> None:
    results = ranks(2).run(compare, name, timeout=180)
    for rank, seeds in enumerate(results):
        errors = [error for error, _ in seeds]
        assert max(errors) < 1e-5, (rank, errors)
    kept = [reasons for _, reasons in results[0]]
    assert kept == [reasons for _, reasons in results[1]]
    # What no list of digits expresses stays, such as rows of 10 that a chain has made of columns of 24.
    assert all(reason in ("layout", "no_compute") for reasons in kept for reason in reasons), kept
    assert sum(not reasons for reasons in kept) >= SEEDS // 2, kept
