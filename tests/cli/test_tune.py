"""`autofuse tune --device cuda` without a GPU: what is measured, and what is left for the next run."""

from dataclasses import replace

import pytest

from autofuse.cli import tune_ways as ways
from autofuse.lowering.gpu.choice.kernel import fused_ways
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.dense.ways import DenseProblem


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """What is kept of problems that take a second each."""
    kept, now = list[Point](), [0.0]

    def tune_problem(op: str, m: int, k: int, n: int, dtype: object, worth: bool) -> tuple[Point, str]:
        now[0] += 1
        problem = next(each for each in PROBLEMS if (each.op, each.m, each.k, each.n) == (op, m, k, n))
        kept[:] = [point for point in kept if (point.op, *point.sizes) != (op, m, k, n, 2)]
        kept.append(Point.of(problem, dict.fromkeys(fused_ways(problem), 9.0)))
        return kept[-1], ""

    class Group:
        group_name = "0"

    monkeypatch.setattr(ways.dist, "group", type("Groups", (), {"WORLD": Group()}))
    monkeypatch.setattr(ways.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ways.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ways, "workspace_for", lambda *_: None)
    monkeypatch.setattr(ways, "points_of", lambda _: kept)
    monkeypatch.setattr(ways, "slowest", lambda seconds, _: seconds)
    monkeypatch.setattr(ways.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ways, "tune_problem", tune_problem)
    return kept


PROBLEMS = ways.problems(["4096,2048", "7168,2048"], [1, 8], ["bfloat16"], 2, ways.LAYER_OPS)


def test_a_run_goes_on_where_another_was_stopped(points: list[Point]) -> None:
    assert len(PROBLEMS) == 8  # one token is reduced, but neither scattered nor gathered
    told = list[str]()
    assert (
        ways.tune_ways(PROBLEMS, 4.5, False, True, told.append)
        == "5 measured, 0 known before, 3 left: run it again"
    )
    assert ways.tune_ways(PROBLEMS, 4.5, False, True, told.append) == "3 measured, 5 known before, 0 left"
    assert ways.tune_ways(PROBLEMS, 4.5, False, True, told.append) == "0 measured, 8 known before, 0 left"
    assert len(told) == len(points) == 8
    points[3] = replace(points[3], sources=tuple((kind, "changed") for kind, _ in points[3].sources))
    assert ways.tune_ways(PROBLEMS, 4.5, False, True, told.append) == "1 measured, 7 known before, 0 left"
    assert ways.tune_ways(PROBLEMS, 100, True, True, told.append) == "8 measured, 0 known before, 0 left"


def test_layers_are_mixed_alike_on_all_ranks() -> None:
    def some(world: int) -> list[DenseProblem]:
        fitting = [size for size in ways.LAYERS if int(size.split(",")[0]) % world == 0]
        return ways.mixed(ways.problems(fitting, ways.LAYER_TOKENS, ["bfloat16"], world, ways.LAYER_OPS))

    assert some(2) == some(2)
    first = some(4)[:80]
    assert {each.op for each in first} == set(ways.LAYER_OPS)
    assert {each.m for each in first} >= {1, 4, 16, 64, 256, 1024, 4096, 16384}
