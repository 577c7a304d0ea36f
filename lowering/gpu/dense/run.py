"""Runs a dense call in one way: launches a fused kernel, or multiplies and calls the collective."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse import config as settings
from autofuse.lowering import torch_internals
from autofuse.lowering.gpu.choice.kernel import ORDERS, Way
from autofuse.lowering.gpu.choice.launcher import Launcher, contiguous
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.reference.layout import parts, whole
from autofuse.lowering.runs import Note
from autofuse.native_kernels.gpu.memory import PeerMemory, is_tma
from autofuse.native_kernels.gpu.state import MOST_WEIGHTS
from autofuse.native_kernels.triton.tails import NO_TAIL, TailSpec, rows_fit

from .factors import MADE, Factors
from .reductions import Reduce, applies_tails, reads_x
from .tails import Behind, behind, behind_of, with_tail_behind
from .ways import ASYNC_TP, FEW_ROWS, GATHER, ONE_SHOT, SCATTER, TWO_SHOT, DenseProblem


def problem_of(
    op: str, x: Tensor, w: Tensor, workspace: GpuWorkspace, dim: int = 0, outer: int = 1
) -> DenseProblem:
    """The problem of a call with `x: [M, K]` (a gather's part: [M / W, K]) and `w: [K, N]`."""
    rows = x.shape[0] * (workspace.world if op == GATHER and dim == 0 else 1)
    aligned = x.is_contiguous() and is_tma(x, w)
    update = op == SCATTER and settings.update
    return DenseProblem(
        op, rows, w.shape[0], w.shape[1], workspace.world, x.dtype, workspace.programs, dim, outer, aligned,
        update,
    )  # fmt: skip


def of_factors(op: str, of: Factors, workspace: GpuWorkspace, dim: int, outer: int) -> DenseProblem:
    """The problem of a reduction."""
    x, w = of.x, of.w
    if of.kind == MADE:
        return DenseProblem(
            op, x[0].shape[0], sum(xi.shape[1] for xi in x), w[0].shape[1], workspace.world, of.dtype,
            workspace.programs, dim, outer, product=MADE,
        )  # fmt: skip
    problem = replace(problem_of(op, x[0], w[0], workspace, dim, outer), product=of.kind)
    if len(x) == 1:
        return problem
    alike = all((wi.stride(1) == 1) == (w[0].stride(1) == 1) for wi in w)
    aligned = alike and is_tma(*x, *w)
    lengths = tuple(xi.shape[1] for xi in x)
    return replace(problem, k=sum(lengths), terms=lengths, aligned=aligned)


def of_weights(problem: DenseProblem, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> DenseProblem:
    """The problem of a gather with several weights, given the problem with the first one. A kernel multiplies
    by the first weights together, as many as are laid out like the first one and have a bias if that has
    one."""

    def alike(i: int) -> bool:
        same = (w[i].stride(1) == 1, bias[i] is None) == (w[0].stride(1) == 1, bias[0] is None)
        return same and w[i].shape[1] % 8 == 0 and is_tma(w[i])

    if problem.m <= FEW_ROWS or not problem.aligned:
        return problem
    count = 1 + len([*takewhile(alike, range(1, min(len(w), MOST_WEIGHTS)))])
    widths = tuple(wi.shape[1] for wi in w[:count])
    return problem if count == 1 else replace(problem, n=sum(widths), widths=widths)


class Reduction:
    """Calls of one kind of matmul_all_reduce or matmul_reduce_scatter: `reduction(of, operands)` returns the
    sum or, with a tail, the results of the tail.

    `__init__` decides all that is equal in these calls. operands: those of the tail, contiguous. keep: the
    product is returned, too.
    """

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: DenseProblem, strides: tuple[int, ...], mean: bool,
        order: str, site: str, traced: bool = False, note: Note | None = None, tail: TailSpec = NO_TAIL,
        keep: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.kind, self._keep = weakref.ref(workspace.group), problem.product, keep
        self._workspace, self._way, self._problem = workspace, way, problem
        self._is_replaced, self._is_fused = way.replaced, way.fused
        self._takes_product = way.kernel is not None and way.kernel.takes_product
        self.reads_x = reads_x(way)
        variant = (problem, strides, mean, order, traced, tail)
        self._mean, self._tail = mean, tail
        self._how = Reduce(mean, problem.everywhere, problem.outer, ORDERS[order])
        shape = [problem.m, problem.n]
        shape[problem.dim] //= 1 if problem.everywhere else problem.world
        results, launch = [(contiguous(*shape), problem.dtype)], None
        self._behind: Behind | None = None  # of the second kernel
        self._takes_tail = bool(tail.results) and way.fused and rows_fit(shape[1])
        if self._takes_tail:
            assert way.kernel is not None
            if applies_tails(way, problem):
                results, rest = [], tail
            else:
                self._behind, launch = behind_of(tail, way.kernel.adds), with_tail_behind(way.kernel)
                rest = self._behind.rest
            results += [(contiguous(*sizes), dtype) for sizes, dtype in rest.matrices(*shape)]
        self._results, self._dtypes = zip(*results, strict=True)
        self._launcher = Launcher(
            workspace, way, problem.op, site, problem, variant, note=note, launch=launch
        )

    def again(self, of: Factors, operands: Sequence[Tensor]) -> list[Tensor] | None:
        """As `__call__`, but repeats a launch of an earlier call that was not captured, if it can. None if
        the call has to be prepared anew."""
        launcher = self._launcher
        # torch multiplies before the guard of the launch is asked, so what Python can check comes first.
        if launcher.is_short and (not self._takes_product or (launcher.is_next() and launcher.goes_on())):
            taken = operands if self._takes_tail else ()
            kept: list[Tensor] = []
            if self._takes_product:
                of, product = of.computed()
                given, kept = of.x, [product] * self._keep
            else:
                bias = of.bias
                given, taken = (*of.x, *of.w), taken if bias is None else (bias, *taken)
            found = launcher.again(given, self._results, taken, self._dtypes)
            if found is None:
                return None
            results = self._of_tail(found) if self._takes_tail else self._then(found[0], operands)
            return [*results, *kept]
        return self(of, operands) if launcher.goes_on() else None

    def __call__(
        self, of: Factors, operands: Sequence[Tensor] = (), trace: Tensor | None = None
    ) -> list[Tensor]:
        memory = None if self._is_replaced else self._launcher.enter(self._problem.programs, trace)
        kept: list[Tensor] = []
        if memory is None or self._takes_product or self._keep:
            of, product = of.computed()
            kept = [product] * self._keep
        return [*self._reduced(memory, of, operands), *kept]

    def _reduced(self, memory: PeerMemory | None, of: Factors, operands: Sequence[Tensor]) -> list[Tensor]:
        """The sum or, with a tail, the results of the tail. Without memory no kernel runs, and `of` is the
        product that the caller has computed."""
        if memory is None:
            (product,) = of.x
            return self._then(self._unfused(product.clone() if self._keep else product), operands)
        if not self._is_fused:
            value = self._by_torch(memory, of)
        else:
            out = [
                of.x[0].new_empty(sizes, dtype=d)
                for (sizes, _), d in zip(self._results, self._dtypes, strict=True)
            ]
            how = self._how._replace(bias=of.bias, scale=of.scale)
            if self._takes_tail:
                self._launcher.launch(of.x, of.w, out, how, operands, self._tail)
                self._launcher.leave()
                return self._of_tail(out)
            (value,) = out
            self._launcher.launch(of.x, of.w, value, how)
        self._launcher.leave()
        return self._then(value, operands)

    def _of_tail(self, found: list[Tensor]) -> list[Tensor]:
        """The results of the tail, given the tensors that a launch has stored."""
        return found if self._behind is None else self._behind.results(found)

    def _then(self, value: Tensor, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results of the tail, which torch or a kernel behind the sum computes; without a tail the
        sum."""
        if not self._tail.results:
            return [value]
        return behind(value, operands, self._tail)

    def _by_torch(self, memory: PeerMemory, of: Factors) -> Tensor:
        problem, group_name = self._problem, self._workspace.group_name
        if self._way.name == ASYNC_TP:
            out = torch_internals.async_tp_matmul_reduce_scatter(of.x[0], of.w[0], group_name)
            return self._averaged(out)
        p = memory.products.views[memory.rank].view(problem.dtype)[: problem.m * problem.n]
        of.product(p.view(problem.m, problem.n))
        out = torch_internals.symmetric_all_reduce(p, group_name, self._way.name == ONE_SHOT)
        # torch's variant with an output of its own was measured to be slower than this and a copy.
        out = out.clone() if self._way.name == TWO_SHOT else out
        return self._averaged(out).view(problem.m, problem.n)

    def _unfused(self, p: Tensor) -> Tensor:
        """The computation that the op replaces. It may overwrite the product."""
        problem, group = self._problem, self._workspace.group
        if problem.everywhere:
            dist.all_reduce(p, group=group)
            return self._averaged(p)
        mine = parts(p, problem.dim, problem.outer, problem.world)
        total = mine.new_empty(mine.shape[1:])
        dist.reduce_scatter_tensor(total, mine.flatten(0, 1).contiguous(), group=group)
        return self._averaged(total)

    def _averaged(self, total: Tensor) -> Tensor:
        return total.div_(self._problem.world) if self._mean else total


class Gather:
    """Calls of one kind of all_gather_matmul: `gather(part, w, bias)`.

    A call returns the product of X with each weight, plus its bias if any, and with `keep` X. The kernel
    multiplies by the weights of `problem.columns` while the parts arrive; torch multiplies by the others
    afterwards. more: the kernel has to store X, for these weights or as a result. biased: whether the first
    weights have biases.
    """

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: DenseProblem, strides: tuple[int, ...], more: bool,
        keep: bool, site: str, traced: bool = False, biased: bool = False, note: Note | None = None,
    ) -> None:  # fmt: skip
        self.group = weakref.ref(workspace.group)
        self._workspace, self._way, self._problem = workspace, way, problem
        self._is_replaced, self._is_fused = way.replaced, way.fused
        self._launcher = Launcher(
            workspace, way, problem.op, site, problem, (problem, strides, more, biased, traced), note=note
        )
        self._more, self._keep = more, keep
        self._results = [contiguous(problem.m, n) for n in problem.columns]
        if more:
            self._results.append(contiguous(problem.m, problem.k))

    def again(self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor] | None:
        """As `Reduction.again`."""
        if not self._launcher.is_short:
            return self(part, w, bias) if self._launcher.goes_on() else None
        count = len(self._problem.columns)
        biases = [b for b in bias[:count] if b is not None]
        outputs = self._launcher.again((part, *w[:count]), self._results, biases)
        return self._completed(outputs, w, bias) if outputs and self._more else outputs

    def __call__(
        self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], trace: Tensor | None = None
    ) -> list[Tensor]:
        memory = None if self._is_replaced else self._launcher.enter(self._problem.programs, trace)
        if memory is None:
            return self._unfused(part, w, bias)
        outputs = self._fused(part, w, bias) if self._is_fused else self._by_torch(part, w, bias)
        self._launcher.leave()
        return outputs

    def _fused(self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
        problem = self._problem
        count = len(problem.columns)
        outputs = [part.new_empty(sizes) for sizes, _ in self._results]
        kept = outputs[-1] if self._more else None
        biases = [b for b in bias[:count] if b is not None]
        self._launcher.launch(part, w[:count], outputs[:count], kept, biases, problem.outer)
        if kept is None:
            return outputs
        return self._completed(outputs, w, bias)

    def _completed(
        self, outputs: list[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The results of the op. outputs: the products of the kernel, then X. Appends the products with the
        other weights, and X only if the caller asked for it."""
        *products, x = outputs
        count = len(products)
        return [*products, *_multiply(x, w[count:], bias[count:])] + [x] * self._keep

    def _by_torch(self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
        x, products = torch_internals.async_tp_all_gather_matmul(part, w, self._workspace.group_name)
        outputs = [y if b is None else y.add_(b) for y, b in zip(products, bias, strict=True)]
        return outputs + [x] * self._keep

    def _unfused(self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
        problem, group = self._problem, self._workspace.group
        x = whole(_gathered(part, problem.world, group), problem.dim, problem.outer)
        return _multiply(x, w, bias) + [x] * self._keep


class Publication:
    """Calls of one kind of matmul_all_gather: `publication(x, w, bias)`, the products of all ranks."""

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: DenseProblem, strides: tuple[int, ...],
        biased: bool, site: str, traced: bool = False, note: Note | None = None,
    ) -> None:  # fmt: skip
        self.group = weakref.ref(workspace.group)
        self._workspace, self._problem, self._is_replaced = workspace, problem, way.replaced
        self._launcher = Launcher(
            workspace, way, problem.op, site, problem, (problem, strides, biased, traced), note=note
        )
        shape = [problem.m, problem.n]
        shape[problem.dim] *= problem.world
        self._result = contiguous(*shape)

    def again(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
        """As `Reduction.again`."""
        if self._launcher.is_short:
            found = self._launcher.again((x, w), (self._result,), () if bias is None else (bias,))
            return None if found is None else found[0]
        return self(x, w, bias) if self._launcher.goes_on() else None

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None, trace: Tensor | None = None) -> Tensor:
        problem = self._problem
        memory = None if self._is_replaced else self._launcher.enter(problem.programs, trace)
        if memory is None:
            return self._unfused(torch.mm(x, w) if bias is None else torch.addmm(bias, x, w))
        out = x.new_empty(self._result[0])
        self._launcher.launch(x, w, out, bias, problem.dim, problem.outer)
        self._launcher.leave()
        return out

    def _unfused(self, p: Tensor) -> Tensor:
        problem = self._problem
        every = _gathered(p, problem.world, self._workspace.group)
        return whole(every, problem.dim, problem.outer)


def _gathered(part: Tensor, world: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, one behind the other: [world, *part.shape]."""
    every = part.new_empty(world * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(every, part, group=group)
    return every.view(world, *part.shape)


def _multiply(x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.mm(x, wi) if b is None else torch.addmm(b, x, wi) for wi, b in zip(w, bias, strict=True)]
