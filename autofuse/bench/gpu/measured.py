"""Measured points as the problems that they are times of, and constants that are fitted to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from autofuse.bench.gpu.experts.cells import COMBINE, DISPATCH, MODELS
from autofuse.fit_ways import Sample, completed, fit, samples_of
from autofuse.lowering.buckets import BUCKET
from autofuse.lowering.gpu.choice import model
from autofuse.lowering.gpu.choice.gpu import Gpu, described, gpu_name
from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, Kernel, OfOp, Problem, Way
from autofuse.lowering.gpu.choice.points import Point, shipped
from autofuse.lowering.gpu.dense.factors import MADE
from autofuse.lowering.gpu.dense.pooled import PooledProblem
from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.dense.work import INDUCTOR_TAIL, TAIL, tail_work
from autofuse.lowering.gpu.embedding.reduced import ReducedProblem
from autofuse.lowering.gpu.embedding.vocabulary import VocabularyProblem
from autofuse.lowering.gpu.embedding.ways import BACKWARD, OP, UPDATE, ExchangeProblem
from autofuse.lowering.gpu.experts.reduced import TokensProblem
from autofuse.lowering.gpu.experts.ways import DROPLESS, DroplessProblem, ExpertProblem
from autofuse.lowering.gpu.optimizer.ways import OP as STEP
from autofuse.lowering.gpu.optimizer.ways import WITH_CLIPPING, UpdateProblem
from autofuse.lowering.gpu.optimizer.whole_ways import WholeUpdateProblem
from autofuse.lowering.ops.all_reduce_update import OP as WHOLE_STEP
from autofuse.lowering.update_rules import RULES

DENSE = (REDUCE, SCATTER, GATHER, PUBLISH)
_DTYPE = torch.bfloat16
_MADE = f", {MADE}"
"""The suffix of `Point.op` where torch computed the product and a kernel exchanged it."""
_SUM = re.compile(rf"({REDUCE}|{SCATTER}), (\d) terms")
_PROGRAMS = 132
"""Multiprocessors of the GPUs that were measured. No work of rows depends on it."""

COLUMNS = {(COMBINE, model.intermediate): model.hidden for model in MODELS.values()} | {
    (DISPATCH, model.hidden): 2 * model.intermediate for model in MODELS.values()
}
"""Columns of an expert's weights, by op and K, in the layers that were measured."""


TAIL_OP = "tail"
"""Of points that have what a tail adds to the time of a sum of `[m, n]`."""
RESULTS = 4
"""Bytes of the results of a tail for each element of the sum, where it was measured: the normed values, and
the residual."""


@dataclass(frozen=True)
class TailProblem(OfOp):
    """A residual and a norm behind a sum of `[m, n]`."""

    m: int
    n: int
    op: str = TAIL_OP
    k: int = 1
    world: int = 1

    is_whole: ClassVar[bool] = True
    most_bytes: ClassVar[int] = MOST_BYTES

    def library_ways(self) -> Sequence[Way]:
        def way(name: str, model: str, each: int, replaced: bool) -> Way:
            return Way(name, lambda p: (tail_work(each * p.m * p.n, model),), replaced=replaced)

        # The kernel of the sum has added the residual before `tail_alone`.
        return [
            way("inductor", INDUCTOR_TAIL, 2 + 2 + RESULTS, True),
            way("tail_alone", TAIL, RESULTS, False),
        ]

    def kernels(self) -> Sequence[Kernel[Any, Any]]:
        return ()

    def at(self, op: str, m: int, k: int, n: int, world: int) -> TailProblem:
        return TailProblem(m, n)

    @property
    def measured_as(self) -> str:
        return self.op

    def rounded(self) -> TailProblem | None:
        return None


def problem_at(point: Point) -> Problem | None:
    """The problem of a point of the benchmarks; None where it is not known how experts share the columns."""
    op, m, k, n, world = point.op, *point.sizes
    if op in DENSE:
        return DenseProblem(op, m, k, n, world, _DTYPE)
    if op.removesuffix(_MADE) in (REDUCE, SCATTER):
        return DenseProblem(op.removesuffix(_MADE), m, k, n, world, _DTYPE, product=MADE)
    if summed := _SUM.fullmatch(op):
        return _sum_at(summed[1], int(summed[2]), point)
    if op == f"{REDUCE}, tail":
        return DenseProblem(REDUCE, m, k, n, world, _DTYPE, written=RESULTS * n)
    if op == TAIL_OP:
        return TailProblem(m, n)
    if op in (OP, BACKWARD, UPDATE):
        return ExchangeProblem(m // world, (n,) * world, "bsc", _DTYPE, op=op)
    if (pooled := _pooled_at(point)) is not None:
        return pooled
    if op.startswith(STEP):
        return _step_at(op.removeprefix(f"{STEP} "), m, n, world)
    if op.startswith(WHOLE_STEP):
        return _whole_step_at(op.removeprefix(f"{WHOLE_STEP} "), m, n, world)
    columns = COLUMNS.get((op.removesuffix(DROPLESS), k))
    if columns is None or n % columns:
        return None
    if op.endswith(DROPLESS):
        return DroplessProblem(op, n // columns, k, columns, world, _DTYPE, rows=m)
    return ExpertProblem(op, n // columns, m, k, columns, world, _DTYPE)


def _sum_at(op: str, count: int, point: Point) -> DenseProblem:
    """Of a sum of matmuls. A point does not tell the K of each; here they are about equal."""
    m, k, n, world = point.sizes
    each = k // count // 8 * 8
    terms = (*[each] * (count - 1), k - (count - 1) * each)
    return DenseProblem(op, m, k, n, world, _DTYPE, terms=terms)


def _pooled_at(point: Point) -> PooledProblem | None:
    """Of rows that a rank adds up before a reduction: `measured_as` of their problems."""
    m, k, n, world = point.sizes
    op, _, kind = point.op.partition(", ")
    given = op, m, n, world, _DTYPE, _PROGRAMS, True
    if kind == "bags":
        return ReducedProblem(*given)
    if kind == "vocabulary":
        return VocabularyProblem(*given)
    if not kind.startswith("top "):
        return None
    return TokensProblem(*given, experts=1, top=1, depth=k).at(point.op, m, k, n, world)


def _step_at(kind: str, elements: int, element_bytes: int, world: int) -> UpdateProblem:
    """The step of a tensor whose gradient and parameter have one dtype."""
    rule, clips = kind.removesuffix(WITH_CLIPPING), kind.endswith(WITH_CLIPPING)
    states = len(RULES[rule].states)
    dtype = torch.float32 if element_bytes - 4 * states == 8 else torch.bfloat16
    owned = -(-elements // world)
    return UpdateProblem(elements, -(-owned // BUCKET), rule, (dtype, dtype), states, world, clips=clips)


def _whole_step_at(rule: str, elements: int, element_bytes: int, world: int) -> WholeUpdateProblem:
    """The problem of a step of one tensor. Its gradient and its parameter have the same dtype."""
    dtype = torch.float32 if element_bytes - 4 * len(RULES[rule].states) == 8 else torch.bfloat16
    return WholeUpdateProblem(elements, -(-elements // BUCKET), 1, rule, (dtype, dtype), world)


def weight_of(point: Point) -> tuple[int, int]:
    """K and N over all ranks: points of one weight are alike, on any number of ranks."""
    cuts_k = point.op in (REDUCE, SCATTER)
    return point.k * (point.world if cuts_k else 1), point.n * (1 if cuts_k else point.world)


def samples_at(gpu: Gpu, points: Sequence[Point]) -> list[Sample]:
    """The samples that the constants of a kind of GPU are fitted to: those of its own points, and those
    of the points of other kinds that `completed` takes."""

    def at(kind: str) -> Iterator[tuple[Problem, dict[str, float]]]:
        for point in points:
            # Stages have no formula, and the K of each matmul of a sum is not known.
            if point.gpu != kind or point.op.endswith(_MADE) or _SUM.fullmatch(point.op):
                continue
            if (problem := problem_at(point)) is not None:
                yield problem, dict(point.times)

    others: list[Sample] = []
    for kind in sorted({point.gpu for point in points} - {""}):
        there = model.shipped(kind)
        if there is not None:
            others += samples_of(at(kind), there.gpu)
    return completed(gpu, samples_of(at("")), others)


def fit_shipped(kind: str, output: Path | None = None) -> Path:
    """Fits the constants of a kind of GPU to its shipped points, and writes them where they are shipped.

    The fit begins with the constants of the kind that was measured most.

    ValueError for a kind without points.
    """
    points = shipped(kind)
    if all(point.gpu for point in points):
        raise ValueError(f"--fit {kind}: no points of it are shipped, see lowering/gpu/choice/tables")
    known = model.shipped(kind)
    if known is None and (not torch.cuda.is_available() or gpu_name(torch.device("cuda")) != kind):
        raise ValueError(f"--fit {kind}: run it on such a GPU, which says how large it is")
    gpu = described(torch.device("cuda", 0)) if known is None else known.gpu
    path = output or model.path_of(kind)
    begin = None if kind == model.MEASURED else replace(model.measured(), gpu=gpu)
    path.write_text(fit(gpu, samples_at(gpu, points), begin=begin).to_json())
    return path
