"""embedding_bag_all_to_all on GPUs, as `FusedOp.cuda` calls it: check sizes, choose a way, run it.

Of arguments only such decide that are equal on all ranks. Number and dtypes of a rank's own tables are to be
what they are in every call like this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.choose import chosen
from autofuse.lowering.gpu.dense.run import first_compile
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, current, workspace_of
from autofuse.lowering.ops.embedding_bag_all_to_all import EmbeddingBagAllToAll
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.torch_internals import resolve_group
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.embedding_exchange import launch_embedding_exchange
from autofuse.native_kernels.triton.embedding_tables import DTYPE_BITS, BagsConfig, Places, Tables

from .ways import (
    MERGED_NCCL,
    OP,
    TORCH_NCCL,
    ExchangeProblem,
    exchange_needs_of,
    exchange_ways,
    places_of,
    send_places,
)


def run_embedding(args: EmbeddingBagAllToAll) -> Any:
    """The op; NotImplemented for what is left to the reference."""
    return run_exchange(embedding_call(args))


def run_exchange(call: GpuCall | None) -> Any:
    """A call in the way that policy `auto` takes."""
    if call is None:
        return NotImplemented
    with current(call.workspace.device):
        way = chosen(call.problem, call.workspace)
        found = None if way == TORCH_NCCL else call.run(way)
    return NotImplemented if found is None else found


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

    def run(way: str) -> Tensor | None:
        tables = tables_of(
            weights, args.indices, args.offsets, args.per_sample_weights, args.mode, args.include_last_offset,
            args.padding_idx,
        )  # fmt: skip
        return exchange(workspace, way, problem, tables, args.site)

    return GpuCall(workspace, problem, run)


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
    """As the kernels take them. ValueError for what would make them read what is none of theirs."""
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


def exchange(
    workspace: GpuWorkspace,
    way: str,
    problem: ExchangeProblem,
    tables: Tables,
    site: str,
    trace: Tensor | None = None,
) -> Tensor | None:
    """A call in a way that has a kernel; None where it has to be left to torch while a graph is captured."""
    config = exchange_ways(problem)[way]
    assert isinstance(config, BagsConfig)
    b, columns, dims, rank = problem.b, problem.columns, tables.dims, workspace.rank
    send = way == MERGED_NCCL
    variant = (
        *(problem, tuple(dims), tables.kinds(), tables.aligned(), tables.indices[0].dtype),
        *(tables.mode, bool(tables.samples), tables.last, trace is None),
    )
    entered = workspace.enter(
        OP, site, lambda: Need() if send else exchange_needs_of(config, problem), way, variant
    )
    if entered is None:
        return None
    memory, number, new = entered
    places: Places
    if send:
        places, shape = send_places(rank, b, columns, dims), [problem.world, b, columns[rank]]
    else:
        places = places_of(problem.layout, rank, b, columns, dims)
        shape = [int(n) for n in layouts.shape(problem.layout, b, columns, dims)]
    out = tables.weights[0].new_empty(shape, dtype=problem.dtype)
    capturing = torch.cuda.is_current_stream_capturing()
    words = workspace.words.place(tuple(tables.words(places)), capturing)
    for compile_only in first_compile(workspace, new):
        launch_embedding_exchange(
            memory, words, tables, places, out, config, send, number, trace, compile_only
        )
    workspace.leave()
    if not send:
        return out
    pooled = out.view(problem.m, columns[rank])
    return layouts.exchange_forward(pooled, problem.layout, columns, dims, workspace.group_name)


def _contiguous(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t if t.dtype == dtype and t.is_contiguous() else t.to(dtype).contiguous() for t in tensors]
