"""reduce_scatter_update_all_gather by itself, against float64: fused and with plain collectives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autofuse.lowering.cpu import update_executor
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.update_rules import RULES, adam_terms, numbers_at, sgd_terms
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
OP = "reduce_scatter_update_all_gather"
LR, EPS, LARGEST = 0.125, 1e-2, 4.0
ROWS = {
    "adam": numbers_at(adam_terms((0.9, 0.99), EPS, 0.25, True), 2, LR),
    "adam, maximized": numbers_at(adam_terms((0.9, 0.99), EPS, 0.25, True, maximize=True), 2, LR),
    "sgd": numbers_at(sgd_terms(0.0, 0.0, 0.25, False), 2, LR),
    "momentum": numbers_at(sgd_terms(0.75, 0.5, 0.25, True), 2, LR),
}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Kind = tuple[torch.dtype, torch.dtype, torch.dtype, bool]
KINDS: tuple[Kind, ...] = (
    (F32, F32, F32, False),
    (F32, F32, F32, True),
    (BF16, BF16, BF16, False),
    (F16, F16, F16, True),
    (BF16, F32, BF16, True),
)
"""Dtypes of gradient, parameter, and what is gathered; whether the slice is written."""


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
    rank: int, world: int, fused: bool, seed: int, shape: tuple[int, ...], name: str, kind: Kind,
    reduce_op: str, order: str,
) -> None:  # fmt: skip
    of_grad, of_param, gathered, written = kind
    rule, row = name.split(",")[0], [float(number) for number in ROWS[name]]
    generator, n = torch.Generator().manual_seed(seed), shape[0]
    # Multiples of 1/4, so that sums are exact.
    grads = torch.randint(-8, 9, (world, world * n, *shape[1:]), generator=generator) / 4
    total = grads.double().sum(0)[rank * n :][:n] / (world if reduce_op == "avg" else 1)
    param = torch.randn(world * n, *shape[1:], generator=generator).to(of_param)[rank * n :][:n]
    param = param.clone() if written else param
    states = [torch.rand(shape, generator=generator) for _ in RULES[rule].states]
    new, exact, numbers = param.double(), [s.double() for s in states], torch.tensor(row)
    # The collective rounds the sum.
    RULES[rule].update(new, total.to(of_grad).double() * row[10], exact, row)

    start = 0
    if seed % 3 == 0 and states:  # states of all ranks, of which the slice of this rank is a part
        start = rank * states[0].numel()
        states = [torch.cat([s] * world) for s in states]
        exact = [
            torch.cat([e if r == rank else s.double()[:n] for r in range(world)])
            for s, e in zip(states, exact, strict=True)
        ]
    if seed % 4 == 0:
        states = [s.t().contiguous().t() for s in states]
    changed = [*states, param] if written else states
    versions = [s._version for s in changed]
    op = FUSED_OPS[OP]
    run = getattr(torch.ops.autofuse, OP) if fused else lambda *given: op.reference(op.parse(given))
    out = run(
        None if written else param, changed, grads[rank].to(of_grad), numbers, rule, reduce_op, gathered,
        start, dist.group.WORLD.group_name, order, "test",
    )  # fmt: skip

    what = (shape, name, kind, reduce_op, order)
    small = 16 * torch.finfo(F32).eps * (1 + LARGEST * world / EPS)
    for got, want in zip(states, exact, strict=True):
        assert bool(((got.double() - want).abs() <= small * EPS).all()), what
    mine = out[rank * n :][:n]
    for got in (mine, param) if written else (mine,):
        rounding = torch.finfo(got.dtype).eps * new.abs() + torch.finfo(got.dtype).smallest_normal
        assert bool(((got.double() - new).abs() <= rounding + LR * small).all()), what
    assert not written or torch.equal(mine, param.to(gathered)), what
    every = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(every, out)
    assert all(torch.equal(other, out) for other in every), what
    assert (out.shape, out.dtype) == (grads[rank].shape, gathered), what
    assert all(s._version > v for s, v in zip(changed, versions, strict=True)), what


@pytest.mark.parametrize(
    ("world", "fused", "tile"),
    [(2, True, (1 << 15, 16)), (3, True, (96, 2)), (2, False, (1 << 15, 16))],
    ids=["one call", "pieces", "reference"],
)
def test_exact(ranks: Ranks, world: int, fused: bool, tile: tuple[int, int]) -> None:
    ranks(world).run(_run, fused, tile, timeout=200)
