"""What ways are predicted to take: formulas, and the points that correct them. No GPU is needed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from autofuse.bench.gpu.holdout import FORMS, judge, summary
from autofuse.bench.gpu.measured import fit_shipped, samples_at
from autofuse.lowering.gpu.choice import sources
from autofuse.lowering.gpu.choice.choose import choose, predictor_of
from autofuse.lowering.gpu.choice.correction import Predicted, Predictor
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Problem, ways_of
from autofuse.lowering.gpu.choice.model import Model, measured, model_of, path_of
from autofuse.lowering.gpu.choice.points import Point, shipped
from autofuse.lowering.gpu.dense.ways import (
    ASYNC_TP,
    GATHER,
    ONE_SHOT,
    PUBLISH,
    REDUCE,
    SCATTER,
    TWO_SHOT,
    DenseProblem,
)
from autofuse.lowering.gpu.embedding.ways import BACKWARD, OP, UPDATE, ExchangeProblem
from autofuse.lowering.gpu.experts.reduced import TokensProblem
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem, ExpertProblem

BF16 = torch.bfloat16
SHIPPED = shipped(measured().gpu.name)


def dense(op: str, m: int, k: int = 4096, n: int = 4096, world: int = 4) -> DenseProblem:
    return DenseProblem(op, m, k, n, world, BF16)


PROBLEMS: list[Problem] = [
    *(
        dense(op, m, *size, world)
        for op in (REDUCE, SCATTER, GATHER, PUBLISH)
        for m in (8, 64, 200, 1024, 4096)
        for size in ((2048, 3072), (1280, 8192))
        for world in (2, 4, 8)
    ),
    *(replace(dense(op, 1024, 4096), terms=(3072, 512, 512)) for op in (REDUCE, SCATTER)),
    replace(dense(GATHER, 1024, n=6144), widths=(4096, 1024, 1024)),
    *(ExpertProblem(op, 8, rows, 2048, 1024, 4, BF16) for op in (COMBINE, DISPATCH) for rows in (16, 1024)),
    *(DroplessProblem(op + DROPLESS, 8, 2048, 1024, 4, BF16) for op in (COMBINE, DISPATCH)),
    *(ExchangeProblem(512, (1024,) * 4, "bsc", BF16, op=op) for op in (OP, BACKWARD, UPDATE)),
]


def times(predictor: Predictor, problem: Problem) -> dict[str, float]:
    return {each.way: each.us for each in predictor.times(problem)}


SEVERAL = [
    (replace(dense(SCATTER, 1024, 4096), terms=(3072, 1024)), dense(SCATTER, 1024, 4096)),
    (replace(dense(GATHER, 1024, n=6144), widths=(4096, 1024, 1024)), dense(GATHER, 1024, n=6144)),
]


@pytest.mark.parametrize(("several", "one"), SEVERAL, ids=str)
def test_points_of_several_matmuls_are_their_own(several: DenseProblem, one: DenseProblem) -> None:
    """At a point its own time comes out; a point of one matmul of their total size counts as farther away."""
    way = next(name for name, way in ways_of(several).items() if way.fused)
    predicted = times(predictor_of(()), several)
    for name in (way, CUBLAS_NCCL):
        point = Point.of(several, {name: 3 * predicted[name]})
        assert times(predictor_of((point,)), several)[name] == pytest.approx(3 * predicted[name], rel=1e-3)
        assert times(predictor_of((point,)), one)[name] == times(predictor_of(()), one)[name]
        assert 1 < factor(several, Point.of(one, {name: 3 * times(predictor_of(()), one)[name]}), name) < 3


def factor(problem: Problem, point: Point, way: str) -> float:
    """What a point changes of the time of a way."""
    return times(predictor_of((point,)), problem)[way] / times(predictor_of(()), problem)[way]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_way_has_a_time(problem: Problem) -> None:
    """Those of torch, too, so that nothing is chosen that is slower than they are predicted to be."""
    found = predictor_of(SHIPPED).times(problem)
    assert {each.way for each in found} == ways_of(problem).keys()
    assert all(0 < each.us < math.inf for each in found)
    assert list(found) == sorted(found, key=lambda each: (each.us, each.way))


def test_torch_is_a_candidate() -> None:
    for m in (8, 1024, 8192):
        names = times(predictor_of(()), dense(REDUCE, m)).keys()
        assert {CUBLAS_NCCL, TWO_SHOT} | ({ONE_SHOT} if m < 8192 else set()) <= names
    for op in (SCATTER, GATHER):
        assert {CUBLAS_NCCL, ASYNC_TP} <= times(predictor_of(()), dense(op, 2048)).keys()


@pytest.mark.parametrize("problem", PROBLEMS[:120], ids=str)
def test_more_takes_longer(problem: DenseProblem) -> None:
    """Twice the tokens, K or N; on a GPU whose peaks are twice as high nothing takes longer."""
    model, ways = measured(), ways_of(problem)
    gpu = model.gpu
    fast = replace(model, gpu=replace(gpu, clock=2 * gpu.clock, memory=2 * gpu.memory, link=2 * gpu.link))
    for name, way in ways.items():
        us = model.us(way, problem)
        for size in ("m", "k", "n"):
            larger = replace(problem, **{size: 2 * getattr(problem, size)})
            if name in ways_of(larger):
                assert model.us(way, larger) >= us, (name, size)
        assert us / 2 <= fast.us(way, problem) <= us, name


def test_a_point_is_its_own_time_and_fades() -> None:
    here = dense(REDUCE, 256)
    way = next(name for name, way in ways_of(here).items() if way.fused)
    us = 2 * times(predictor_of(()), here)[way]
    point = Point.of(here, {way: us})
    assert Predicted(way, pytest.approx(us, abs=0.01), True) in predictor_of((point,)).times(here)
    away = [factor(replace(here, k=here.k << i), point, way) for i in range(5)]
    assert away == sorted(away, reverse=True)
    assert away[0] == pytest.approx(2, rel=1e-3)
    assert 1 < away[4] < 1.3
    assert not any(each.measured for each in predictor_of((point,)).times(replace(here, k=8192)))
    others = times(predictor_of((point,)), here).items() - times(predictor_of(()), here).items()
    kind = way.split()[0]
    alike = {name for name in ways_of(here) if name.split()[0] == kind and "copied=1" not in name}
    assert {name for name, _ in others} == alike, "ways of other kernels are what they were"
    assert all(1 < factor(here, point, name) < 2 for name in alike - {way})


def test_between_points_of_one_weight_the_factor_is_straight() -> None:
    low, high = dense(REDUCE, 256), dense(REDUCE, 1024)
    way = "clusters bn=128 stages=5"
    base = predictor_of(())
    points = (
        Point.of(low, {way: 2 * times(base, low)[way]}),
        Point.of(high, {way: 0.5 * times(base, high)[way]}),
    )
    found = [
        times(predictor_of(points), dense(REDUCE, m))[way] / times(base, dense(REDUCE, m))[way]
        for m in (256, 362, 512, 724, 1024)
    ]
    assert found == pytest.approx([2, 2**0.5, 1, 2**-0.5, 0.5], rel=0.02)


def test_a_far_point_names_no_way() -> None:
    """One that is wrong by 3 for another weight changes no time by a third."""
    here = dense(GATHER, 1024, 4096, 1024)
    far = dense(GATHER, 1024, 16384, 13312)
    base = predictor_of(())
    slow = choose(far, base).way
    assert slow in ways_of(here)
    point = Point.of(
        far, {name: us * (1 / 3 if name == slow else 3) for name, us in times(base, far).items()}
    )
    for name in ways_of(here):
        if name in ways_of(far):
            assert 0.75 < factor(here, point, name) < 1.34, name


def test_a_changed_kernel_makes_its_own_times_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dense(REDUCE, 16)
    base = times(predictor_of(()), here)
    point = Point.of(here, {name: 2 * us for name, us in base.items()})
    assert point.is_fresh(here)
    assert Point.parsed(json.loads(json.dumps(point.values))) == point
    real = sources.digest_of
    changed = "cuda/kernels/matmul_words.cu"
    monkeypatch.setattr(
        "autofuse.lowering.gpu.choice.kernel.digest_of", lambda s: "new" if s == changed else real(s)
    )
    assert not point.is_fresh(here)
    for each in predictor_of((point,)).times(here):
        of_words = each.way.startswith("words")
        assert each.measured != of_words
        assert (1.5 < each.us / base[each.way] < 1.99) == of_words
    older = replace(point, sources=())
    assert older.is_fresh(here), "tables that do not tell are taken as they are"


def test_digests_are_of_all_device_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "cuda/kernels/some.cu": '#include "deep.cuh"\n',
        "cuda/kernels/some.py": "x = 1\n",
        "cuda/include/deep.cuh": '#include "deeper.cuh"  // why\n',
        "cuda/include/deeper.cuh": "int x;\n",
        "triton/other.py": "from .gemm import product\n",
        "triton/gemm.py": "y = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sources, "_ROOT", tmp_path)

    def both() -> tuple[str, str]:
        sources.digest_of.cache_clear()
        return sources.digest_of("cuda/kernels/some.cu"), sources.digest_of("triton/other.py")

    first = both()
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text + ("int z;" if "cuda" in name and ".cu" in name else "z = 1"))
        now = both()
        path.write_text(text)
        assert [a != b for a, b in zip(first, now, strict=True)] == ["cuda" in name, "triton" in name], name
    (tmp_path / "cuda/include/deep.cuh").write_text('// More\n\n#include "deeper.cuh"  // another reason\n')
    (tmp_path / "triton/gemm.py").write_text("# More\n\ny = 1\n\n")
    assert both() == first
    sources.digest_of.cache_clear()


def test_ranks_that_are_told_predict_alike() -> None:
    """To the last bit: by what rank 0 hands round as JSON."""
    told = json.loads(json.dumps([point.values for point in SHIPPED]))
    mine, theirs = predictor_of(SHIPPED), predictor_of(tuple(map(Point.parsed, told)))
    for problem in PROBLEMS:
        assert mine.times(problem) == theirs.times(problem)


@pytest.mark.parametrize("size", ["clock", "multiprocessors"])
def test_another_gpu_scales(size: str) -> None:
    """Points of the measured kind correct it by their factors, not by their times.

    One has slower multiprocessors, another has fewer.
    """
    known = measured().gpu
    half = replace(known, name="half", memory=known.memory / 2, link=known.link / 2)
    half = replace(half, **{size: getattr(known, size) // 2})
    points = shipped(half.name)
    assert known.name in {point.gpu for point in points}
    assert "" not in {point.gpu for point in points}
    there, here = Predictor(model_of(half), points), predictor_of(SHIPPED)
    for problem in (dense(REDUCE, 2048, 2048, 8192), dense(SCATTER, 8192, 13312, 16384)):
        slow = times(there, problem)
        assert not any(each.measured for each in there.times(problem))
        for name, us in times(here, problem).items():
            assert 1.5 < slow[name] / us < 2.3, name


def test_a_fit_takes_numbers_of_ranks_that_a_kind_lacks_from_another_kind() -> None:
    """Of kernels, and of those alone for which the kind has points of its own."""
    times = {"words": 20.0, "clusters bn=128 stages=5": 30.0, "rows": 35.0, CUBLAS_NCCL: 40.0}
    four = Point.of(dense(REDUCE, 256), {way: us for way, us in times.items() if way != "rows"})
    other = Point.of(dense(REDUCE, 256, world=2), {**times, "words once=1": 21.0})
    tail = Point.of(replace(dense(REDUCE, 256, world=2), written=4096), {"words once=1": 25.0})
    elsewhere = [replace(point, gpu="h200") for point in (other, four, tail)]
    own, found = (samples_at(measured().gpu, [four, *more]) for more in ([], elsewhere))
    assert {(each.way.name, each.problem.world) for each in own} == {
        (way, 4) for way in times if way != "rows"
    }
    taken = [each for each in found if each.gpu is not None]
    assert len(found) - len(own) == len(taken) == 2  # without that of a tail, which has constants of its own
    assert {(each.way.name, each.problem.world) for each in taken} == {
        ("words once=1", 2),
        ("clusters bn=128 stages=5", 2),
    }
    assert {each.gpu for each in taken} == {measured().gpu}


@pytest.mark.full
def test_shipped_constants_are_what_the_command_fits(tmp_path: Path) -> None:
    path = fit_shipped(measured().gpu.name, tmp_path / "constants.json")
    found, known = (Model.from_json(file.read_text()) for file in (path, path_of(measured().gpu.name)))
    assert found.gpu == known.gpu
    assert found.constants.keys() == known.constants.keys()
    for problem in PROBLEMS:
        for way in ways_of(problem).values():
            assert found.us(way, problem) == pytest.approx(known.us(way, problem), rel=0.02)
    with pytest.raises(ValueError, match="no points of it are shipped"):
        fit_shipped("h900")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_quality_of_choice_at_weights_that_were_left_out() -> None:
    mean, most, worst = summary(judge(FORMS["formulas, factors, points"], measured().gpu, SHIPPED))
    assert mean < 1.03
    assert most < 1.13
    assert worst < 1.5


def test_points_of_other_experts_say_which_way_is_faster() -> None:
    """By the factors of their own layer; plain calls of the op multiply other matrices, and say nothing."""
    problem = TokensProblem(REDUCE, 64, 2880, 2, torch.bfloat16, 132, True, 64, 4, 1440)
    other = problem.at(f"{REDUCE}, top 2 of 8", 64, 1440, 2880, 2)
    assert (other.top, other.experts) == (2, 8)
    assert problem.is_kin(other.measured_as)
    assert not problem.is_kin(REDUCE)
    assert not problem.is_kin(f"{SCATTER}, top 2 of 8")
    ways = list(ways_of(problem))
    model = measured()
    for best in ways:
        times = {way: model.us(ways_of(other)[way], other) * (1 if way == best else 3) for way in ways}
        predictor = Predictor(model, (Point.of(other, times),))
        plain = Predictor(model, (replace(Point.of(other, times), op=REDUCE),))
        assert choose(problem, predictor).way == best
        assert plain.times(problem) == Predictor(model, ()).times(problem)
