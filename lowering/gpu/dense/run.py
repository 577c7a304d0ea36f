"""Runs a dense call in one way: launches a fused kernel, or multiplies and calls the collective."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse import config as settings
from autofuse.lowering import torch_internals
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.reference.layout import parts, whole
from autofuse.native_kernels.cuda.kernels.gather_matmul import (
    ClusterGatherConfig,
    launch_cluster_gather,
)
from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig, launch_gather_words
from autofuse.native_kernels.cuda.kernels.matmul_reduce import (
    ClusterReduceConfig,
    launch_cluster_reduce,
)
from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig, launch_matmul_words
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, is_tma
from autofuse.native_kernels.triton.gather_matmul import launch_gather_matmul
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig, launch_gather_matmul_few
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig, launch_matmul_packets
from autofuse.native_kernels.triton.matmul_reduce import launch_matmul_reduce

from .ways import ASYNC_TP, CUBLAS_NCCL, ONE_SHOT, TWO_SHOT, Problem, is_copied, needs, ways

ORDERS = {"direct": 0, "ring": 1, "oblivious": 2}


def problem_of(
    op: str, x: Tensor, w: Tensor, workspace: GpuWorkspace, dim: int = 0, outer: int = 1
) -> Problem:
    """The problem of a call with `x: [M, K]` (a gather's part: [M / W, K]) and `w: [K, N]`."""
    rows = x.shape[0] * (workspace.world if op == "all_gather_matmul" and dim == 0 else 1)
    aligned = x.is_contiguous() and is_tma(x, w)
    update = op == "matmul_reduce_scatter" and settings.update
    return Problem(
        op, rows, w.shape[0], w.shape[1], workspace.world, x.dtype, workspace.programs, dim, outer, aligned,
        update,
    )  # fmt: skip


def run(
    workspace: GpuWorkspace, way: str, problem: Problem, x: Tensor, w: Tensor, order: str, site: str,
    trace: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The first result of a call of any of the ops in its plain form: a sum, one weight, no bias."""
    strides, traced = w.stride(), trace is not None
    if problem.op == "all_gather_matmul":
        gather = Gather(workspace, way, problem, strides, False, False, site, traced)
        return gather(x, [w], [None], trace)[0]
    return Reduction(workspace, way, problem, strides, False, order, site, traced)(x, w, trace)


def first_compile(workspace: GpuWorkspace, new: bool) -> Iterator[bool]:
    """Whether to compile only: of a new kernel first, after which all ranks meet; then not."""
    if new:
        yield True
        workspace.meet("")
    yield False


class _Call:
    """Calls of one kind at one site, in one way: what is the same in all of them is decided once."""

    def __init__(
        self, workspace: GpuWorkspace, way: str, problem: Problem, site: str, *variant: Hashable
    ) -> None:
        self._workspace, self._way, self._problem, self._site = workspace, way, problem, site
        self._variant = (problem, *variant)
        self._config = ways(problem)[way]
        self._number: int | None = None

    def _need(self) -> Need:
        return Need() if self._config is None else needs(self._config, self._problem)

    def _enter(self) -> tuple[PeerMemory, int, bool] | None:
        """As `GpuWorkspace.enter`, which is asked about a kind of calls until it has let one in."""
        if self._number is not None:
            memory, new = self._workspace.enter_again(), False
        else:
            op = self._problem.op
            entered = self._workspace.enter(op, self._site, self._need, self._way, self._variant)
            if entered is None:
                return None
            memory, self._number, new = entered
        if memory.programs != self._problem.programs:
            memory = replace(memory, programs=self._problem.programs)
        return memory, self._number, new


class Reduction(_Call):
    """matmul_all_reduce and matmul_reduce_scatter: `reduction(x, w)` is what they return first."""

    def __init__(
        self, workspace: GpuWorkspace, way: str, problem: Problem, strides: tuple[int, ...], mean: bool,
        order: str, site: str, traced: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(workspace, way, problem, site, strides, mean, order, traced)
        config, everywhere = self._config, problem.op == "matmul_all_reduce"
        if order == "ring" and isinstance(config, PacketsConfig | WordsConfig):
            order = "direct"  # everybody talks to everybody at once: there is no order
        self._mean = mean
        self._shape = [problem.m, problem.n]
        self._shape[problem.dim] //= 1 if everywhere else problem.world
        self._launch: Any = launch_matmul_reduce
        self._settings: tuple[Any, ...] = mean, everywhere, problem.outer, ORDERS[order], config
        if isinstance(config, ClusterReduceConfig):
            self._launch = partial(launch_cluster_reduce, engine=workspace.engine)
        elif isinstance(config, PacketsConfig | WordsConfig):
            words = isinstance(config, WordsConfig)
            self._launch = launch_matmul_words if words else launch_matmul_packets
            self._settings = mean, everywhere, config

    def _need(self) -> Need:
        problem = self._problem
        if self._way in (ONE_SHOT, TWO_SHOT):
            return Need(finished=problem.m * problem.n * problem.dtype.itemsize)
        return super()._need()

    def __call__(self, x: Tensor, w: Tensor, trace: Tensor | None = None) -> Tensor:
        entered = None if self._way == CUBLAS_NCCL else self._enter()
        if entered is None:
            return self._unfused(torch.mm(x, w))
        memory, number, new = entered
        if self._config is None:
            out = self._by_torch(memory, x, w)
        else:
            out = x.new_empty(self._shape)
            for compile_only in first_compile(self._workspace, new):
                self._launch(memory, x, w, out, *self._settings, number, trace, compile_only)
        self._workspace.leave()
        return out

    def _by_torch(self, memory: PeerMemory, x: Tensor, w: Tensor) -> Tensor:
        problem, group_name = self._problem, self._workspace.group_name
        if self._way == ASYNC_TP:
            out = torch_internals.async_tp_matmul_reduce_scatter(x, w, group_name)
            return self._averaged(out)
        p = memory.finished.views[memory.rank].view(x.dtype)[: problem.m * problem.n]
        torch.mm(x, w, out=p.view(problem.m, problem.n))
        out = torch_internals.symmetric_all_reduce(p, group_name, self._way == ONE_SHOT)
        # torch's variant with an output of its own was measured to be slower than this and a copy.
        out = out.clone() if self._way == TWO_SHOT else out
        return self._averaged(out).view(problem.m, problem.n)

    def _unfused(self, p: Tensor) -> Tensor:
        """What the fused op replaces; in place, as the product is ours."""
        problem, group = self._problem, self._workspace.group
        if problem.op == "matmul_all_reduce":
            dist.all_reduce(p, group=group)
            return self._averaged(p)
        mine = parts(p, problem.dim, problem.outer, problem.world)
        total = mine.new_empty(mine.shape[1:])
        dist.reduce_scatter_tensor(total, mine.flatten(0, 1).contiguous(), group=group)
        return self._averaged(total)

    def _averaged(self, total: Tensor) -> Tensor:
        return total.div_(self._problem.world) if self._mean else total


class Gather(_Call):
    """all_gather_matmul: `gather(part, w, bias)` has a product with each weight, plus its bias if any, and X.

    The first weight is multiplied while the parts arrive, the others afterwards. keep: X is asked for; more:
    it is, or there are other weights. biased: whether the first weight has a bias.
    """

    def __init__(
        self, workspace: GpuWorkspace, way: str, problem: Problem, strides: tuple[int, ...], more: bool,
        keep: bool, site: str, traced: bool = False, biased: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(workspace, way, problem, site, strides, more, biased, traced)
        self._more, self._keep = more, keep

    def __call__(
        self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], trace: Tensor | None = None
    ) -> list[Tensor]:
        unfused = self._config is None and self._way != ASYNC_TP
        entered = None if unfused else self._enter()
        if entered is None:
            return self._unfused(part, w, bias)
        memory, number, new = entered
        if self._config is None:
            x, outputs = torch_internals.async_tp_all_gather_matmul(part, w, self._workspace.group_name)
            outputs = [y if b is None else y.add_(b) for y, b in zip(outputs, bias, strict=True)]
            self._workspace.leave()
            return outputs + [x] * self._keep
        out = part.new_empty(self._problem.m, self._problem.n)
        for compile_only in first_compile(self._workspace, new):
            gathered = self._launch(memory, part, w[0], out, bias[0], number, trace, compile_only)
        outputs = [out]
        if self._more:
            x = self._copied(gathered, part, memory)
            if is_copied(self._config):
                self._workspace.engine.give_credit()
            outputs += _multiply(x, w[1:], bias[1:]) + [x] * self._keep
        self._workspace.leave()
        return outputs

    def _launch(
        self, memory: PeerMemory, part: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, number: int,
        trace: Tensor | None, compile_only: bool,
    ) -> Tensor:  # fmt: skip
        config = self._config
        if isinstance(config, WordsGatherConfig):
            return launch_gather_words(
                memory, part, w, out, config, number, trace, compile_only, bias, self._more
            )
        if isinstance(config, FewConfig):
            return launch_gather_matmul_few(memory, part, w, out, config, number, trace, compile_only, bias)
        launch: Any = (
            launch_cluster_gather if isinstance(config, ClusterGatherConfig) else launch_gather_matmul
        )
        gathered: Tensor = launch(
            memory, part, w, out, self._problem.outer, config, self._workspace.engine, not self._more,
            number, trace, compile_only, bias,
        )  # fmt: skip
        return gathered

    def _copied(self, gathered: Tensor, part: Tensor, memory: PeerMemory) -> Tensor:
        """X out of the memory where its parts have arrived in the call before: one half of it, or all."""
        k, rows = part.shape[1], memory.world * part.shape[0]
        if gathered.shape[0] == rows:
            x = gathered.clone()
        else:  # only the device knows how many calls there were
            halves = gathered.as_strided((2, rows * k), ((gathered.shape[0] - rows) * k, 1))
            x = halves.index_select(0, memory.epoch % 2)
        x = x.view(memory.world, *part.shape)
        x[memory.rank] = part
        return whole(x, 0, self._problem.outer)

    def _unfused(self, part: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
        problem, group = self._problem, self._workspace.group
        x = part.new_empty(problem.world, *part.shape)
        dist.all_gather_into_tensor(x, part, group=group)
        x = whole(x, problem.dim, problem.outer)
        return _multiply(x, w, bias) + [x] * self._keep


def _multiply(x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.mm(x, wi) if b is None else torch.addmm(b, x, wi) for wi, b in zip(w, bias, strict=True)]
