"""all_to_all_embedding_bag_update on GPUs, as `FusedOp.cuda` calls it: the backward's kernel, with a rule.

Of arguments only such decide that are equal on all ranks, as in `embedding`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.memory.workspace import workspace_of
from autofuse.lowering.ops.embedding_bag_update import check_tables
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.torch_internals import resolve_group
from autofuse.native_kernels.triton.embedding_tables import DTYPE_BITS

from .backward import exchange_backward
from .call import run_exchange, tables_of
from .ways import UPDATE, ExchangeProblem


def run_embedding_update(*args: Any) -> Any:
    """The op, with its arguments; NotImplemented for what is left to the reference."""
    return run_exchange(embedding_update_call(*args))


def embedding_update_call(
    weights: list[Tensor],
    states: list[Tensor],
    rates: list[Tensor],
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    columns: list[int],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> GpuCall | None:
    """The op as the kernel takes it; None for what is left to the reference."""
    bags = offsets[0].shape[0] - include_last_offset
    dims = [w.shape[1] for w in weights]
    layouts.check(UPDATE, layout, bags, columns, dims, resolve_group(group_name).rank())
    if grad.dtype not in DTYPE_BITS or not bags or not sum(columns):
        return None
    check_tables(UPDATE, weights, states, rates)
    workspace = workspace_of(group_name, grad)
    problem = ExchangeProblem(
        bags // workspace.world, tuple(columns), layout, grad.dtype, workspace.programs, UPDATE
    )

    def run(way: str) -> Tensor | None:
        tables = tables_of(
            weights, indices, offsets, per_sample_weights, pooling, include_last_offset, padding_idx, UPDATE
        )
        found = exchange_backward(
            workspace, way, problem, replace(tables, states=states, rates=rates), grad, keep_exchanged, site
        )
        if found is None:
            return None
        torch.autograd.graph.increment_version((*weights, *states))
        return found[-1] if keep_exchanged else grad.new_empty(0)

    return GpuCall(workspace, problem, run)
