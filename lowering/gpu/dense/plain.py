"""Dense calls in their plain form, in a way that is given by its name: for measurements, traces, benchmarks.

The plain form of a call is a sum without a bias. The x and w of several terms of a sum, and several weights
of a gather, lie side by side in one matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for

from .factors import Factors
from .run import Gather, Publication, Reduction, problem_of
from .ways import GATHER, PUBLISH, DenseProblem


def run(
    workspace: GpuWorkspace,
    name: str,
    problem: DenseProblem,
    x: Tensor,
    w: Tensor,
    order: str,
    site: str,
    trace: Tensor | None = None,
) -> Tensor:
    """The first result."""
    way, strides, traced = ways_of(problem)[name], w.stride(), trace is not None
    if problem.op == GATHER:
        gather = Gather(workspace, way, problem, strides, False, False, site, traced)
        weights = w.split(list(problem.columns), 1)
        return gather(x, weights, [None] * len(weights), trace)[0]
    if problem.op == PUBLISH:
        return Publication(workspace, way, problem, strides, False, site, traced)(x, w, None, trace)
    lengths = list(problem.terms or (problem.k,))
    reduction = Reduction(workspace, way, problem, strides, False, order, site, traced)
    return reduction(Factors(x.split(lengths, 1), w.split(lengths)), trace=trace)[0]


def run_on(name: str, op: str, x: Tensor, w: Tensor, group_name: str, programs: int = 0) -> Tensor:
    """The first result, on random or on real operands. programs: how many run at once, 0 for all.

    x: [M, K], of a gather this rank's part [M / W, K]; w: [K, N].
    """
    workspace = workspace_for(group_name, x.device)
    problem = problem_of(op, x, w, workspace)
    if programs:
        problem = replace(problem, programs=programs)
    return run(workspace, name, problem, x, w, "direct", "by name")


def alone(m: int, k: int, n: int, dtype: torch.dtype) -> list[str]:
    """Two ways of each kernel to run all_gather_matmul on one rank in which nothing is left but the matmul.

    Copy engines would move the parts, of which there are none.
    """
    found: dict[str, list[str]] = {}
    for name, way in ways_of(DenseProblem(GATHER, m, k, n, 1, dtype, programs())).items():
        if way.kernel is not None and way.is_copied:
            found.setdefault(way.kernel.kind, []).append(name)
    return [name for of_kernel in found.values() for name in of_kernel[:2]]


def programs() -> int:
    """Programs that run at once on the current GPU, one a multiprocessor."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
