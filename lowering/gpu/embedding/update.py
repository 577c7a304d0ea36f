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
from autofuse.lowering.ops.all_to_all_embedding_bag_update import AllToAllEmbeddingBagUpdate
from autofuse.lowering.ops.embedding_bag_update import check_tables
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.torch_internals import resolve_group

from .backward import exchange_backward
from .call import run_exchange, tables_of
from .ways import UPDATE, ExchangeProblem


def run_embedding_update(args: AllToAllEmbeddingBagUpdate) -> Any:
    """The op; NotImplemented for what is left to the reference."""
    return run_exchange(embedding_update_call(args))


def embedding_update_call(args: AllToAllEmbeddingBagUpdate) -> GpuCall | None:
    """The op as the kernel takes it; None for what is left to the reference."""
    weights, states, rates, grad, keep = args.weights, args.states, args.rates, args.grad, args.keep_exchanged
    columns, layout, bags = args.columns, args.layout, args.batch
    layouts.check(UPDATE, layout, bags, columns, args.dims, resolve_group(args.group_name).rank())
    if not bags or not sum(columns):
        return None
    check_tables(UPDATE, weights, states, rates)
    workspace = workspace_of(args.group_name, grad)
    problem = ExchangeProblem(
        bags // workspace.world, tuple(columns), layout, grad.dtype, workspace.programs, UPDATE
    )

    def run(way: str) -> Tensor | None:
        tables = tables_of(
            weights, args.indices, args.offsets, args.per_sample_weights, args.pooling,
            args.include_last_offset, args.padding_idx, UPDATE,
        )  # fmt: skip
        found = exchange_backward(
            workspace, way, problem, replace(tables, states=states, rates=rates), grad, keep, args.site
        )
        if found is None:
            return None
        torch.autograd.graph.increment_version((*weights, *states))
        return found[-1] if keep else grad.new_empty(0)

    return GpuCall(workspace, problem, run)
