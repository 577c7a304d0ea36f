"""Random operands of expert problems, for measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Way, ways_of
from autofuse.lowering.gpu.choice.timer import Call
from autofuse.lowering.gpu.choice.timing import copies_of
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.ops.all_to_all_expert_matmul import AllToAllExpertMatmul
from autofuse.lowering.ops.expert_matmul_all_to_all import ExpertMatmulAllToAll
from autofuse.lowering.ops.library import FUSED_OPS

from .fixed import combine, dispatch
from .ways import COMBINE, DISPATCH, ExpertProblem


def trials(workspace: GpuWorkspace, problem: ExpertProblem) -> Mapping[str, Call]:
    """A call of every way without a bias; weights by turns, so that none is found in the L2 cache."""
    p, device = problem, workspace.device
    own = torch.Generator(device)  # the program draws the numbers that it would have drawn
    parts = p.world, p.experts, p.rows // p.world, p.k
    shape = (p.experts, p.rows, p.k) if p.op == COMBINE else parts
    x = torch.randn(shape, device=device, dtype=p.dtype, generator=own)
    weights = [
        [
            torch.randn(p.experts, p.k, p.columns, device=device, dtype=p.dtype, generator=own)
            for _ in range(p.weights)
        ]
        for _ in range(copies_of(p.k * p.n * 2))
    ]

    def call(way: Way) -> Call:
        return lambda i: _run(workspace, way, problem, x, weights[i % len(weights)])

    return {name: call(way) for name, way in ways_of(problem).items()}


def _run(workspace: GpuWorkspace, way: Way, problem: ExpertProblem, x: Tensor, w: list[Tensor]) -> Tensor:
    """The first result."""
    found: Tensor | None = None
    if way.fused and problem.op == COMBINE:
        found = combine(workspace, way, problem, [x], w, None, "direct", "measure")
    elif way.fused:
        outputs = dispatch(workspace, way, problem, x, w, [None] * len(w), False, "measure")
        found = outputs[0] if outputs else None
    return found if found is not None else _unfused(workspace, problem, x, w)


def _unfused(workspace: GpuWorkspace, problem: ExpertProblem, x: Tensor, w: list[Tensor]) -> Tensor:
    """What the op replaces."""
    site = workspace.group_name, "direct", "measure"
    how: tuple[Any, ...] = 0, None, None, [], [], 1, problem.outer, False, *site
    if problem.op == COMBINE:
        return FUSED_OPS[COMBINE].reference(ExpertMatmulAllToAll([x], w, [], [], "mm", *how))[0]
    return FUSED_OPS[DISPATCH].reference(AllToAllExpertMatmul(x, w, [], "", *how))[0]
