"""Ways of the expert ops on GPUs, and which calls have kernels."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice import choose as choices
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Problem, ways_of
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.experts.fixed import at_once, layouts, of_sum
from autofuse.lowering.gpu.experts.ways import (
    COMBINE,
    DISPATCH,
    DROPLESS,
    MOST_BYTES,
    DroplessProblem,
    ExpertProblem,
)
from autofuse.lowering.ops.library import FUSED_OPS

BF16 = torch.bfloat16
PROBLEM = ExpertProblem(COMBINE, 16, 1024, 2048, 4096, 4, BF16)


def choose(asked: Problem, *points: Point) -> str:
    return choices.choose(asked, choices.predictor_of(points)).way


def test_one_launch_costs_the_host_nothing_that_counts() -> None:
    times = dict.fromkeys(ways_of(PROBLEM), 99.0)
    short = choices.predictor_of((Point.of(PROBLEM, times | {"clusters": 10.0, CUBLAS_NCCL: 20.0}),))
    for launched in (False, True):
        assert choices.choose(PROBLEM, short, launched=launched).way == "clusters"


@pytest.mark.parametrize("op", [COMBINE, DISPATCH])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_size_has_ways(op: str, world: int) -> None:
    for run in (4, 32, 100, 128, 200, 1024):
        problem = replace(PROBLEM, op=op, world=world, rows=run * world)
        found = ways_of(problem)
        assert len(found) > 1
        for name, way in found.items():
            assert max(way.need.inbox, way.need.copies) <= MOST_BYTES, name
            assert (max(way.need.inbox, way.need.copies) > 0) == way.fused, name


@pytest.mark.parametrize(
    "odd",
    [
        {"k": 2044},
        {"columns": 4100},
        {"dtype": torch.float32},
        {"world": 16},
        {"aligned": False},
        {"rows": 2},
    ],
)
def test_what_no_kernel_runs(odd: dict[str, Any]) -> None:
    assert list(ways_of(replace(PROBLEM, **odd))) == [CUBLAS_NCCL]


@pytest.mark.parametrize("dropless", [False, True])
def test_two_weights_are_as_one_that_is_twice_as_wide(dropless: bool) -> None:
    """To tables of ways: a point of either decides for both."""
    sizes = 2048, 4096, 4, BF16
    wide: ExpertProblem | DroplessProblem = ExpertProblem(DISPATCH, 16, 1024, *sizes)
    if dropless:
        wide = DroplessProblem(DISPATCH + DROPLESS, 16, *sizes)
    two = replace(wide, columns=2048, weights=2)
    for measured, asked in ((wide, two), (two, wide)):
        slow = dict.fromkeys(ways_of(measured), 200.0)
        for way in ("clusters", CUBLAS_NCCL):
            fast = min(name for name in ways_of(asked) if name.startswith(way))
            point = Point.of(measured, slow | {fast: 100.0})
            assert choose(asked, point) == fast
        assert choose(replace(asked, columns=2044), point) == CUBLAS_NCCL


def test_how_many_weights_one_kernel_multiplies() -> None:
    w, bias = _x(4, 16, 24), _x(4, 24)
    wide, columns, odd = _x(4, 16, 32), _x(4, 24, 16).transpose(1, 2), _x(4, 16, 25)[..., 1:]
    halves = [*_x(4, 16, 48).chunk(2, 2)]
    assert at_once([w], [None]) == 1
    assert at_once([w, w], [None, None]) == at_once([w, w], [bias, bias]) == 2
    assert at_once([w, w, w], [None] * 3) == 2
    assert at_once(halves, [None, None]) == at_once([w, halves[1]], [None, None]) == 2
    assert at_once([columns, columns], [None, None]) == 2
    assert at_once([w, w], [bias, None]) == at_once([w, w], [None, bias]) == 1
    for other in (wide, columns, odd):
        assert at_once([w, other], [None, None]) == 1


def test_a_sum_of_products_is_one_problem_that_contracts_them_all() -> None:
    p, x, w = replace(PROBLEM, k=8, columns=16), _x(2, 4, 8), _x(2, 8, 16)
    assert of_sum(p, [x], [w]) == p
    assert of_sum(p, [x, _x(2, 4, 24)], [w, _x(2, 24, 16)]) == replace(p, k=32)
    transposed = _x(2, 16, 8).transpose(1, 2)
    assert of_sum(p, [x, x], [transposed] * 2) == replace(p, k=16)
    assert layouts([transposed] * 2) != layouts([w, w])
    for odd in (transposed, _x(2, 8, 17)[..., :16]):  # one kernel multiplies weights of one layout, by TMA
        assert not of_sum(p, [x, x], [w, odd]).aligned


def test_a_dropless_combine_has_ways_whatever_its_rows() -> None:
    problem = DroplessProblem(COMBINE + DROPLESS, 16, 2048, 4096, 4, BF16)
    assert len(ways_of(problem)) > 1
    slow = dict.fromkeys(ways_of(problem), 200.0)
    for way in ("clusters", CUBLAS_NCCL):
        assert choose(problem, Point.of(problem, slow | {way: 100.0})) == way
    for odd in ({"k": 2044}, {"experts": 4096}, {"world": 16}):
        assert list(ways_of(replace(problem, **odd))) == [CUBLAS_NCCL]


def test_rows_that_ranks_have_told_decide_between_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DroplessProblem(DISPATCH + DROPLESS, 16, 2048, 4096, 4, BF16)
    ways = ways_of(problem)
    slow, best = dict.fromkeys(ways, 200.0), {1024: "clusters bn=128", 65536: "clusters across=2"}
    points = [Point.of(replace(problem, rows=m), slow | {way: 100.0}) for m, way in best.items()]
    monkeypatch.setattr(choices, "predictor_for", lambda group: choices.predictor_of(tuple(points)))
    for rows, way in best.items():
        told = replace(problem, rows=rows)
        assert choices.configuration(ways["clusters"], told, None).name == way  # type: ignore[arg-type]
        assert points[0].is_fresh(told) == (rows == 1024)
    assert problem.m == 4096, "256 rows an expert are likely"


def _x(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


W = _x(2, 8, 16)


def _is_left(name: str, *args: Any) -> bool:
    """Whether the reference runs a call, for its options, its dtype or its sizes."""
    op = FUSED_OPS[name]
    given = op.parse((*args, "no group", "direct", ""))
    assert op.cuda is not None
    return bool(op.gpu_gap(given) or op.gpu_dtype_gap(given)) or op.cuda(given) is NotImplemented


@pytest.mark.parametrize(
    "args",
    [
        ([_x(4, 8)] * 2, [W[0]] * 2, [], [], "mm", 2, None, None, [], [], 1, 1, False),
        ([_x(2, 4, 8)] * 5, [W] * 5, [], [], "mm", 0, None, None, [], [], 1, 1, False),
        ([_x(2, 4, 8)] * 2, [W] * 2, [_x(2, 16)] * 2, [], "mm", 0, None, None, [], [], 1, 1, False),
        ([_x(2, 4, 8)], [W], [], [], "mm; neg", 0, None, None, [], [], 1, 1, False),
        ([_x(2, 4, 8)], [W], [], [], "mm", 0, None, None, [], [], 2, 1, False),
        ([_x(2, 4, 8)], [W], [], [], "mm", 0, None, None, [], [], 1, 1, True),
        ([_x(6, 8)], [W], [], [], "mm", 0, None, None, [4, 4], [4, 4], 1, 1, False),  # of 8 rows to send
        ([_x(7, 8)], [W], [], [], "mm", 0, None, None, [4, 4], [4, 3], 1, 1, False),  # no offsets
        ([_x(8, 8).float()], [W], [], [], "mm", 0, None, None, [4, 4], [4, 4], 1, 1, False),
        ([_x(2, 4, 8).float()], [W], [], [], "mm", 0, None, None, [], [], 1, 1, False),
        ([_x(2, 0, 8)], [W], [], [], "mm", 0, None, None, [], [], 1, 1, False),
    ],
)
def test_combines_that_are_left_to_the_reference(args: Any) -> None:
    """Before anything is asked of the group."""
    assert _is_left(COMBINE, *args)


@pytest.mark.parametrize(
    "args",
    [
        (_x(2, 2, 4, 8), [W[0]] * 2, [], "", 2, None, None, [], [], 1, 1, False),
        (_x(8, 8), [W], [], "", 0, None, None, [4, 4], [4, 4], 1, 1, False),  # no offsets
        (_x(8, 8), [W], [], "", 0, torch.tensor([4, 8]), torch.arange(7), [4, 4], [4, 4], 1, 1, False),
        (_x(2, 2, 4, 8), [W], [], "", 0, None, None, [], [], 2, 1, False),
        (_x(2, 2, 4, 8), [W.half()], [], "", 0, None, None, [], [], 1, 1, False),
        (_x(2, 2, 4, 8), [W, W], [], "silu", 0, None, None, [], [], 1, 1, False),  # of fixed capacity
    ],
)
def test_dispatches_that_are_left_to_the_reference(args: Any) -> None:
    assert _is_left(DISPATCH, *args)
