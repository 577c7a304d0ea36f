"""all_reduce_update by itself, against float64: fused and with plain collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autofuse.lowering.cpu import update_executor
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.update_rules import (
    RULES,
    UNGUARDED,
    adam_terms,
    lamb_terms,
    numbers_at,
    sgd_terms,
    trust,
)
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]
OP = "all_reduce_update"
LR, EPS, LARGEST = 0.125, 1e-2, 4.0
LAMB = numbers_at(lamb_terms((0.9, 0.99), EPS, 0.25, True), 2, LR)
ROWS = {
    "adam": numbers_at(adam_terms((0.9, 0.99), EPS, 0.25, True), 2, LR),
    "adam, scaled": numbers_at(adam_terms((0.9, 0.99), EPS, 0.25, False, maximize=True), 2, LR),
    "momentum": numbers_at(sgd_terms(0.75, 0.5, 0.25, True), 2, LR),
    "lamb": LAMB,
    "lamb, most": [1.5, *LAMB[1:]],
    "lamb, unguarded": [*LAMB[:9], UNGUARDED, *LAMB[10:]],
    "lamb, excluded": numbers_at(lamb_terms((0.9, 0.99), EPS, 0.25, False), 2, LR),
}
KINDS = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32))
"""Dtypes of gradient and parameter."""

SHAPES = (((5, 3),), ((1,),), ((700, 3),), ((7,), (40, 30), (0, 2), (1,), (1000,)))
LIMITS = (None, (0.5, 1e-6, 0.0, 1.0), (1e9, 1e-6, 0.0, 1.0), (3.0, 0.0, 2.0, math.inf))


def _run(rank: int, world: int, fused: bool, tile: tuple[int, int]) -> None:
    cases = product(SHAPES, ROWS, KINDS, ("sum", "avg"), ("direct", "oblivious"))
    for cached in (update_executor.part_of, update_executor.piece_shapes):
        cached.cache_clear()
    with patch.multiple(update_executor, TILE=tile[0], TILES=tile[1]):
        for i, case in enumerate(cases):
            _check(rank, world, fused, i, *case)
    for cached in (update_executor.part_of, update_executor.piece_shapes):
        cached.cache_clear()


def _check(
    rank: int, world: int, fused: bool, seed: int, shapes: tuple[tuple[int, ...], ...], name: str,
    kind: tuple[torch.dtype, torch.dtype], reduce_op: str, order: str,
) -> None:  # fmt: skip
    of_grad, of_param = kind
    rule, row = name.split(",")[0], [float(number) for number in ROWS[name]]
    rows = [row, [*row[:10], -0.5 * row[10], row[11]]]  # of the first tensor, and of others
    limits = LIMITS[seed % len(LIMITS)]
    generator = torch.Generator().manual_seed(seed)
    # Multiples of 1/4, so that sums are exact.
    grads = [torch.randint(-8, 9, (world, *shape), generator=generator) / 4 for shape in shapes]
    totals = [(g.double().sum(0) / (world if reduce_op == "avg" else 1)).to(of_grad) for g in grads]
    squares = [total.double().square().sum() for total in totals]
    scale = 1.0
    if limits is not None:
        bound, eps, floor, most = limits
        scale = min(most, bound / (max(float(sum(squares).sqrt()), floor) + eps))  # type: ignore[union-attr]
    params = [torch.randn(shape, generator=generator).to(of_param) * (seed % 5 != 0) for shape in shapes]
    states = [torch.rand(shape, generator=generator) for _ in RULES[rule].states for shape in shapes]
    want = []
    for t, (param, total) in enumerate(zip(params, totals, strict=True)):
        new, exact, by = param.double(), [s.double() for s in states[t :: len(shapes)]], 1.0
        own = rows[t > 0]
        u = RULES[rule].update(new, scale * total.double() * own[10], exact, own)
        if u is not None:
            by = trust(own, float(new.square().sum()), float(u.square().sum()))
            new -= own[8] * by * u
        want.append((new, exact, by))
    if seed % 4 == 0:
        states = [s.t().contiguous().t() if s.dim() == 2 else s for s in states]
    versions = [s._version for s in (*params, *states)]
    op = FUSED_OPS[OP]
    run = getattr(torch.ops.autofuse, OP) if fused else lambda *given: op.reference(op.parse(given))
    keeps = [(seed + t) % 2 == 0 for t in range(len(shapes))]
    found, sums = run(
        params, states, [g[rank].to(of_grad) for g in grads], torch.tensor(rows),
        [int(t > 0) for t in range(len(shapes))], None if limits is None else torch.tensor(limits), rule,
        reduce_op, keeps, dist.group.WORLD.group_name, order, "test",
    )  # fmt: skip

    what = (shapes, name, kind, reduce_op, order, limits)
    kept = [total for total, keep in zip(totals, keeps, strict=True) if keep]
    kept = torch.cat([total.flatten() for total in kept]) if kept else torch.empty(0, dtype=of_grad)
    torch.testing.assert_close(sums, kept, rtol=torch.finfo(of_grad).eps, atol=0)
    exactly = torch.stack(squares) if limits else torch.empty(0, dtype=torch.float64)
    torch.testing.assert_close(found, exactly, rtol=2 * torch.finfo(of_grad).eps, atol=0)  # of rounded sums
    small = 16 * torch.finfo(torch.float32).eps * (1 + LARGEST * world / EPS)
    for t, (param, (new, exact, by)) in enumerate(zip(params, want, strict=True)):
        for got, of in zip(states[t :: len(shapes)], exact, strict=True):
            assert bool(((got.double() - of).abs() <= small * EPS).all()), what
        rounding = torch.finfo(of_param).eps * new.abs() + torch.finfo(of_param).smallest_normal
        assert bool(((param.double() - new).abs() <= rounding + LR * small * max(1.0, by)).all()), what
    for mine in (*params, *states, found):
        every = [torch.empty_like(mine.contiguous()) for _ in range(world)]
        dist.all_gather(every, mine.contiguous())
        assert all(torch.equal(other, mine) for other in every), what
    after = [s._version for s in (*params, *states)]
    assert all(new > old for new, old in zip(after, versions, strict=True)), what


@pytest.mark.parametrize(
    ("world", "fused", "tile"),
    [(2, True, (1 << 15, 16)), (3, True, (96, 2)), (2, False, (1 << 15, 16))],
    ids=["one call", "pieces", "reference"],
)
def test_exact(ranks: Ranks, world: int, fused: bool, tile: tuple[int, int]) -> None:
    ranks(world).run(_run, fused, tile, timeout=200)


def test_trust_as_division_has_it() -> None:
    row = [math.inf, *LAMB[1:9], UNGUARDED, *LAMB[10:]]
    assert trust(row, 0.0, 4.0) == 0.0
    assert trust(row, 4.0, 0.0) == math.inf
    assert math.isnan(trust(row, 0.0, 0.0))
    assert trust([1.5, *row[1:]], 9.0, 4.0) == 0.75
    assert [trust(LAMB, *of) for of in ((0.0, 4.0), (4.0, 0.0), (9.0, 4.0))] == [1.0, 1.0, 1.5]


def _other_dtype(rank: int, world: int) -> str:
    grad = torch.ones(5, dtype=torch.bfloat16 if rank else torch.float32)
    row = torch.tensor([numbers_at(sgd_terms(0.0, 0.0, 0.0, False), 2, LR)])
    try:
        torch.ops.autofuse.all_reduce_update(
            [torch.zeros(5)], [], [grad], row, [0], None, "sgd", "sum", [False], fresh_group(), "direct",
            "test",
        )  # fmt: skip
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_of_two_dtypes(ranks: Ranks) -> None:
    """Their bytes would be read as those of another dtype."""
    for told in ranks(2).run(_other_dtype):
        assert "the ranks disagree" in told
