"""Which way a dense call takes on GPUs: from measured points, without a GPU."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")

import torch

from autofuse.bench.gpu.measured import problem_at
from autofuse.lowering.gpu.choice import choose as choices
from autofuse.lowering.gpu.choice import gpu, measure
from autofuse.lowering.gpu.choice.correction import Predictor
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Problem, ways_of
from autofuse.lowering.gpu.choice.model import shipped as shipped_model
from autofuse.lowering.gpu.choice.points import _SHIPPED, Point, Points, own_file, read, shipped, write
from autofuse.lowering.gpu.choice.timing import Timing
from autofuse.lowering.gpu.dense import measure as dense_measure
from autofuse.lowering.gpu.dense import plain
from autofuse.lowering.gpu.dense.factors import BIASED, MADE
from autofuse.lowering.gpu.dense.reductions import applies_tails
from autofuse.lowering.gpu.dense.ways import ASYNC_TP, REDUCE, SCATTER, TWO_SHOT, DenseProblem
from autofuse.lowering.gpu.embedding.ways import ExchangeProblem
from autofuse.lowering.gpu.memory.comparing import are_alike, told_of
from autofuse.lowering.runs import MEASURED, PREDICTED, Timed
from autofuse.native_kernels.gpu.memory import Need
from autofuse.passes.choice import device_table

COPIED = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
"""Ops of which copy engines move data."""
OPS = (*COPIED, "matmul_all_gather")
KINDS = sorted(path.stem for path in _SHIPPED.glob("*.json"))
SHIPPED: dict[str, Points] = {kind: tuple(replace(p, sources=()) for p in shipped(kind)) for kind in KINDS}
"""As a GPU of that kind has them, with no kernel changed since."""


def problem(op: str, m: int, k: int = 2048, n: int = 8192, world: int = 4) -> DenseProblem:
    return DenseProblem(op, m, k, n, world, torch.bfloat16)


def choose(asked: Problem, points: Points) -> str:
    return choices.choose(asked, choices.predictor_of(points)).way


def choose_launched(asked: Problem, points: Points) -> str:
    return choices.choose(asked, choices.predictor_of(points), launched=True).way


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_points_name_ways_that_exist(kind: str) -> None:
    """The choice takes the best of those that were measured, or one that was not."""
    model = shipped_model(kind)
    assert model is not None
    predictor = Predictor(model, SHIPPED[kind])
    for point in (p for p in SHIPPED[kind] if not p.gpu):
        of = problem_at(point)
        assert of is not None, point
        known, times = ways_of(of), dict(point.times)
        assert times.keys() <= known.keys(), point
        if len(times) > 4:  # else some ways were not measured, and may be faster
            way = choices.choose(of, predictor).way
            assert times.get(way, point.times[0][1]) == point.times[0][1], (point, way)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", [8, 40, 128, 512, 1000, 4096, 8192])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ways_need_memory_that_calls_can_share(op: str, m: int, world: int) -> None:
    found = ways_of(problem(op, m, world=world))
    assert CUBLAS_NCCL in found
    for name, way in found.items():
        if way.fused:
            need = way.need
            assert need.fits(need | Need(inbox=1 << 20)), name
            assert max(need.inbox, need.packets, need.words, need.gathers, need.copies) > 0, name


def test_who_asks_for_updates_gets_them() -> None:
    asked = replace(problem("matmul_reduce_scatter", 2048), update=True)
    points = (Point.of(asked, {"clusters": 2.0, CUBLAS_NCCL: 1.0}),)
    assert choose(asked, points) == choose_launched(asked, points) == "clusters update=1"
    assert "update" not in choose(replace(asked, m=8), points)
    for other in (replace(asked, update=False), replace(asked, m=128, world=2)):
        assert not any(way.is_update for way in ways_of(other).values())


@pytest.mark.parametrize("op", OPS)
def test_what_no_kernel_runs_is_left_to_torch(op: str) -> None:
    """Behind cuBLAS sums over the ranks are fused whatever the operands are."""
    reduces = op in ("matmul_all_reduce", "matmul_reduce_scatter")
    for odd, kinds in (
        (replace(problem(op, 64), aligned=False), {"sums", "rows", "row_packets"}),
        (problem(op, 64, k=2044), {"sums", "rows", "row_packets"}),
        (problem(op, 64, n=8188), {"sums"}),
        (problem(op, 64, n=8191, world=2), {"sums"}),
        (problem(op, 64, world=16), set()),
        (replace(problem(op, 64), dtype=torch.float32), set()),
    ):
        found = {way.kernel.kind for way in ways_of(odd).values() if way.kernel is not None}
        assert found == (kinds if reduces else set()), odd


def test_reports_get_the_times_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    here = problem("matmul_all_reduce", 512)
    point = Point.of(here, {"packets": 1.0, TWO_SHOT: 3.0, CUBLAS_NCCL: 4.0})
    agreed = choices._Agreement(choices.predictor_of((point,)))
    monkeypatch.setattr(choices, "_agreement", lambda workspace: agreed)
    # 512 rows are too many for packets.
    first, second, *others = choices.times_of(here, Mock())
    assert [first, second] == [
        Timed(TWO_SHOT, pytest.approx(3.0), MEASURED),
        Timed(CUBLAS_NCCL, pytest.approx(4.0), MEASURED),
    ]
    assert {each.known for each in others} == {PREDICTED}
    found = choices.times_of(replace(here, m=500), Mock())
    assert {each.name for each in found} == ways_of(here).keys()
    assert {each.known for each in found} == {PREDICTED}
    bags = ExchangeProblem(128, (64,) * 4, "bsc", torch.bfloat16)  # of any length
    assert [each.us for each in choices.times_of(bags, Mock())] == [None] * len(ways_of(bags))


def test_what_is_kept_of_new_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forget at the same problem, whatever calls they have prepared."""
    monkeypatch.setattr(choices, "MOST_PROBLEMS", 4)
    ranks = [Mock(calls={}, serial=False) for _ in range(2)]
    predictor = choices.predictor_of(())
    monkeypatch.setattr(choices, "_agreed", {rank: choices._Agreement(predictor) for rank in ranks})
    for m in (*range(8, 17), 8, 9):
        for _ in range(2):
            found = set()
            for number, rank in enumerate(ranks):
                kind = m + number  # one rank prepares other kinds of calls
                if kind not in rank.calls:
                    way, settled = choices.way_of(problem("matmul_all_reduce", m), rank, "variant", False)
                    rank.calls |= {kind: way} if settled else {}
                agreed = choices._agreed[rank]
                assert len(agreed.launched) <= len(agreed.chosen) == len(agreed.seen) <= 4
                found.add((way.name, settled, *agreed.chosen))
            assert len(found) == 1


def test_async_tp_is_for_many_rows_only() -> None:
    assert ASYNC_TP in ways_of(problem("matmul_reduce_scatter", 2048))
    assert ASYNC_TP not in ways_of(problem("matmul_reduce_scatter", 512))
    assert ASYNC_TP not in ways_of(problem("matmul_all_reduce", 2048))


@pytest.mark.parametrize("m", [512, 2048, 8192])
def test_matmuls_alone_are_both_kernels_with_nothing_to_move(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "programs", lambda: 132)
    found = plain.alone(m, 2048, 8192, torch.bfloat16)
    assert {name.split()[0] for name in found} == {"parts", "clusters"}
    found_ways = ways_of(problem("all_gather_matmul", m, world=1))
    assert all(found_ways[name].is_copied for name in found)
    assert len(found) <= 4


def test_ways_that_fail_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timings = {"a": Timing(2.0), "b": Timing(1.0, eager=True), "c": Timing(failed="OutOfMemoryError: c")}
    workspace = Mock()
    monkeypatch.setattr(
        measure, "time_all", lambda calls, *rest, **more: {way: timings[way] for way in calls}
    )
    assert measure.time_ways(workspace, dict.fromkeys(timings, print), 10.0) == {"a": 2.0}
    workspace.check.assert_called_once()
    assert [record.getMessage() for record in caplog.records] == [
        "b is not measured: it cannot be captured",
        "c is not measured: OutOfMemoryError: c",
    ]


def test_copy_engines_are_for_many_rows_only() -> None:
    for op in COPIED:
        few, many = ({way.is_copied for way in ways_of(problem(op, m)).values()} for m in (256, 2048))
        assert (True in few, True in many) == (False, True), op


def test_files_of_points_are_added_to(tmp_path: Path) -> None:
    path = tmp_path / "ways.json"
    first = Point.of(problem("matmul_all_reduce", 8), {"packets": 2.0, CUBLAS_NCCL: 1.0})
    other = Point.of(problem("matmul_all_reduce", 16), {"packets": 3.0})
    write(path, (first, other))
    assert [p.times[0] for p in read(path)] == [(CUBLAS_NCCL, 1.0), ("packets", 3.0)]
    write(path, (Point.of(problem("matmul_all_reduce", 8), {"packets": 0.5}),))
    assert [p.times for p in read(path)] == [(("packets", 0.5),), (("packets", 3.0),)]


@pytest.mark.parametrize(
    "broken",
    [
        {"op": 1},
        {"m": 0},
        {"k": "8"},
        {"n": 8.5},
        {"times": [["packets", 0]]},
        {"times": [["packets", math.nan]]},
    ],
)
def test_a_broken_file_is_named(
    broken: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks: the others wait for what rank 0 hands round."""
    good = Point.of(problem("matmul_all_reduce", 8), {"packets": 2.0}).values
    path = tmp_path / "ways.json"
    path.write_text(json.dumps([good, broken if "op" in broken else good | broken]))
    monkeypatch.setattr(choices, "known", lambda device: read(path))
    told: list[str] = []

    def meet(mine: str) -> list[str]:
        told.append(mine)
        return [told[0], ""]

    for rank in range(2):
        with pytest.raises(ValueError, match=r"rank 0: .*ways\.json holds no measured points .* delete it"):
            choices.predictor_for(Mock(rank=rank, meet=meet))
    path.write_text(json.dumps([good]))
    assert [point.values for point in read(path)] == [good]


def test_what_the_host_needs_counts_outside_of_graphs() -> None:
    """Of calls that are shorter than their launch, the one that is launched soonest."""
    few = DenseProblem("matmul_all_reduce", 8, 2048, 8192, 4, torch.bfloat16)
    many = DenseProblem("matmul_all_reduce", 8192, 2048, 8192, 4, torch.bfloat16)

    def point(of: Problem, times: dict[str, float]) -> Point:
        return Point.of(of, dict.fromkeys(ways_of(of), 9999.0) | times)

    points = (
        point(few, {"packets": 12.0, "cublas+two_shot": 20.0, "cublas+nccl": 24.0}),
        point(many, {"clusters": 130.0, "clusters copied=1": 120.0, "cublas+nccl": 180.0}),
    )
    # The host takes less time for one launch than for the ops that the launch replaces. For the 48 copies of
    # `many` it takes 576 us.
    assert choose(few, points) == choose_launched(few, points) == "packets"
    assert (choose(many, points), choose_launched(many, points)) == ("clusters copied=1", "clusters")
    # A way of copies is taken if the call takes the GPU three times as long: 1728 us.
    for us, way in ((1800.0, "clusters copied=1"), (1600.0, "clusters")):
        long = point(many, {"clusters": 1.01 * us, "clusters copied=1": us, "cublas+nccl": 2 * us})
        assert choose_launched(many, (long,)) == way
    parts = replace(many, op="matmul_reduce_scatter")
    streams = (point(parts, {"clusters": 250.0, ASYNC_TP: 240.0, "cublas+nccl": 280.0}),)
    assert (choose(parts, streams), choose_launched(parts, streams)) == (ASYNC_TP, "clusters")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_owners_apply_a_tail_only_where_all_ranks_have_agreed_on_it(world: int) -> None:
    def applying(op: str, written: int) -> set[str]:
        problem = DenseProblem(op, 16, 512, 4096, world, torch.bfloat16, written=written)
        return {name for name, way in ways_of(problem).items() if applies_tails(way, problem)}

    assert applying(REDUCE, 0) == {"rows once=1", "row_packets"}
    assert applying(REDUCE, 8192) == {"rows once=1", "row_packets", "rows"}
    assert applying(SCATTER, 0) == {"rows", "row_packets"}


def test_the_own_file_lies_apart_from_those_of_the_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which reads all tables of its folder, and knows no others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    path = own_file(torch.device("cuda", 0))
    points = SHIPPED["h200"][:1]
    write(path, points)
    assert read(path) == points
    assert path.is_relative_to(tmp_path)
    assert device_table.tables() == device_table.shipped()


@pytest.mark.parametrize(
    ("nvml", "link"),
    [
        (OSError("no such library"), gpu.NVLINK),
        ({"handle": 999}, gpu.NVLINK),
        ({"failed": 3}, gpu.NVLINK),
        ({"errors": (0, 3)}, gpu.NVLINK),
        ({"values": (18, 0)}, gpu.NVLINK),
        ({"values": (18, 26562)}, 18 * 26562.0),
    ],
)
def test_links_of_a_gpu_are_known_where_nvml_does_not_tell(
    nvml: OSError | dict[str, Any], link: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Mock:
        if isinstance(nvml, OSError):
            raise nvml

        def values(handle: object, count: int, asked: Any) -> int:
            for i in range(count):
                asked[i].error = nvml.get("errors", (0, 0))[i]
                # The rest of the union is not written.
                asked[i].value = nvml.get("values", (18, 26562))[i] | 7 << 40
            return int(nvml.get("failed", 0))

        found = Mock()
        found.nvmlDeviceGetHandleByUUID.return_value = nvml.get("handle", 0)
        found.nvmlDeviceGetFieldValues.side_effect = values
        return found

    monkeypatch.setattr(gpu.ctypes, "CDLL", load)
    assert gpu._link("a uuid") == link


@pytest.mark.parametrize("times", [{}, {CUBLAS_NCCL: 9.0}])
def test_tuning_keeps_what_could_be_measured(
    times: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Mock(world=4, programs=132)
    kept = Mock(return_value=tmp_path)
    for name, value in {
        "workspace_for": lambda *at: workspace,
        "measure": lambda workspace, problem, trials, worth: Point.of(problem, times),
        "keep": kept,
        "own_file": lambda device: tmp_path,
    }.items():
        monkeypatch.setattr(dense_measure, name, value)
    monkeypatch.setattr(torch.distributed, "group", Mock())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    point, path = dense_measure.tune_problem("matmul_all_reduce", 8, 2048, 8192, torch.bfloat16)
    assert (dict(point.times), path) == (times, tmp_path)
    assert kept.called == bool(times)


@pytest.mark.parametrize("op", [REDUCE, SCATTER])
def test_ranks_may_have_any_k_where_cublas_multiplies(op: str) -> None:
    """4096 on 3 ranks: no kernel that multiplies takes any of these parts."""
    for k in (1366, 1364):
        problem = DenseProblem(op, 96, k, 4096, 3, torch.bfloat16, terms=(k,))
        fused = [way.kernel for way in ways_of(problem).values() if way.kernel is not None]
        assert fused
        assert all(kernel.takes_product for kernel in fused)
        assert problem.free == ("k", "terms")
    assert not DenseProblem(op, 96, 1368, 4096, 3, torch.bfloat16).free


@pytest.mark.parametrize(
    ("differs", "alike"),
    [({}, True), ({"product": BIASED}, False), ({"k": 8}, False), ({"product": MADE, "k": 8}, False)],
)
def test_ranks_that_bring_different_products_run_what_the_op_replaces(
    differs: dict[str, Any], alike: bool
) -> None:
    """Such as a bias that one rank adds."""
    mine = problem("matmul_all_reduce", 64)
    told = [told_of(mine.op, "here", "sums", each) for each in (mine, replace(mine, **differs))]
    assert are_alike(told, "g") == alike
    with pytest.raises(RuntimeError, match="the ranks disagree"):
        are_alike([told[0], told_of(mine.op, "here", "sums", replace(mine, n=8))], "g")
