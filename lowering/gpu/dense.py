"""Runs a dense call in one way: launches a fused kernel, or multiplies and calls the collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse import config as settings
from autofuse.lowering import torch_internals
from autofuse.lowering.ops.layout import parts, whole
from autofuse.native_kernels.cuda.gather_matmul import ClusterGatherConfig, launch_cluster_gather
from autofuse.native_kernels.cuda.gather_words import WordsGatherConfig, launch_gather_words
from autofuse.native_kernels.cuda.matmul_reduce import ClusterReduceConfig, launch_cluster_reduce
from autofuse.native_kernels.cuda.matmul_words import WordsConfig, launch_matmul_words
from autofuse.native_kernels.triton.gather_matmul import launch_gather_matmul
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig, launch_gather_matmul_few
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig, launch_matmul_packets
from autofuse.native_kernels.triton.matmul_reduce import launch_matmul_reduce
from autofuse.native_kernels.triton.memory import Need, PeerMemory, is_tma

from .ways import ASYNC_TP, CUBLAS_NCCL, ONE_SHOT, TWO_SHOT, Problem, is_copied, needs, ways
from .workspace import GpuWorkspace

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
    if problem.op == "all_gather_matmul":
        return gather(workspace, way, problem, x, [w], [None], False, site, trace)[0]
    return reduce(workspace, way, problem, x, w, False, order, site, trace)


def reduce(
    workspace: GpuWorkspace, way: str, problem: Problem, x: Tensor, w: Tensor, mean: bool, order: str,
    site: str, trace: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """matmul_all_reduce and matmul_reduce_scatter: what they return first."""
    config = ways(problem)[way]
    everywhere = problem.op == "matmul_all_reduce"
    if config is not None and order == "ring" and isinstance(config, PacketsConfig | WordsConfig):
        order = "direct"  # everybody talks to everybody at once: there is no order

    def need() -> Need:
        if config is not None:
            return needs(config, problem)
        return Need(finished=problem.m * problem.n * x.element_size()) if way != ASYNC_TP else Need()

    entered = (
        None
        if way == CUBLAS_NCCL
        else workspace.enter(problem.op, site, need, way, (problem, w.stride(), mean, order, trace is None))
    )
    if entered is None:
        return _reduce_unfused(workspace, problem, torch.mm(x, w), mean)
    memory, number, new = entered
    if memory.programs != problem.programs:
        memory = replace(memory, programs=problem.programs)
    if way == ASYNC_TP:
        out = torch_internals.async_tp_matmul_reduce_scatter(x, w, workspace.group_name)
        out = out.div_(problem.world) if mean else out
    elif config is None:
        p = memory.finished.views[memory.rank].view(x.dtype)[: problem.m * problem.n]
        torch.mm(x, w, out=p.view(problem.m, problem.n))
        out = torch_internals.symmetric_all_reduce(p, workspace.group_name, way == ONE_SHOT)
        # torch's variant with an output of its own was measured to be slower than this and a copy.
        out = out.clone() if way == TWO_SHOT else out
        out = (out.div_(problem.world) if mean else out).view(problem.m, problem.n)
    else:
        shape = [problem.m, problem.n]
        shape[problem.dim] //= 1 if everywhere else problem.world
        out = x.new_empty(shape)
        for compile_only in _first_compile(workspace, new):
            launch: Any
            if isinstance(config, PacketsConfig | WordsConfig):
                words = isinstance(config, WordsConfig)
                launch = launch_matmul_words if words else launch_matmul_packets
                launch(memory, x, w, out, mean, everywhere, config, number, trace, compile_only)
            else:
                launch = launch_matmul_reduce
                if isinstance(config, ClusterReduceConfig):
                    launch = partial(launch_cluster_reduce, engine=workspace.engine)
                launch(
                    memory, x, w, out, mean, everywhere, problem.outer, ORDERS[order], config, number, trace,
                    compile_only,
                )  # fmt: skip
    workspace.leave()
    return out


def gather(
    workspace: GpuWorkspace, way: str, problem: Problem, part: Tensor, w: Sequence[Tensor],
    bias: Sequence[Tensor | None], keep: bool, site: str, trace: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """all_gather_matmul: products with all weights, plus the bias of each, and, with `keep`, X.

    The first weight is multiplied while the parts arrive, the others afterwards.
    """
    config, more = ways(problem)[way], keep or len(w) > 1
    variant = problem, w[0].stride(), more, bias[0] is None, trace is None
    if way == ASYNC_TP and workspace.enter(problem.op, site, Need, way, variant) is not None:
        x, outputs = torch_internals.async_tp_all_gather_matmul(part, w, workspace.group_name)
        workspace.leave()
        return [y if b is None else y.add_(b) for y, b in zip(outputs, bias, strict=True)] + [x] * keep
    entered = (
        None
        if config is None
        else workspace.enter(problem.op, site, lambda: needs(config, problem), way, variant)
    )
    if entered is None:
        x = part.new_empty(problem.world, *part.shape)
        dist.all_gather_into_tensor(x, part, group=workspace.group)
        x = whole(x, problem.dim, problem.outer)
        return _multiply(x, w, bias) + [x] * keep
    memory, number, new = entered
    if memory.programs != problem.programs:
        memory = replace(memory, programs=problem.programs)
    out = part.new_empty(problem.m, problem.n)
    for compile_only in _first_compile(workspace, new):
        if isinstance(config, WordsGatherConfig):
            gathered = launch_gather_words(
                memory, part, w[0], out, config, number, trace, compile_only, bias[0], more
            )
        elif isinstance(config, FewConfig):
            gathered = launch_gather_matmul_few(
                memory, part, w[0], out, config, number, trace, compile_only, bias[0]
            )
        else:
            clusters = isinstance(config, ClusterGatherConfig)
            launch: Any = launch_cluster_gather if clusters else launch_gather_matmul
            gathered = launch(
                memory, part, w[0], out, problem.outer, config, workspace.engine, not more, number, trace,
                compile_only, bias[0],
            )  # fmt: skip
    outputs = [out]
    if more:
        x = _copy_gathered(gathered, part, problem, memory)
        if is_copied(config):
            workspace.engine.give_credit()
        outputs += _multiply(x, w[1:], bias[1:]) + [x] * keep
    workspace.leave()
    return outputs


def _multiply(x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.mm(x, wi) if b is None else torch.addmm(b, x, wi) for wi, b in zip(w, bias, strict=True)]


def _reduce_unfused(workspace: GpuWorkspace, problem: Problem, p: Tensor, mean: bool) -> Tensor:
    """What the fused op replaces; in place, as the product is ours."""
    if problem.op == "matmul_all_reduce":
        dist.all_reduce(p, group=workspace.group)
        total = p
    else:
        mine = parts(p, problem.dim, problem.outer, problem.world)
        total = mine.new_empty(mine.shape[1:])
        dist.reduce_scatter_tensor(total, mine.flatten(0, 1).contiguous(), group=workspace.group)
    return total.div_(problem.world) if mean else total


def _first_compile(workspace: GpuWorkspace, new: bool) -> Iterator[bool]:
    """Whether to compile only: of a new kernel first, after which all ranks meet; then not."""
    if new:
        yield True
        workspace.meet("")
    yield False


def _copy_gathered(gathered: Tensor, part: Tensor, problem: Problem, memory: PeerMemory) -> Tensor:
    """X out of the memory where its parts have arrived in the call before: one half of it, or all."""
    rows = problem.world * part.shape[0]
    if gathered.shape[0] == rows:
        x = gathered.clone()
    else:  # only the device knows how many calls there were
        halves = gathered.as_strided((2, rows * problem.k), ((gathered.shape[0] - rows) * problem.k, 1))
        x = halves.index_select(0, memory.state[3:4] % 2)
    x = x.view(problem.world, *part.shape)
    x[memory.rank] = part
    return whole(x, 0, problem.outer)
