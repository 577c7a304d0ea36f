"""Predicted times of a site on GPUs, by the model that chooses the way of a call at run time.

Only shipped points count. Ranks compile without a meeting, and the measured points of users may differ
between them. The cost model judges pooled embeddings, and dtypes without kernels.

Ranks may have different products: one rank alone may add a bias. All ranks must decide alike, so the kind of
a product changes only the times that a report shows."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.support import has_triton
from autofuse.lowering.ops.matmul_all_reduce import GPU_DTYPES, MatmulAllReduce, is_added_up
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.passes.graph.follow import expression

from .cost_model import PLAIN, Task

if TYPE_CHECKING:
    from autofuse.lowering.gpu.choice.correction import Predictor
    from autofuse.lowering.gpu.choice.kernel import Problem
    from autofuse.lowering.gpu.optimizer.whole_ways import WholeUpdateProblem

_DTYPES = ("bfloat16", "float16")
_MADE_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in GPU_DTYPES)
"""Dtypes of products that torch computes."""


def predictor_on(device: torch.device) -> Predictor | None:
    """The predictor for a GPU; None for other devices or without Triton. If there is no GPU in this process,
    as when `explain` runs without one, it is that of the kind that was measured most."""
    if device.type != "cuda" or not has_triton():
        return None
    return _predictor(torch.cuda.get_device_name(device) if torch.cuda.is_available() else "", device)


@functools.cache
def _predictor(name: str, device: torch.device) -> Predictor:
    from autofuse.lowering.gpu.choice.correction import Predictor
    from autofuse.lowering.gpu.choice.model import gpu_of, measured, model_of
    from autofuse.lowering.gpu.choice.points import shipped

    model = model_of(gpu_of(device)) if name else measured()
    return Predictor(model, shipped(model.gpu.name))


def times(task: Task, predictor: Predictor) -> tuple[float, float, float] | None:
    """Microseconds of the fused op, of its fastest kernel, and of what it replaces, at sizes in numbers.

    The fused op takes the fastest of all ways, those of torch included. None for a task without ways.
    """
    problem = problem_of(task, predictor.model.gpu.multiprocessors)
    if problem is None:
        return None
    from autofuse.lowering.gpu.choice.choose import choose
    from autofuse.lowering.gpu.choice.kernel import fused_ways, ways_of
    from autofuse.lowering.gpu.optimizer.whole_ways import WholeUpdateProblem

    if not fused_ways(problem):  # a size may be 0
        return None
    ways, found = ways_of(problem), predictor.times(problem)
    ours = [each.us for each in found if ways[each.way].fused]
    more = _others(task, predictor)
    apart = next(each.us for each in found if ways[each.way].replaced)
    if isinstance(problem, WholeUpdateProblem):
        more, apart = _round_a_step(problem, task.count, predictor)
    return choose(problem, predictor).us + more, min(ours) + more, apart + more


def _round_a_step(problem: WholeUpdateProblem, collectives: Any, predictor: Predictor) -> tuple[float, float]:
    """Microseconds of the code that Inductor generates besides the op, and of all the code without the op."""
    from autofuse.lowering.gpu.optimizer.whole_ways import kept_works, numbers_work

    model = predictor.model
    of_numbers, *kept = (
        w.us(model.of, model.gpu) for w in (numbers_work(), *kept_works(problem, collectives))
    )
    return of_numbers, sum(kept)


def taken_us(task: Task, predictor: Predictor) -> float | None:
    """As the first of `times`, but a task for which no kernel serves has the ways of torch."""
    problem = problem_of(task, predictor.model.gpu.multiprocessors)
    if problem is None or not min(problem.m, problem.k, problem.n):
        return None
    from autofuse.lowering.gpu.choice.choose import choose

    return choose(problem, predictor).us + _others(task, predictor)


def product_of(args: Any) -> str:
    """The kind of the product that a fused op reduces, by the record of its arguments."""
    if not isinstance(args, (MatmulAllReduce, MatmulReduceScatter)) or is_added_up(args):
        return PLAIN
    from autofuse.lowering.gpu.dense.factors import kind_of

    x, w, operands = ([_known(t) for t in given] for given in (args.x, args.w, args.operands))
    return kind_of(args._replace(x=x, w=w, operands=operands))


def _known(t: Tensor) -> Any:
    """The dtype and shape of a tensor. Unlike symbolic sizes, expressions are compared without guards."""
    return SimpleNamespace(dtype=t.dtype, shape=tuple(map(expression, t.shape)))


def problem_of(task: Task, programs: int) -> Problem | None:
    if task.step is not None:
        from autofuse.lowering.gpu.optimizer.whole_ways import WholeUpdateProblem

        step, dtypes = task.step, (task.step.grad, task.step.param)
        return WholeUpdateProblem(
            step.elements, step.buckets, step.tensors, step.rule, dtypes, task.world, programs
        )
    if not task.matmuls or task.pooled:
        return None
    from autofuse.lowering.gpu.dense.factors import MADE

    if task.dtype not in (_MADE_DTYPES if task.product == MADE else _DTYPES):
        return None
    from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
    from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, ExpertProblem

    dtype, (m, k, n) = getattr(torch, task.dtype), task.matmuls[0]
    if task.op in (REDUCE, SCATTER, GATHER, PUBLISH):
        if m == 0 or (m % task.world and task.op in (SCATTER, GATHER)):
            return None
        lengths = tuple(k for _, k, _ in task.matmuls)
        problem = DenseProblem(task.op, m, k, n, task.world, dtype, programs, product=task.product)
        if len(lengths) == 1:
            return problem
        if task.product == MADE:
            return replace(problem, k=sum(lengths))
        if task.op == GATHER:
            widths = tuple(n for _, _, n in task.matmuls[: _together(task)])
            return problem if len(widths) == 1 else replace(problem, n=sum(widths), widths=widths)
        return None if task.op == PUBLISH else replace(problem, k=sum(lengths), terms=lengths)
    if task.op not in (COMBINE, DISPATCH) or not task.count:
        return None
    rows = -(-m // (task.count * task.world)) * task.world
    inner = k if task.op == DISPATCH else sum(k for _, k, _ in task.matmuls)
    columns = sum(n for _, _, n in task.matmuls) if task.op == DISPATCH else n
    return ExpertProblem(task.op, task.count, rows, inner, columns, task.world, dtype, programs)


def _others(task: Task, predictor: Predictor) -> float:
    """The products of a gather behind those that are multiplied while parts arrive."""
    if task.op != "all_gather_matmul":
        return 0.0
    from autofuse.lowering.gpu.choice.work import Product

    model = predictor.model
    products = [Product(*sizes) for sizes in task.matmuls[_together(task) :]]
    return sum(product.us(model.of, model.gpu) for product in products)


def _together(task: Task) -> int:
    """How many weights of a gather kernels multiply while parts arrive; layouts are not known yet."""
    from autofuse.lowering.gpu.dense.ways import FEW_ROWS
    from autofuse.lowering.gpu.support import MOST_WEIGHTS

    fit = takewhile(lambda sizes: sizes[2] % 8 == 0, task.matmuls[1:MOST_WEIGHTS])
    return 1 if task.matmuls[0][0] <= FEW_ROWS else 1 + len([*fit])
