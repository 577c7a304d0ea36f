"""Runs a call of embedding bags in a way that has a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Way
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.native_kernels.triton.embedding_tables import Tables, backward_words

from .kernels import MERGED_NCCL
from .places import backward_places, places_of, send_places
from .ways import ExchangeProblem


def exchange(
    workspace: GpuWorkspace,
    way: Way,
    problem: ExchangeProblem,
    tables: Tables,
    site: str,
    trace: Tensor | None = None,
) -> Tensor | None:
    """A call of the forward; None where it has to be left to torch while a graph is captured."""
    b, columns, dims, rank = problem.b, problem.columns, tables.dims, workspace.rank
    merged = way.name == MERGED_NCCL
    variant = (
        *(problem, tuple(dims), tables.kinds(), tables.aligned(), tables.indices[0].dtype),
        *(tables.mode, bool(tables.samples), tables.last, trace is None),
    )
    launcher = Launcher(workspace, way, problem.op, site, problem, variant)
    if launcher.enter(trace=trace) is None:
        return None
    if merged:
        places, shape = send_places(rank, b, columns, dims), [problem.world, b, columns[rank]]
    else:
        places = places_of(problem.layout, rank, b, columns, dims)
        shape = [int(n) for n in layouts.shape(problem.layout, b, columns, dims)]
    out = tables.weights[0].new_empty(shape, dtype=problem.dtype)
    capturing = torch.cuda.is_current_stream_capturing()
    descriptors = workspace.descriptors.place(tuple(tables.words(places)), capturing)
    launcher.launch(descriptors, tables, places, out)
    launcher.leave()
    if not merged:
        return out
    pooled = out.view(problem.m, columns[rank])
    return layouts.exchange_forward(pooled, problem.layout, columns, dims, workspace.group_name)


def exchange_backward(
    workspace: GpuWorkspace,
    way: Way,
    problem: ExchangeProblem,
    tables: Tables,
    grad: Tensor,
    keep: bool,
    site: str,
    trace: Tensor | None = None,
) -> list[Tensor] | None:
    """`tables.weights`, filled or updated, and with `keep` what was exchanged; None as in `exchange`."""
    columns, dims, rank = problem.columns, tables.dims, workspace.rank
    merged = way.name == MERGED_NCCL
    variant = (
        *(problem, tuple(dims), tables.kinds(), tables.aligned(), tables.indices[0].dtype),
        *(tables.mode, bool(tables.samples), tables.last, tables.update, keep, trace is None),
    )
    launcher = Launcher(workspace, way, problem.op, site, problem, variant)
    if launcher.enter(trace=trace) is None:
        return None
    places = backward_places(problem.layout, rank, problem.b, columns, dims)
    capturing = torch.cuda.is_current_stream_capturing()
    words = tuple(backward_words(tables, places, way.config))
    descriptors = workspace.descriptors.place(words, capturing)
    exchanged: Tensor | None = None
    if merged:
        exchanged = layouts.exchange_backward(
            grad, problem.layout, columns, columns[rank], problem.m, workspace.group_name
        )
    elif keep:
        exchanged = grad.new_empty(problem.m, columns[rank])
    sent = None if merged else _aligned(grad)
    launcher.launch(descriptors, tables, places, problem.m, sent, exchanged)
    launcher.leave()
    found = list(tables.weights)
    if keep:
        assert exchanged is not None
        found.append(exchanged)
    return found


def _aligned(grad: Tensor) -> Tensor:
    """Contiguous, and where the kernel that has been compiled expects it."""
    grad = grad.contiguous()
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()
