"""Times of schedules on GPUs: what `split` is predicted to take, when `auto` takes it, and what is told."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import sympy
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn

pytest.importorskip("triton")

import autofuse
from autofuse import passes
from autofuse.bench.gpu.holdout import _is_whole
from autofuse.bench.gpu.measured import problem_at, weight_of
from autofuse.bench.pieces import Layer
from autofuse.lowering.gpu import support
from autofuse.lowering.gpu.choice.choose import choose
from autofuse.lowering.gpu.choice.correction import Predictor
from autofuse.lowering.gpu.choice.model import shipped as shipped_model
from autofuse.lowering.gpu.choice.points import Point, shipped
from autofuse.lowering.gpu.choice.work import Product
from autofuse.lowering.gpu.dense.ways import GATHER, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.dense.work import INDUCTOR_TAIL, collective_work, tail_work
from autofuse.passes.choice.cost_model import Numbers, Task
from autofuse.passes.choice.crossover import Known
from autofuse.passes.choice.gpu_pricing import SPLIT_ERROR, GpuPricing
from autofuse.passes.choice.scheduled import Cluster, cheapest
from autofuse.passes.graph.layout import Size
from autofuse.passes.report import Report
from autofuse.passes.schedules import search
from autofuse.passes.schedules.schedule import SCHEDULES, SPLIT, UNCHANGED

from .harness import fake_group
from .test_on_gpus import moved

KINDS = ("h100-80gb-hbm3", "h200")
LEGAL = SCHEDULES[1:]
HIDDEN = 4096


def pricing_of(kind: str) -> GpuPricing:
    model = shipped_model(kind)
    assert model is not None
    return GpuPricing(Predictor(model, shipped(kind)))


@pytest.fixture(params=KINDS)
def pricing(request: pytest.FixtureRequest) -> GpuPricing:
    return pricing_of(request.param)


def layer(tokens: Size, world: int, padded: Size | None = None, ratio: float = 1.0) -> list[Cluster]:
    """That of the benchmark."""
    inner, whole = round(ratio * HIDDEN) // world, 2 * HIDDEN * tokens
    task = Task(REDUCE, world, "bfloat16", "direct", whole, ((tokens, inner, HIDDEN),))
    gather = Task(
        GATHER, world, "bfloat16", "direct", 2 * HIDDEN // world * tokens, ((tokens, HIDDEN, inner),)
    )
    rows = {"rows": tokens, "padded": tokens if padded is None else padded}
    return [Cluster(task, whole, whole + 2 * HIDDEN, n * whole, (gather,), **rows) for n in (2, 1)]


def us(pricing: GpuPricing, schedule: str, clusters: list[Cluster]) -> float:
    found = [pricing.us(schedule, each, Numbers()) for each in clusters]
    known = [each for each in found if each is not None]
    assert len(known) == len(found)
    return sum(known)


@pytest.mark.parametrize("world", [2, 4])
def test_a_schedule_takes_what_its_parts_take(pricing: GpuPricing, world: int) -> None:
    tokens, inner, predictor = 1024, HIDDEN // world, pricing.predictor
    cluster, _ = layer(tokens, world)
    model, whole = predictor.model, 2 * HIDDEN * tokens

    def op(name: str, k: int, n: int) -> float:
        return choose(DenseProblem(name, tokens, k, n, world, torch.bfloat16), predictor).us

    def of(work: Any) -> float:
        return float(work.us(model.of, model.gpu))

    behind = 4 * whole + 2 * HIDDEN
    read = of(Product(tokens, HIDDEN, inner))
    unchanged = op(REDUCE, inner, HIDDEN) + of(tail_work(behind, INDUCTOR_TAIL)) + read
    assert us(pricing, UNCHANGED, [cluster]) == pytest.approx(unchanged)
    split = op(SCATTER, inner, HIDDEN) + of(tail_work(behind / world, INDUCTOR_TAIL))
    split += op(GATHER, HIDDEN, inner)
    assert us(pricing, SPLIT, [cluster]) == pytest.approx(split)
    # The sum of a gradient over rows, and a collective without a matmul on either side.
    total = Task(REDUCE, world, "float32", "direct", 4 * HIDDEN)
    alone = Task(REDUCE, world, "bfloat16", "direct", whole)
    gather = Task(GATHER, world, "bfloat16", "direct", whole // world, kept=whole)
    bare = Cluster(alone, whole, whole, whole, (gather,), (total,), rows=tokens, padded=tokens)
    parts = [("reduce_scatter", whole), ("all_gather", whole), ("all_reduce", 4 * HIDDEN)]
    split = sum(of(collective_work(kind, nbytes, world)) for kind, nbytes in parts)
    split += of(tail_work(3 * whole / world, INDUCTOR_TAIL))
    assert us(pricing, SPLIT, [bare]) == pytest.approx(split)
    unchanged = of(collective_work("all_reduce", whole, world)) + of(tail_work(3 * whole, INDUCTOR_TAIL))
    assert us(pricing, UNCHANGED, [bare]) == us(pricing, "every", [bare]) == pytest.approx(unchanged)


def _measured_ratios() -> Iterator[tuple[float, float]]:
    """Ratios of `split` to `unchanged` where all ops of both were measured in all ways: as predicted without
    the points of their weights, and as measured."""
    points, model = shipped("h200"), shipped_model("h200")
    assert model is not None
    own = {(p.op, p.world, p.m, p.k, p.n): p for p in points if not p.gpu and _is_whole(p)}
    predictors: dict[tuple[int, int], Predictor] = {}

    def predicted(point: Point) -> float:
        weight, problem, times = weight_of(point), problem_at(point), dict(point.times)
        assert problem is not None
        if weight not in predictors:
            predictors[weight] = Predictor(model, tuple(p for p in points if weight_of(p) != weight))
        # A way that is newer than the point may be faster than all that were measured.
        return next(each.us for each in predictors[weight].times(problem) if each.way in times)

    def best(point: Point) -> float:
        return min(time for _, time in point.times)

    def kernel(work: Any) -> float:
        return float(work.us(model.of, model.gpu))

    for (op, world, m, k, n), summed in own.items():
        scattered = own.get((SCATTER, world, m, k, n))
        if op != REDUCE or scattered is None:
            continue
        nbytes = 8 * m * n
        whole, part = (kernel(tail_work(size, INDUCTOR_TAIL)) for size in (nbytes, nbytes / world))
        for gathered in (p for (op, *at, _), p in own.items() if (op, *at) == (GATHER, world, m, n)):
            read = kernel(Product(m, n, gathered.n))
            yield tuple(  # type: ignore[misc]
                (time(scattered) + part + time(gathered)) / (time(summed) + whole + read)
                for time in (predicted, best)
            )


def test_predicted_ratios_of_split() -> None:
    """What is predicted to save the margin is measured to save."""
    found = list(_measured_ratios())
    errors = sorted(predicted / real - 1 for predicted, real in found)
    assert len(found) > 50
    assert statistics.fmean(map(abs, errors)) < 0.025
    assert errors[0] > -0.09
    assert errors[math.ceil(0.05 * len(errors))] > -SPLIT_ERROR
    taken = [real for predicted, real in found if predicted < 1 - SPLIT_ERROR]
    assert len(taken) > 5
    assert max(taken) < 1.01  # one takes as long
    assert statistics.geometric_mean(taken) < 0.92


@pytest.mark.parametrize("ratio", [1.0, 3.5])
@pytest.mark.parametrize("world", [2, 4])
def test_with_many_tokens_split_saves_and_with_few_it_does_not(
    pricing: GpuPricing, world: int, ratio: float
) -> None:
    """More tokens than before take longer under every schedule. Up to 256 `split` does not save. From 4096 on
    it does, but with the longer K on 2 GPUs, where matmuls hide the exchange, both take the same."""
    same = (world, ratio) == (2, 3.5)
    last = dict.fromkeys(LEGAL, 0.0)
    for tokens in (2**i for i in range(15)):
        clusters = layer(tokens, world, padded=max(tokens, world), ratio=ratio)
        times = {name: us(pricing, name, clusters) for name in LEGAL}
        if tokens > 64:  # as long as the weights take, fewer tokens take the same
            assert all(times[name] > last[name] for name in LEGAL)
        last = times
        if tokens <= 256:
            assert times[SPLIT] > times[UNCHANGED]
        if tokens >= 4096 and not same:
            assert times[SPLIT] < times[UNCHANGED]
        if tokens >= 4096 and same:
            assert times[SPLIT] == pytest.approx(times[UNCHANGED], rel=SPLIT_ERROR)
        taken, told = cheapest(clusters, LEGAL, pricing, {})
        assert told == {name: round(each, 1) for name, each in times.items()}
        assert (taken == SPLIT) <= (times[SPLIT] < (1 - SPLIT_ERROR) * times[UNCHANGED])
    assert (taken == SPLIT) != same


def test_padding_is_priced(pricing: GpuPricing) -> None:
    """4095 rows take 4 ranks what 4096 do, and a copy."""
    whole, padded = (us(pricing, SPLIT, layer(rows, 4, padded=4096)) for rows in (4096, 4095))
    model = pricing.predictor.model
    copy = tail_work(2 * 2 * 4095 * HIDDEN // 4, INDUCTOR_TAIL).us(model.of, model.gpu)
    assert padded == pytest.approx(whole + 2 * copy, rel=1e-4)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(4096, 1 << 20, SPLIT), (2, 1 << 20, ""), (2, 128, ""), (8192, 9216, SPLIT), (4097, 5000, "")],
)
def test_a_number_of_tokens_that_is_a_symbol(
    pricing: GpuPricing, least: int, most: int, expected: str
) -> None:
    """All of the range must save, whatever was seen. 4097 rows take a row of tiles more than 4096."""
    rows = sympy.Symbol("s0", integer=True, positive=True)
    for seen in (None, least, 4096):
        taken, _ = cheapest(layer(rows, 4), LEGAL, pricing, {rows: Known(least, most, seen)})
        assert (taken == SPLIT) == bool(expected)


@pytest.mark.parametrize("part", ["sum", "gather"])
def test_what_has_no_ways_is_not_priced(pricing: GpuPricing, part: str) -> None:
    cluster, *_ = layer(4096, 2)
    wide = {"dtype": "float32"}
    task = replace(cluster.task, **wide) if part == "sum" else cluster.task
    gathers = cluster.gathers if part == "sum" else tuple(replace(g, **wide) for g in cluster.gathers)
    cluster = replace(cluster, task=task, gathers=gathers)
    taken, times = cheapest([cluster], LEGAL, pricing, {})
    assert taken == UNCHANGED
    assert times[SPLIT] is times[UNCHANGED] is None


# --- Graphs ----------------------------------------------------------------------------------------------


@contextmanager
def on_gpus(world: int) -> Iterator[dist.ProcessGroup]:
    """Graphs are explained as if they were those of GPUs."""

    def fuse_moved(graph: fx.Graph, *rest: Any) -> Any:
        *known, basis = rest
        return passes.fuse(moved(graph), *known, basis=basis)

    reschedule = passes.reschedule_or_not
    with (
        fake_group(world),
        patch.object(support, "why_not", lambda device: None),
        patch.object(passes, "fuse_or_keep", fuse_moved),
        patch.object(passes, "reschedule_or_not", lambda graph, *rest: reschedule(moved(graph), *rest)),
        autofuse.config.patch(policy="always"),
        torch.no_grad(),
    ):
        assert dist.group.WORLD is not None
        yield dist.group.WORLD


def explained(
    tokens: int, *, world: int = 4, declared: bool = True, least: int = 0, most: int | None = None
) -> Report:
    """The report of the benchmark's layer on GPUs."""
    with on_gpus(world) as group:
        with torch.device("meta"):
            model = Layer(HIDDEN // world, HIDDEN, group).bfloat16()
        model = model.to_empty(device="cpu")
        x, residual = (torch.empty(tokens, n, dtype=torch.bfloat16) for n in (HIDDEN // world, HIDDEN))
        for t in (x, residual) if least else ():
            torch._dynamo.mark_dynamic(t, 0, min=least if most else None, max=most)
        if declared:
            autofuse.replicated(model, parameters=["*norm"], inputs=["residual"])

        def call(x: Tensor, residual: Tensor) -> Any:
            torch._check(x.shape[0] >= least)
            return model(x, residual)

        return autofuse.explain(call)(x, residual)


@pytest.mark.parametrize(
    ("tokens", "least", "expected"),
    [
        (4096, 0, SPLIT),
        (8191, 0, SPLIT),
        (64, 0, UNCHANGED),
        (4096, 4096, SPLIT),
        (4097, 4096, SPLIT),
        (4096, 2, UNCHANGED),
    ],
)
def test_auto_takes_what_is_predicted_to_be_cheapest(tokens: int, least: int, expected: str) -> None:
    """least: of a number of tokens that is a symbol."""
    report = explained(tokens, least=least)
    (told,) = report.graphs[0].schedules
    times = {each.name: each.us for each in told.considered if each.us is not None}
    assert list(times) == list(LEGAL)
    assert least or (told.name == SPLIT) == (times[SPLIT] < (1 - SPLIT_ERROR) * times[UNCHANGED])
    assert (told.name, told.refused) == (expected, ())
    fused = [site.pattern for site in report.fused]
    assert fused == (["matmul_reduce_scatter", "all_gather_matmul"] if expected == SPLIT else [REDUCE]) * 2


class Parallel(nn.Module):
    """Attention and MLP of one input, each with an all_reduce, as in a layer that adds both."""

    def __init__(self, inner: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(n, HIDDEN, bias=False, dtype=dtype) for n in inner)
        self.norm = nn.RMSNorm(HIDDEN, dtype=dtype)
        self.c = nn.Linear(HIDDEN, inner[0], bias=False, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor, residual: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        first = funcol.all_reduce(self.a(x), "sum", group)
        return self.c(self.norm(residual + first + funcol.all_reduce(self.b(y), "sum", group)))


@pytest.mark.parametrize(("dtype", "sums"), [(torch.bfloat16, 1), (torch.float16, 2)])
def test_reductions_that_are_added_are_priced_as_one(dtype: torch.dtype, sums: int) -> None:
    """Where they will be merged."""
    found: list[Cluster] = []
    of = search.clusters_of

    def clusters_of(*args: Any) -> list[Cluster]:
        found[:] = of(*args)
        return found

    tokens, inner = 64, (512, 1024)
    with on_gpus(2), patch.object(search, "clusters_of", clusters_of), torch.device("meta"):
        model = Parallel(inner, dtype).to_empty(device="cpu")
        autofuse.replicated(model, parameters=["norm*"], inputs=["residual"])
        given = [torch.empty(tokens, n, dtype=dtype, device="cpu") for n in (*inner, HIDDEN)]
        autofuse.explain(model)(*given)
    assert len(found) == sums
    matmuls = tuple((tokens, k, HIDDEN) for k in inner)
    assert tuple(size for cluster in found for size in cluster.task.matmuls) == matmuls
    *_, last = found
    nbytes = 2 * tokens * HIDDEN
    assert (last.reduced, last.read) == (nbytes, nbytes + 2 * HIDDEN)  # the residual, or a sum with it
    assert len(last.gathers) == 1


def test_a_range_that_is_fixed_is_not_guarded() -> None:
    """Torch raises if a graph is for a part of it."""
    report = explained(4096, least=4096, most=8192)
    (told,) = report.graphs[0].schedules
    assert told.name == UNCHANGED
    assert "mark_dynamic fixes the range of its rows" in told.refused[0]


def test_without_proofs_nothing_is_split() -> None:
    report = explained(4096, declared=False)
    assert not report.graphs[0].schedules
    for site in report.fused:
        assert site.pattern == REDUCE
        assert "autofuse.replicated(model, ...)" in site.considered[-1].why


def test_where_no_constants_are_known_nothing_is_split() -> None:
    with patch.object(search, "predictor_on", lambda device: None):
        report = explained(4096)
    (told,) = report.graphs[0].schedules
    assert (told.name, told.refused) == (UNCHANGED, ("no times are predicted on cuda",))


def test_the_report_lists_them() -> None:
    few, many = str(explained(64)), str(explained(4096))
    assert re.search(r"\* split +[\d.]+\n", many)
    assert re.search(r"  unchanged +[\d.]+\n", many)
    assert re.search(r"\* every +[\d.]+  each reduction decides for itself: see below\n", few), few
    assert re.search(r"  split +[\d.]+  it is not predicted to save more than 6%\n", few)
