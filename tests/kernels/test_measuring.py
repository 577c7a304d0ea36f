"""What `AUTOFUSE_MEASURE` measures before a first call, and when it does not; timing itself is replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")

import torch

from autofuse import config
from autofuse.lowering.gpu.choice import calls, measure
from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.choose import predictor_of
from autofuse.lowering.gpu.choice.correction import Predictor
from autofuse.lowering.gpu.choice.kernel import Problem, Way, ways_of
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.embedding.ways import BACKWARD, OP, UPDATE, ExchangeProblem
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem, ExpertProblem
from autofuse.options import measure_if_tuned, resolve

BF16 = torch.bfloat16
ROWS = DenseProblem(REDUCE, 512, 2048, 8192, 4, BF16)
PROBLEMS: list[Problem] = [
    *(replace(ROWS, op=op) for op in (REDUCE, SCATTER, GATHER, PUBLISH)),
    replace(ROWS, dim=1),
    *(ExpertProblem(op, 8, 1024, 2048, 1024, 4, BF16) for op in (COMBINE, DISPATCH)),
    *(DroplessProblem(op + DROPLESS, 8, 2048, 1024, 4, BF16) for op in (COMBINE, DISPATCH)),
    *(ExchangeProblem(512, (1024,) * 4, "bsc", BF16, op=op) for op in (OP, BACKWARD, UPDATE)),
]


class Group:
    """What a group has measured. seconds: how long a measurement takes; slow: the slowest way."""

    def __init__(self) -> None:
        self.start()
        self.points: tuple[Point, ...] = ()
        self.timed: list[set[str]] = []
        self.seconds = 1.0
        self.capturing = False

    def start(self) -> None:
        """New processes, which have measured nothing."""
        self.workspace = Mock(rank=0, serial=False)

    def keep(self, workspace: Mock, point: Point) -> None:
        self.points = (point, *self.points)

    def time_ways(self, workspace: Mock, calls: Mapping[str, Callable[[int], Any]], us: float) -> Any:
        self.timed.append(set(calls))
        for call in calls.values():
            call(0)
        return {name: 10.0 + i for i, name in enumerate(sorted(calls))}

    def decide(self, call: GpuCall) -> None:
        with config.patch(measure=True):
            call.decide(self.capturing)

    def call(self, problem: Problem, run: Callable[[Way], Any] = lambda way: [0], **more: Any) -> GpuCall:
        more["unfused"] = lambda: run(None)  # type: ignore[arg-type]
        return GpuCall(problem.op, Mock(site="here"), self.workspace, problem, run, **more)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    found = Group()
    monkeypatch.setattr(measure, "points_of", lambda workspace: found.points)
    monkeypatch.setattr(measure, "predictor_for", lambda workspace: predictor_of(found.points))
    monkeypatch.setattr(measure, "keep", found.keep)
    monkeypatch.setattr(measure, "time_ways", found.time_ways)
    monkeypatch.setattr(measure, "together", lambda work, group: work())
    monkeypatch.setattr(measure, "slowest", lambda seconds, group: found.seconds)
    monkeypatch.setattr(calls, "way_of", lambda *at: (None, True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.measured_as)
def test_every_op_is_measured_once(
    problem: Problem, group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    call = group.call(problem)
    group.capturing = True
    group.decide(call)
    assert group.timed == [], "a capture cannot wait"
    group.capturing = False
    for _ in range(3):
        group.decide(call)
    (timed,), (point,) = group.timed, group.points
    assert timed == dict(point.times).keys() <= ways_of(problem).keys()
    assert {way.name for way in ways_of(problem).values() if not way.fused} <= timed
    assert any(ways_of(problem)[name].fused for name in timed)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{len(timed)} ways of {point.op} m=" in told
    assert "(1 of 120 s)" in told


def test_a_size_that_ranks_tell_each_other_is_that_of_the_call_that_was_measured(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = DroplessProblem(DISPATCH + DROPLESS, 8, 2048, 1024, 4, BF16)
    named: list[str] = []
    more = {"named": lambda way: named.append(way.name) or [0], "told": lambda: replace(problem, rows=8192)}
    for _ in range(2):
        group.decide(group.call(problem, **more))
        group.start()
    (point,) = group.points
    assert point.m == 8192
    assert "m=8192" in capsys.readouterr().err
    assert {*named} == {name for name, way in ways_of(problem).items() if way.fused}


def test_ways_that_are_predicted_to_be_slow_are_left_out(group: Group) -> None:
    gather = replace(ROWS, op=GATHER, k=8192, n=2048)
    group.decide(group.call(gather))
    (timed,) = group.timed
    times = {each.way: each.us for each in predictor_of(()).times(gather)}
    assert times.keys() > timed
    assert all(times[way] > 1.4 * min(times.values()) for way in times.keys() - timed)


def test_ways_without_fitted_constants_are_measured(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of their times."""
    short = replace(ROWS, m=1, k=256, n=1024)
    known = predictor_of(()).model
    fitted = {name: of for name, of in known.constants.items() if not name.endswith((" sums", " rows"))}
    predictor = Predictor(replace(known, constants=fitted), ())
    monkeypatch.setattr(measure, "predictor_for", lambda workspace: predictor)
    group.decide(group.call(short))
    (timed,) = group.timed
    measured = short.rounded()
    assert measured is not None
    times = {each.way: each.us for each in predictor.times(measured)}
    slow = {way for way in timed if times[way] > 1.5 * min(times.values()) and ways_of(short)[way].fused}
    assert slow
    for way in slow:
        models = [work.model for work in ways_of(short)[way].work(short)]
        assert not predictor.model.constants.keys() >= set(models), way


def test_calls_that_are_cut_by_columns_have_points_of_their_own(group: Group) -> None:
    columns = replace(ROWS, dim=1)
    group.decide(group.call(columns))
    assert [point.op for point in group.points] == ["matmul_all_reduce, columns"]
    predictor = predictor_of(group.points)
    assert any(each.measured for each in predictor.times(columns))
    assert not any(each.measured for each in predictor.times(ROWS))
    group.decide(group.call(ROWS))
    assert len(group.timed) == 2


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("op", [REDUCE, SCATTER, GATHER, PUBLISH])
def test_ranks_can_share_out_the_rounded_rows(op: str, world: int) -> None:
    for m in (1, 2, 3, 7, 8, 100, 1000):
        rows = m * world if op in (SCATTER, GATHER) else m
        rounded = replace(ROWS, op=op, m=rows, world=world).rounded()
        assert rounded is not None
        assert max(rows, world) <= rounded.m < 2 * max(rows, world)
        if op in (SCATTER, GATHER):
            assert rounded.m % world == 0
            assert rounded.rounded() == rounded


def test_time_is_bounded(group: Group) -> None:
    group.seconds = 70.0
    for m in (256, 512, 1024, 2048):
        group.decide(group.call(replace(ROWS, m=m)))
    assert len(group.timed) == 2


def test_a_kernel_that_has_changed_is_measured_again(group: Group) -> None:
    group.decide(group.call(ROWS))
    (point,) = group.points
    group.start()
    group.decide(group.call(ROWS))
    assert len(group.timed) == 1
    group.start()
    group.points = (replace(point, sources=tuple((kind, "older") for kind, _ in point.sources)),)
    group.decide(group.call(ROWS))
    assert len(group.timed) == 2


def test_what_calls_change_is_as_before(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    table, problem = torch.arange(6.0), PROBLEMS[-1]
    seen = []

    def run(way: Way) -> list[int]:
        seen.append(table.clone())
        table.add_(1)
        return [0]

    group.decide(group.call(problem, run, changed=(table,)))
    assert len(seen) > 2
    assert torch.equal(table, torch.arange(6.0))
    group.start()
    group.points = ()

    def fails(*at: object) -> None:
        table.add_(1)
        raise RuntimeError("an earlier call has failed")

    monkeypatch.setattr(measure, "time_ways", fails)
    with pytest.raises(RuntimeError, match="an earlier call has failed"):
        group.decide(group.call(problem, run, changed=(table,)))
    assert torch.equal(table, torch.arange(6.0))


@pytest.mark.parametrize("changed", [True, False])
def test_who_has_no_memory_measures_nothing(
    changed: bool, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for operands nor for a copy of what a call changes; all ranks hear of it, and try once."""
    met = []

    def together(work: Callable[[], Any], workspace: Mock) -> None:
        met.append(work)
        raise RuntimeError("rank 1: out of memory")

    monkeypatch.setattr(measure, "together", together)
    trials = Mock(side_effect=RuntimeError("out of memory"))
    more: dict[str, Any] = {"changed": (torch.zeros(1),)} if changed else {"trials": trials}
    for _ in range(3):
        group.decide(group.call(PROBLEMS[-1], **more))
    assert len(met) == 1
    assert group.timed == []
    assert group.points == ()
    assert not trials.called, "alone, while the other ranks wait"


def test_who_cannot_write_goes_on_with_the_others(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Mock(side_effect=PermissionError("read-only file system"))
    monkeypatch.setattr(measure, "keep", kept)
    for _ in range(3):
        group.decide(group.call(ROWS))
    assert kept.call_count == len(group.timed) == 1


def test_a_way_that_cannot_be_captured_raises(group: Group) -> None:
    """So that nothing is timed in place of it."""
    call = group.call(PROBLEMS[-1], lambda way: None)
    trials = call._itself(group.workspace, call.problem)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        trials["strips"](0)


@pytest.mark.parametrize(
    ("mode", "options", "measures"),
    [
        ("reduce-overhead", None, False),
        ("max-autotune", None, False),
        ("max-autotune-no-cudagraphs", {"triton.cudagraphs": True}, False),
        ("max-autotune", {"triton.cudagraphs": False}, True),
        ("max-autotune-no-cudagraphs", None, True),
    ],
)
def test_max_autotune_measures_where_inductor_captures_nothing(
    mode: str, options: dict[str, Any] | None, measures: bool
) -> None:
    with config.patch(measure=False):
        measure_if_tuned(resolve(mode, options)[1])
        assert config.measure == measures
