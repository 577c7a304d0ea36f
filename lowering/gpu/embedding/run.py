"""Runs a call of embedding bags in a way that has a kernel."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import once
from autofuse.lowering.gpu.choice.kernel import Way
from autofuse.lowering.gpu.choice.launcher import Launcher, contiguous
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.gpu.operands import aligned
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.native_kernels.triton.embedding_tables import Tables, backward_words

from .again import Words
from .kernels import MERGED_NCCL
from .places import backward_places, places_of, send_places
from .ways import ExchangeProblem


class Exchange:
    """Calls of the forward of one kind: `exchange(tables)`."""

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: ExchangeProblem, variant: Hashable,
        dims: Sequence[int], site: str,
    ) -> None:  # fmt: skip
        self.group = weakref.ref(workspace.group)
        self._workspace, self._problem, self._dims = workspace, problem, dims
        self._launcher = Launcher(workspace, way, problem.op, site, problem, variant)
        b, columns, rank = problem.b, problem.columns, workspace.rank
        self._merged = way.name == MERGED_NCCL
        if self._merged:
            self._places = send_places(rank, b, columns, dims)
            self._result = contiguous(problem.world, b, columns[rank])
        else:
            self._places = places_of(problem.layout, rank, b, columns, dims)
            self._result = contiguous(*map(int, layouts.shape(problem.layout, b, columns, dims)))
        self._words: Words | None = None

    def again(
        self, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]
    ) -> Tensor | None:
        """As `__call__`, but repeats a launch of an earlier call that was not captured. None if the call has
        to be prepared anew."""
        launcher = self._launcher
        # The last fused call may read the old descriptors, so new ones must be stored behind it.
        if self._words is None or not (launcher.is_next() and launcher.goes_on()):
            return None
        words = self._words.of(weights, indices, offsets)
        if words is None:
            return None
        descriptors = self._workspace.descriptors.place(words, False)
        found = launcher.again((descriptors,), (self._result,), dtypes=(self._problem.dtype,))
        return None if found is None else found[0]

    def __call__(self, tables: Tables, trace: Tensor | None = None) -> Tensor | None:
        """The result; None if a graph is captured and torch has to run the call."""
        launcher, problem = self._launcher, self._problem
        if launcher.enter(trace=trace) is None:
            return None
        out = tables.weights[0].new_empty(self._result[0], dtype=problem.dtype)
        words = array("q", tables.words(self._places)).tobytes()
        capturing = torch.cuda.is_current_stream_capturing()
        descriptors = self._workspace.descriptors.place(words, capturing)
        launcher.launch(descriptors, tables, self._places, out)
        launcher.leave()
        if not self._merged:
            if launcher.is_short:
                self._words = Words(tables, self._places)
            return out
        pooled = out.view(problem.m, problem.columns[self._workspace.rank])
        return layouts.exchange_forward(
            pooled, problem.layout, problem.columns, self._dims, self._workspace.group_name
        )


def variant_of(problem: Hashable, tables: Tables, traced: bool = False) -> Hashable:
    """All properties of a call for which its kernel is compiled."""
    return (
        *(problem, tuple(tables.dims), tables.kinds(), tables.aligned(), tables.indices[0].dtype),
        *(tables.mode, bool(tables.samples), tables.last, not traced),
    )


def made(way: Way, problem: Hashable, tables: Tables, site: str) -> Hashable:
    """The key of an `Exchange` in `workspace.calls`."""
    return "made", way.name, variant_of(problem, tables), tables.padding, site


def exchange(
    workspace: GpuWorkspace,
    way: Way,
    problem: ExchangeProblem,
    tables: Tables,
    site: str,
    trace: Tensor | None = None,
) -> Tensor | None:
    """A call of `Exchange`."""

    def make() -> Exchange:
        variant = variant_of(problem, tables, trace is not None)
        return Exchange(workspace, way, problem, variant, tables.dims, site)

    kind = made(way, problem, tables, site)
    return (make() if trace is not None else once(workspace, kind, make))(tables, trace)


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
    """`tables.weights`, filled or updated, and with `keep` the exchanged tensor; None as in `exchange`."""
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
    words = array("q", backward_words(tables, places, way.config)).tobytes()
    descriptors = workspace.descriptors.place(words, capturing)
    exchanged: Tensor | None = None
    if merged:
        exchanged = layouts.exchange_backward(
            grad, problem.layout, columns, columns[rank], problem.m, workspace.group_name
        )
    elif keep:
        exchanged = grad.new_empty(problem.m, columns[rank])
    sent = None if merged else aligned(grad)
    launcher.launch(descriptors, tables, places, problem.m, sent, exchanged)
    launcher.leave()
    found = list(tables.weights)
    if keep:
        assert exchanged is not None
        found.append(exchanged)
    return found
