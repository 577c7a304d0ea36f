"""Random views, permutes, casts, scales and bystanders round an all_to_all, on real ranks against eager.

What must be fused is decided by brute force, on numbered elements, not by layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import autofuse
from tests.ranks import RankPool

from .dense import group
from .harness import passes_only

WORLD = 2
SHAPE = (2, 12, 8)
"""Of the product `[E, R, N]`, of the activations `[E, R, K]`, or of the pooled tables `[T, B, D]`."""


@dataclass(frozen=True)
class Case:
    """Dim `dim` of SHAPE is `(outer, WORLD, c)`; digits come in the order `order`, then dims are merged."""

    kind: str
    dim: int
    outer: int
    order: tuple[int, ...]
    merges: tuple[int, ...]
    scale: bool
    cast: bool
    bystander: bool

    @property
    def digits(self) -> tuple[int, ...]:
        cut = (self.outer, WORLD, SHAPE[self.dim] // (self.outer * WORLD))
        return (*SHAPE[: self.dim], *cut, *SHAPE[self.dim + 1 :])

    @property
    def merged(self) -> list[int]:
        """The shape that is exchanged."""
        sizes = [self.digits[i] for i in self.order]
        for at in self.merges:
            if at + 1 < len(sizes):
                sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        return sizes

    def lay_out(self, whole: Tensor) -> Tensor:
        return whole.reshape(self.digits).permute(self.order).reshape(self.merged)

    def restore(self, laid_out: Tensor) -> Tensor:
        """The inverse of `lay_out`."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return laid_out.reshape([self.digits[i] for i in self.order]).permute(back).reshape(SHAPE)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    dim = 1 if kind == "bags" else draw(st.integers(0, 2))
    outers = [o for o in (1, 2, 3) if SHAPE[dim] % (o * WORLD) == 0]
    outer = draw(st.sampled_from([1] if kind == "bags" and draw(st.booleans()) else outers))
    rest = draw(st.permutations([i for i in range(5) if i != dim + 1]))
    at = draw(st.sampled_from([0, 0, 0, 1]))
    order = (*rest[:at], dim + 1, *rest[at:])
    merges = draw(st.lists(st.integers(0, 3), max_size=2))
    case = Case(kind, dim, outer, order, tuple(merges), *(draw(st.booleans()) for _ in range(3)))
    return case if case.merged[0] % WORLD == 0 else Case(**{**vars(case), "merges": (0, 0, 0, 0)})


def parts_agree(case: Case) -> bool:
    """Does the half of what is exchanged belong to one value of a digit of two of a dim of SHAPE?"""
    numbers = torch.arange(math.prod(SHAPE)).view(SHAPE)
    half = case.lay_out(numbers).reshape(WORLD, -1)[0].sort().values
    for dim in (1,) if case.kind == "bags" else (0, 1, 2):
        for outer in (1,) if case.kind == "bags" else (1, 2, 3):
            if SHAPE[dim] % (outer * WORLD) == 0:
                cut = numbers.unflatten(dim, (outer, WORLD, -1)).select(dim + 1, 0)
                if torch.equal(cut.reshape(-1).sort().values, half):
                    return True
    return False


def rows_agree(case: Case) -> bool:
    """Are whole rows exchanged?"""
    rows = case.lay_out(torch.arange(math.prod(SHAPE)).view(SHAPE)).reshape(-1, SHAPE[2])
    return torch.equal(rows, rows[:, :1] + torch.arange(SHAPE[2])) and bool(
        (rows[:, 0] % SHAPE[2] == 0).all()
    )


def verdict(case: Case) -> bool | None:
    """Must it be fused? None if either is right: parts that the program does not cut out itself."""
    if case.kind != "bags" and rows_agree(case):
        return True
    if not parts_agree(case):
        return False
    cut_out = case.order[0] == case.dim + 1 and case.merged[0] == WORLD
    return True if cut_out and SHAPE[case.dim] > WORLD else None


def program(case: Case) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    def exchange(x: Tensor) -> Tensor:
        x = x.contiguous()
        if case.cast:
            return funcol.all_to_all_single(x.bfloat16(), None, None, group()).float()
        return funcol.all_to_all_single(x, None, None, group())

    def combine(x: Tensor, w: Tensor) -> Tensor | tuple[Tensor, ...]:
        y = torch.bmm(x, w)
        y = y * 0.5 if case.scale else y
        out = exchange(case.lay_out(y)).relu()
        return (out, y.sin()) if case.bystander and not case.cast else out

    def dispatch(x: Tensor, w: Tensor) -> Tensor | tuple[Tensor, ...]:
        received = funcol.all_to_all_single(case.lay_out(x).contiguous(), None, None, group())
        y = torch.bmm(case.restore(received), w)
        return (y, received.sin()) if case.bystander else y * (0.5 if case.scale else 1)

    def bags(tables: Tensor, indices: Tensor) -> Tensor:
        pooled = [F.embedding_bag(indices, t, mode="mean" if case.scale else "sum") for t in tables]
        return exchange(case.lay_out(torch.stack(pooled))).relu()

    return {"combine": combine, "dispatch": dispatch, "bags": bags}[case.kind]


def compare(rank: int, world: int, case: Case) -> tuple[float, bool, str]:
    """(relative error, fused?, report)."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    fn = program(case)
    args = (torch.randn(SHAPE), torch.randn(2, 8, 8))
    if case.kind == "combine":
        args = (torch.randn(2, 12, 5), torch.randn(2, 5, 8))
    if case.kind == "bags":
        args = (torch.randn(2, 20, 8), torch.randint(0, 20, (12, 3)))
    with torch.no_grad():
        expected = fn(*args)
        with autofuse.debug() as report:
            actual = torch.compile(fn, backend=passes_only())(*args)
    error = 0.0
    for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (actual, expected)), strict=True):
        assert a.shape == b.shape
        error = max(error, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return error, bool(report.fused), str(report)


@pytest.mark.parametrize("examples", [8, pytest.param(24, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["combine", "dispatch", "bags"])
def test_chains(kind: str, examples: int, ranks: Callable[[int], RankPool]) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(kind))
    def check(case: Case) -> None:
        expected = verdict(case)
        for error, fused, report in ranks(WORLD).run(compare, case, timeout=120):
            assert error < (0.01 if case.cast else 1e-5), (case, report)
            assert expected is None or fused is expected, (case, case.merged, report)

    check()
