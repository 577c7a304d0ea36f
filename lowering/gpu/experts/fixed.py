"""Runs an expert op with fixed capacity in a fused way."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import once
from autofuse.lowering.gpu.choice.kernel import ORDERS, Way
from autofuse.lowering.gpu.choice.launcher import Launcher, contiguous
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.reference.experts import batched_matmul
from autofuse.native_kernels.cuda.host.experts import MOST_WEIGHTS
from autofuse.native_kernels.cuda.kernels.expert_dispatch import exchanged

from .kernels import Fixed
from .ways import COMBINE, DISPATCH, DroplessProblem, ExpertProblem

P = TypeVar("P", ExpertProblem, DroplessProblem)


def problem_of(
    op: str, x: Tensor, w: Tensor, workspace: GpuWorkspace, outer: int = 1, weights: int = 1
) -> ExpertProblem:
    """The problem of a call with `x: [E, R, K]`, of a dispatch `[W, E, R / W, K]`, and `w: [E, K, N]`.

    weights: how many like this one kernel multiplies, see `at_once`.
    """
    rows = x.shape[1] if op == COMBINE else x.shape[2] * workspace.world
    aligned = x.is_contiguous() and x.storage_offset() % 8 == 0 and is_stack(w)
    experts, k, n = w.shape
    return ExpertProblem(
        op, experts, rows, k, n, workspace.world, x.dtype, workspace.programs, outer, aligned, weights
    )


def at_once(w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> int:
    """How many of the weights `[E, K, N]`, from the first on, one kernel multiplies: as wide, laid out alike,
    and all with a bias or none."""

    def alike(i: int) -> bool:
        same = w[i].shape == w[0].shape and (bias[i] is None) == (bias[0] is None)
        return same and _is_stack_like(w[i], w[0])

    return 1 + len([*takewhile(alike, range(1, min(len(w), MOST_WEIGHTS)))])


def is_stack(w: Tensor) -> bool:
    """Whether TMA can load a stack of matrices, or of their transposes; asked as `is_tma` of one."""
    return _is_stack(w.shape, w.stride(), w.storage_offset(), w.element_size())


def _is_stack_like(w: Tensor, first: Tensor) -> bool:
    """One that the kernel for the first takes: both row-major, or both transposed."""
    return is_stack(w) and (w.stride(2) == 1) == (first.stride(2) == 1)


@lru_cache(maxsize=1024)
def _is_stack(shape: torch.Size, stride: tuple[int, ...], offset: int, itemsize: int) -> bool:
    first, second = (1, 2) if stride[2] == 1 else (2, 1)
    return (
        stride[second] == 1
        and stride[first] >= shape[second]
        and (stride[0] > 0 or shape[0] == 1)
        and all(step * itemsize % 16 == 0 for step in (stride[0], stride[first], offset))
    )


def of_sum(problem: P, x: Sequence[Tensor], w: Sequence[Tensor]) -> P:
    """The problem of a sum of products, given that of the first: all of their K are contracted."""
    if len(x) == 1:
        return problem
    aligned = problem.aligned and all(
        xi.storage_offset() % 8 == wi.shape[1] % 8 == 0 and _is_stack_like(wi, w[0])
        for xi, wi in zip(x, w, strict=True)
    )
    return replace(problem, k=sum(wi.shape[1] for wi in w), aligned=aligned)


def layouts(w: Sequence[Tensor]) -> Hashable:
    """What kernels are compiled for, besides a problem."""
    return tuple((wi.shape[1], wi.stride()) for wi in w)


class Combine:
    """Calls of one kind: `combine(x, w, bias)`, `[W, E, outer * run, N]` of a sum of products.

    What is equal in all of them is decided once.
    """

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: ExpertProblem, variant: Hashable, order: str,
        site: str,
    ) -> None:  # fmt: skip
        self.group = weakref.ref(workspace.group)
        self._launcher = Launcher(workspace, way, COMBINE, site, problem, (problem, variant))
        self._how = Fixed(problem.outer, ORDERS[order])
        self._result = contiguous(
            problem.world, problem.experts, problem.outer * problem.run, problem.columns
        )

    def again(self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None) -> list[Tensor] | None:
        """As `__call__`, of a call like one before that was not captured, in the shortest way; None where the
        call has to be prepared anew."""
        if self._launcher.is_short:
            return self._launcher.again((*x, *w), (self._result,), () if bias is None else (bias,))
        return self(x, w, bias) if self._launcher.goes_on() else None

    def __call__(
        self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, trace: Tensor | None = None
    ) -> list[Tensor] | None:
        """None if that cannot be captured."""
        if self._launcher.enter(trace=trace) is None:
            return None
        out = x[0].new_empty(self._result[0])
        self._launcher.launch(x, w, out, bias, self._how)
        self._launcher.leave()
        return [out]


class Dispatch:
    """Calls of one kind: `dispatch(parts, w, bias)`, products with all weights and, with `keep`, X.

    The first `problem.weights` are multiplied while the rows arrive, the others afterwards.
    """

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: ExpertProblem, variant: Hashable, more: bool,
        keep: bool, site: str,
    ) -> None:  # fmt: skip
        self.group = weakref.ref(workspace.group)
        self._workspace, self._way, self._problem = workspace, way, problem
        self._more, self._keep = more, keep
        self._launcher = Launcher(workspace, way, DISPATCH, site, problem, (problem, variant))
        self._result = contiguous(problem.experts, problem.rows, problem.columns)

    def again(self, parts: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor] | None:
        """As `Combine.again`."""
        if self._launcher.is_short and not self._more:
            biases = [b for b in bias if b is not None]
            return self._launcher.again((parts, *w), [self._result] * len(w), biases)
        return self(parts, w, bias) if self._launcher.goes_on() else None

    def __call__(
        self, parts: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], trace: Tensor | None = None
    ) -> list[Tensor] | None:
        """None if that cannot be captured."""
        problem, launcher = self._problem, self._launcher
        count = problem.weights
        memory = launcher.enter(trace=trace)
        if memory is None:
            return None
        outputs = [parts.new_empty(self._result[0]) for _ in range(count)]
        biases = [b for b in bias[:count] if b is not None]
        launcher.launch(parts, w[:count], outputs, biases, Fixed(problem.outer, keep=self._more))
        if self._more:
            x = exchanged(memory, parts, problem.outer, self._way.config)
            if self._way.is_copied:
                self._workspace.engine.give_credit()
            rest = zip(w[count:], bias[count:], strict=True)
            outputs += [batched_matmul(x, wi, b) for wi, b in rest] + [x] * self._keep
        launcher.leave()
        return outputs


def made(op: str, way: Way, problem: Hashable, variant: Hashable, site: str, named: bool = False) -> Hashable:
    """The key of a `Combine` or `Dispatch` that is not traced in `workspace.calls`; named: as of the calls of
    dropless experts."""
    return "made", op, way.name, problem, (variant, True), site, named


def combine_variant(w: Sequence[Tensor], bias: Tensor | None, order: str) -> Hashable:
    """What kernels are compiled for, besides a problem."""
    return layouts(w), bias is None, order


def dispatch_variant(w: Sequence[Tensor], bias: Sequence[Tensor | None], more: bool) -> Hashable:
    """The same; more: X is read after the kernel."""
    return w[0].stride(), bias[0] is None, more


def combine(
    workspace: GpuWorkspace, way: Way, problem: ExpertProblem, x: Sequence[Tensor], w: Sequence[Tensor],
    bias: Tensor | None, order: str, site: str, trace: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """A call of `Combine`."""
    variant = combine_variant(w, bias, order)

    def make() -> Combine:
        return Combine(workspace, way, problem, (variant, trace is None), order, site)

    kind = made(COMBINE, way, problem, variant, site)
    found = (make() if trace is not None else once(workspace, kind, make))(x, w, bias, trace)
    return None if found is None else found[0]


def dispatch(
    workspace: GpuWorkspace, way: Way, problem: ExpertProblem, parts: Tensor, w: Sequence[Tensor],
    bias: Sequence[Tensor | None], keep: bool, site: str, trace: Tensor | None = None,
) -> list[Tensor] | None:  # fmt: skip
    """A call of `Dispatch`."""
    more = keep or len(w) > problem.weights
    variant = dispatch_variant(w, bias, more)

    def make() -> Dispatch:
        return Dispatch(workspace, way, problem, (variant, trace is None), more, keep, site)

    # Calls that differ in what they return beside the products are of two kinds.
    kind = made(DISPATCH, way, problem, (variant, len(w), keep), site)
    return (make() if trace is not None else once(workspace, kind, make))(parts, w, bias, trace)
