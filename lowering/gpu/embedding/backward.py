"""all_to_all_embedding_bag_backward on GPUs, as `FusedOp.cuda` calls it: check, choose a way, run it.

Of arguments only such decide that are equal on all ranks, as in `embedding`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.dense.run import first_compile
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_of
from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.torch_internals import resolve_group
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.embedding_backward import launch_embedding_backward
from autofuse.native_kernels.triton.embedding_entries import Entries, sorted_entries
from autofuse.native_kernels.triton.embedding_tables import (
    DTYPE_BITS,
    BackwardConfig,
    Tables,
    backward_words,
)

from .call import run_exchange, tables_of
from .ways import (
    BACKWARD,
    MERGED_NCCL,
    ExchangeProblem,
    backward_places,
    exchange_needs_of,
    exchange_ways,
)


def run_embedding_backward(args: AllToAllEmbeddingBagBackward) -> Any:
    """The op; NotImplemented for what is left to the reference."""
    return run_exchange(embedding_backward_call(args))


def embedding_backward_call(args: AllToAllEmbeddingBagBackward) -> GpuCall | None:
    """The op as the kernel takes it; None for what is left to the reference."""
    grad, columns, layout, bags = args.grad, args.columns, args.layout, args.batch
    layouts.check(BACKWARD, layout, bags, columns, args.dims, resolve_group(args.group_name).rank())
    if args.dtype not in DTYPE_BITS or not bags or not sum(columns):
        return None
    workspace = workspace_of(args.group_name, grad)
    problem = ExchangeProblem(
        bags // workspace.world, tuple(columns), layout, grad.dtype, workspace.programs, BACKWARD
    )

    def run(way: str) -> list[Tensor] | None:
        tables = gradients_of(
            args.num_embeddings, args.dims, args.dtype, args.indices, args.offsets, args.per_sample_weights,
            args.mode, args.include_last_offset, args.padding_idx,
        )  # fmt: skip
        return exchange_backward(workspace, way, problem, tables, grad, args.keep_exchanged, args.site)

    return GpuCall(workspace, problem, run)


def gradients_of(
    num_embeddings: list[int],
    dims: list[int],
    dtype: torch.dtype,
    indices: list[Tensor],
    offsets: list[Tensor],
    samples: list[Tensor],
    mode: int,
    last: bool,
    padding: int,
) -> Tables:
    """Gradients of tables, with nothing in them yet, as the kernel takes them. ValueError as `tables_of`."""
    device = offsets[0].device
    gradients = [
        torch.empty(v, d, dtype=dtype, device=device) for v, d in zip(num_embeddings, dims, strict=True)
    ]
    return tables_of(gradients, indices, offsets, samples, mode, last, padding, BACKWARD)


def exchange_backward(
    workspace: GpuWorkspace,
    way: str,
    problem: ExchangeProblem,
    tables: Tables,
    grad: Tensor,
    keep: bool,
    site: str,
    trace: Tensor | None = None,
) -> list[Tensor] | None:
    """`tables.weights`, filled or updated in a way that has a kernel, with `keep` what was exchanged; None
    where the call has to be left to torch while a graph is captured."""
    config = exchange_ways(problem)[way]
    assert isinstance(config, BackwardConfig)
    columns, dims, rank = problem.columns, tables.dims, workspace.rank
    merged = way == MERGED_NCCL
    variant = (
        *(problem, tuple(dims), tables.kinds(), tables.aligned(), tables.indices[0].dtype),
        *(tables.mode, bool(tables.samples), tables.last, tables.update, keep, trace is None),
    )
    entered = workspace.enter(
        problem.op, site, lambda: Need() if merged else exchange_needs_of(config, problem), way, variant
    )
    if entered is None:
        return None
    memory, number, new = entered
    places = backward_places(problem.layout, rank, problem.b, columns, dims)
    capturing = torch.cuda.is_current_stream_capturing()
    words = workspace.words.place(tuple(backward_words(tables, places, config)), capturing)
    exchanged: Tensor | None = None
    if merged:
        exchanged = layouts.exchange_backward(
            grad, problem.layout, columns, columns[rank], problem.m, workspace.group_name
        )
    elif keep:
        exchanged = grad.new_empty(problem.m, columns[rank])
    sent = None if merged else _aligned(grad)
    for compile_only in first_compile(workspace, new):
        entries: Entries = sorted_entries(memory, words, tables, problem.m, number, compile_only)
        launch_embedding_backward(
            memory, words, tables, places, entries, sent, exchanged, config, number, trace, compile_only
        )
    workspace.leave()
    found = list(tables.weights)
    if keep:
        assert exchanged is not None
        found.append(exchanged)
    return found


def _aligned(grad: Tensor) -> Tensor:
    """Contiguous, and where the kernel that has been compiled expects it."""
    grad = grad.contiguous()
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()
