"""The dense ops on GPUs, as `FusedOp.cuda` calls them: choose a way, run it.

`FusedOp.gpu_gap` has found no gap in the arguments. For an empty matrix NotImplemented is returned, and the
reference runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.gpu.choice.choose import way_of
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, current, workspace_for
from autofuse.lowering.ops.all_gather_matmul import AllGatherMatmul
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter

from .measure import measure_once
from .run import Gather, Reduction, problem_of

MOST_CALLS = 4096
"""Kinds of calls that are kept, of one group."""


def run_reduce(op: str, args: MatmulAllReduce | MatmulReduceScatter) -> Any:
    """matmul_all_reduce and matmul_reduce_scatter of one matmul, without an epilogue."""
    x, w, reduce_op, dim, outer = args.x, args.w, args.reduce_op, args.dim, args.outer
    group_name, order, site = args.group_name, args.order, args.site
    if not x[0].numel():
        return NotImplemented
    with current(x[0].device):
        workspace = workspace_for(group_name, x[0].device)
        a, b = x[0].contiguous(), w[0]
        capturing = torch.cuda.is_current_stream_capturing()
        update = op == "matmul_reduce_scatter" and config.update
        kind = op, _layout(a), _layout(b), reduce_op, dim, outer, order, site, capturing, update
        reduction = workspace.calls.get(kind)
        if reduction is None:
            problem = problem_of(op, a, b, workspace, dim, outer)
            if config.measure:
                measure_once(workspace, problem)
            variant = b.stride(), reduce_op, order
            way, settled = way_of(problem, workspace, variant, capturing)
            reduction = Reduction(workspace, way, problem, b.stride(), reduce_op == "avg", order, site)
            if settled:
                _keep(workspace, kind, reduction)
        return [reduction(a, b)]


def run_gather(args: AllGatherMatmul) -> Any:
    """all_gather_matmul of rows, with a bias [N] or none a weight."""
    x, w, dim, outer, keep_gathered = args.x, args.w, args.dim, args.outer, args.keep_gathered
    group_name, site = args.group_name, args.site
    biases = [args.bias_of(i) for i in range(len(w))]
    if not x.numel():
        return NotImplemented
    with current(x.device):
        workspace = workspace_for(group_name, x.device)
        part, more = x.contiguous(), keep_gathered or len(w) > 1
        capturing = torch.cuda.is_current_stream_capturing()
        biased = biases[0] is not None
        kind = (
            "all_gather_matmul", _layout(part), _layout(w[0]), outer, more,
            keep_gathered, biased, site, capturing
        )  # fmt: skip
        gather = workspace.calls.get(kind)
        if gather is None:
            problem = problem_of("all_gather_matmul", part, w[0], workspace, dim, outer)
            if config.measure:
                measure_once(workspace, problem)
            variant = w[0].stride(), more, biased
            way, settled = way_of(problem, workspace, variant, capturing)
            gather = Gather(workspace, way, problem, w[0].stride(), more, keep_gathered, site, biased=biased)
            if settled:
                _keep(workspace, kind, gather)
        return gather(part, w, biases)


def _keep(workspace: GpuWorkspace, kind: Hashable, call: Any) -> None:
    """For calls that are alike; sizes may change without end."""
    if len(workspace.calls) == MOST_CALLS:
        workspace.calls.clear()
    workspace.calls[kind] = call


def _layout(t: Tensor) -> Hashable:
    """All of an operand that decides how it is computed."""
    return t.dtype, t.shape, t.stride(), t.storage_offset()
