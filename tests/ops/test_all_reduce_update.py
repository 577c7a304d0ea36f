"""all_reduce_update by itself, against float64: fused and with plain collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autofuse.lowering import update_rules
from autofuse.lowering.cpu import update_executor
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.update_rules import UNGUARDED
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
OP = "all_reduce_update"
LR, EPS, LARGEST = 0.125, 1e-2, 4.0
LAMB = update_rules.lamb_numbers(2, LR, (0.9, 0.99), EPS, 0.25, True)
ROWS = {
    "adam": update_rules.adam_numbers(2, LR, (0.9, 0.99), EPS, 0.25, True),
    "adam, scaled": update_rules.adam_numbers(2, LR, (0.9, 0.99), EPS, 0.25, False, maximize=True),
    "momentum": update_rules.sgd_numbers(2, LR, 0.75, 0.5, 0.25, True),
    "lamb": LAMB,
    "lamb, most": [1.5, *LAMB[1:]],
    "lamb, unguarded": [*LAMB[:9], UNGUARDED, *LAMB[10:]],
    "lamb, excluded": update_rules.lamb_numbers(2, LR, (0.9, 0.99), EPS, 0.25, False),
}
KINDS = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32))
"""Dtypes of gradient and parameter."""

SIZES = ((5, 3), (1,), (700, 3))


def _run(rank: int, world: int, fused: bool, tile: tuple[int, int]) -> None:
    cases = product(SIZES, ROWS, KINDS, ("sum", "avg"), ("direct", "oblivious"))
    for cached in (update_executor.part_of, update_executor.piece_shapes):
        cached.cache_clear()
    with patch.multiple(update_executor, TILE=tile[0], TILES=tile[1]):
        for i, case in enumerate(cases):
            _check(rank, world, fused, i, *case)
    for cached in (update_executor.part_of, update_executor.piece_shapes):
        cached.cache_clear()


def _check(
    rank: int, world: int, fused: bool, seed: int, shape: tuple[int, ...], name: str,
    kind: tuple[torch.dtype, torch.dtype], reduce_op: str, order: str,
) -> None:  # fmt: skip
    of_grad, of_param = kind
    rule, row = name.split(",")[0], [float(number) for number in ROWS[name]]
    generator = torch.Generator().manual_seed(seed)
    # Multiples of 1/4, so that sums are exact.
    grads = torch.randint(-8, 9, (world, *shape), generator=generator) / 4
    total = (grads.double().sum(0) / (world if reduce_op == "avg" else 1)).to(of_grad)
    param = torch.randn(shape, generator=generator).to(of_param) * (seed % 5 != 0)
    states = [torch.rand(shape, generator=generator) for _ in update_rules.RULES[rule].states]
    new, exact, trust = param.double(), [s.double() for s in states], 1.0
    u = update_rules.RULES[rule].update(new, total.double() * row[10], exact, row)
    if u is not None:
        trust = update_rules.trust(row, float(new.square().sum()), float(u.square().sum()))
        new -= row[8] * trust * u
    if seed % 4 == 0:
        states = [s.t().contiguous().t() for s in states]
    versions = [s._version for s in (param, *states)]
    op = FUSED_OPS[OP]
    run = getattr(torch.ops.autofuse, OP) if fused else lambda *given: op.reference(op.parse(given))
    out = run(
        [param], states, grads[rank].to(of_grad), torch.tensor(row), rule, reduce_op, seed % 2 == 0,
        dist.group.WORLD.group_name, order, "test",
    )  # fmt: skip

    what = (shape, name, kind, reduce_op, order)
    if seed % 2 == 0:
        torch.testing.assert_close(out, total, rtol=torch.finfo(of_grad).eps, atol=0)
    small = 16 * torch.finfo(torch.float32).eps * (1 + LARGEST * world / EPS)
    for got, want in zip(states, exact, strict=True):
        assert bool(((got.double() - want).abs() <= small * EPS).all()), what
    rounding = torch.finfo(of_param).eps * new.abs() + torch.finfo(of_param).smallest_normal
    assert bool(((param.double() - new).abs() <= rounding + LR * small * max(1.0, trust)).all()), what
    for mine in (param, *states):
        every = [torch.empty_like(mine.contiguous()) for _ in range(world)]
        dist.all_gather(every, mine.contiguous())
        assert all(torch.equal(other, mine) for other in every), what
    assert all(s._version > v for s, v in zip((param, *states), versions, strict=True)), what


@pytest.mark.parametrize(
    ("world", "fused", "tile"),
    [(2, True, (1 << 15, 16)), (3, True, (96, 2)), (2, False, (1 << 15, 16))],
    ids=["one call", "pieces", "reference"],
)
def test_exact(ranks: Ranks, world: int, fused: bool, tile: tuple[int, int]) -> None:
    ranks(world).run(_run, fused, tile, timeout=200)


def test_trust_as_division_has_it() -> None:
    row = [math.inf, *LAMB[1:9], UNGUARDED, *LAMB[10:]]
    assert update_rules.trust(row, 0.0, 4.0) == 0.0
    assert update_rules.trust(row, 4.0, 0.0) == math.inf
    assert math.isnan(update_rules.trust(row, 0.0, 0.0))
    assert update_rules.trust([1.5, *row[1:]], 9.0, 4.0) == 0.75
    assert [update_rules.trust(LAMB, *of) for of in ((0.0, 4.0), (4.0, 0.0), (9.0, 4.0))] == [1.0, 1.0, 1.5]
