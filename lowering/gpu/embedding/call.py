"""The ops of embedding bags on GPUs, as `FusedOp.cuda` calls them: check sizes, choose a way, run it.

All decisions depend only on arguments that are equal on all ranks. On each rank, all calls of one kind have
tables of the same number and dtypes. An update is the kernel of the backward, with the rule of an optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import Calls, GpuCall, run_call
from autofuse.lowering.gpu.choice.kernel import Way
from autofuse.lowering.gpu.choice.quick import Quick
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_of
from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
from autofuse.lowering.ops.all_to_all_embedding_bag_update import AllToAllEmbeddingBagUpdate
from autofuse.lowering.ops.embedding_bag_all_to_all import EmbeddingBagAllToAll
from autofuse.lowering.ops.embedding_bag_update import check_tables
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.torch_internals import resolve_group
from autofuse.native_kernels.triton.embedding_tables import DTYPE_BITS, Tables

from .run import Exchange, exchange, exchange_backward, made
from .ways import BACKWARD, OP, UPDATE, ExchangeProblem


def run_embedding(args: EmbeddingBagAllToAll) -> Any:
    """embedding_bag_all_to_all; NotImplemented for what is left to the reference."""
    return run_call(embedding_call(args))


def embedding_call(args: EmbeddingBagAllToAll) -> GpuCall | None:
    """The op as the kernel takes it; None for what is left to the reference."""
    weights, columns, layout, dtype, bags = args.weights, args.columns, args.layout, args.dtype, args.batch
    layouts.check(OP, layout, bags, columns, args.dims, resolve_group(args.group_name).rank())
    if not bags or not sum(columns):
        return None
    if any(w.dtype not in DTYPE_BITS for w in weights):
        return None
    workspace = workspace_of(args.group_name, weights[0])
    problem = ExchangeProblem(bags // workspace.world, tuple(columns), layout, dtype, workspace.programs)

    def run(way: Way) -> Tensor | None:
        tables = tables_of(
            weights, args.indices, args.offsets, args.per_sample_weights, args.mode, args.include_last_offset,
            args.padding_idx,
        )  # fmt: skip
        return exchange(workspace, way, problem, tables, args.site)

    return GpuCall(problem.op, args, workspace, problem, run)


def run_embedding_backward(args: AllToAllEmbeddingBagBackward) -> Any:
    """all_to_all_embedding_bag_backward; NotImplemented for what is left to the reference."""
    return run_call(embedding_backward_call(args))


def embedding_backward_call(args: AllToAllEmbeddingBagBackward) -> GpuCall | None:
    """The op as the kernel takes it; None for what is left to the reference."""
    grad, columns, layout, bags = args.grad, args.columns, args.layout, args.batch
    layouts.check(BACKWARD, layout, bags, columns, args.dims, resolve_group(args.group_name).rank())
    if args.dtype not in DTYPE_BITS or any(args.sparse) or not bags or not sum(columns):
        return None
    workspace = workspace_of(args.group_name, grad)
    problem = ExchangeProblem(
        bags // workspace.world, tuple(columns), layout, grad.dtype, workspace.programs, BACKWARD
    )

    def run(way: Way) -> list[Tensor] | None:
        tables = gradients_of(
            args.num_embeddings, args.dims, args.dtype, args.indices, args.offsets, args.per_sample_weights,
            args.mode, args.include_last_offset, args.padding_idx,
        )  # fmt: skip
        return exchange_backward(workspace, way, problem, tables, grad, args.keep_exchanged, args.site)

    return GpuCall(problem.op, args, workspace, problem, run)


def run_embedding_update(args: AllToAllEmbeddingBagUpdate) -> Any:
    """all_to_all_embedding_bag_update; NotImplemented for what is left to the reference."""
    return run_call(embedding_update_call(args))


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

    def run(way: Way) -> Tensor | None:
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

    return GpuCall(problem.op, args, workspace, problem, run, changed=(*weights, *states))


def _kind(given: tuple[Any, ...]) -> Hashable:
    weights, indices, offsets, samples, *rest = given
    if samples:
        return None
    columns = tuple(rest[4])
    return (
        weights[0].device, weights[0].dtype, len(weights), indices[0].dtype, offsets[0].shape, *rest[:4],
        columns, *rest[5:],
    )  # fmt: skip


def _made(workspace: GpuWorkspace, args: EmbeddingBagAllToAll) -> Any:
    call = embedding_call(args)
    way = None if call is None else workspace.calls.get(call.kind)
    if call is None or way is None:
        return None
    tables = tables_of(
        args.weights, args.indices, args.offsets, args.per_sample_weights, args.mode,
        args.include_last_offset, args.padding_idx,
    )  # fmt: skip
    return workspace.calls.get(made(way, call.problem, tables, args.site))


def _again(found: Exchange, given: tuple[Any, ...]) -> Tensor | None:
    return found.again(given[0], given[1], given[2])


QUICK: Mapping[str, Quick] = {OP: Quick(_kind, _made, _again)}


CALLS: Calls = {OP: embedding_call, BACKWARD: embedding_backward_call, UPDATE: embedding_update_call}


def tables_of(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    samples: Sequence[Tensor],
    mode: int,
    last: bool,
    padding: int,
    op: str = OP,
) -> Tables:
    """The tables as the kernels take them. ValueError for arguments with which a kernel would read memory of
    other tensors."""
    bags = offsets[0].shape[0]
    for t, o in enumerate(offsets):
        if o.shape[0] != bags:
            raise ValueError(
                f"{op}: table {t} has {o.shape[0]} offsets, table 0 {bags}; pass as many for each"
            )
    for t, (w, s, i) in enumerate(zip(weights, samples, indices, strict=False)):
        if s.dtype != w.dtype or s.shape != i.shape:
            raise ValueError(
                f"{op}: per_sample_weights of table {t} are {s.dtype} {list(s.shape)}; expected "
                f"{w.dtype}, one for each of {i.shape[0]} indices"
            )
    wide = any(t.dtype == torch.int64 for t in (*indices, *offsets))
    index = torch.int64 if wide else torch.int32
    return Tables(
        [w if w.stride(1) == 1 else w.contiguous() for w in weights],
        _contiguous(indices, index),
        _contiguous(offsets, index),
        [s.contiguous() for s in samples],
        mode,
        last,
        padding,
    )


def gradients_of(
    num_embeddings: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    samples: Sequence[Tensor],
    mode: int,
    last: bool,
    padding: int,
) -> Tables:
    """Uninitialised gradients of tables, as the kernel takes them. ValueError as in `tables_of`."""
    device = offsets[0].device
    gradients = [
        torch.empty(v, d, dtype=dtype, device=device) for v, d in zip(num_embeddings, dims, strict=True)
    ]
    return tables_of(gradients, indices, offsets, samples, mode, last, padding, BACKWARD)


def _contiguous(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t if t.dtype == dtype and t.is_contiguous() else t.to(dtype).contiguous() for t in tensors]
