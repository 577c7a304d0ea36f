"""Launches expert_combine.cu: expert_matmul_all_to_all with fixed capacity, by clusters of blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.experts import Cut, Runs
from autofuse.native_kernels.cuda.host.gemm import (
    POINTERS,
    TENSOR_MAP,
    Constants,
    blocks,
    constants,
    fields,
    filled,
    launch,
    map_terms,
    of_call,
    set_map,
    views,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, per_memory

SOURCE = "expert_combine.cu"


@cache
def _params_of(terms: int) -> type[ctypes.Structure]:
    class Params(ctypes.Structure):
        _fields_ = (
            *fields(TENSOR_MAP * terms, "x", "w"),
            ("y", TENSOR_MAP),
            *fields(ctypes.c_void_p, "out", "bias"),
            *fields(POINTERS, "inbox", "signals"),
            *fields(ctypes.c_void_p, "state", "trace"),
            *fields(ctypes.c_int64, "inbox_half", "signals_half"),
            ("runs", Runs),
            ("n", ctypes.c_int32),
            ("k", ctypes.c_int32 * terms),
            *fields(ctypes.c_int32, "rank", "site", "part_rows", "rows", "cols", "visit", "programs"),
        )

    return Params


@dataclass(frozen=True)
class CombineConfig:
    """The configuration of `expert_combine.cu`.

    bn: columns of a tile of 128 rows; across: blocks of a cluster with one block of the weight, for as many
    ranks or, where tiles span ranks, neighbours; along: those with one block of x; visit: tiles for one rank
    before those for the next (0: those of an expert); part: rows that a team copies at a time, at most.
    """

    bn: int = 256
    across: int = 2
    along: int = 1
    visit: int = 0
    part: int = 32

    @property
    def cluster(self) -> int:
        return self.across * self.along


def combine_needs(experts: int, rows: int, n: int, outer: int, world: int, config: CombineConfig) -> Need:
    """The memory that a call needs: `rows` of each expert, of 16-bit floats."""
    cut = Cut.of(experts, rows, n, outer, world, config.bn, config.across)
    return Need(
        inbox=2 * world * cut.part_rows * cut.cols * config.bn * 2,
        signals=2 * 4 * world * cut.rows * cut.cols,
    )


def combine_constants(
    experts: int, rows: int, n: int, outer: int, world: int, transposed: bool, dtype: torch.dtype,
    biased: bool, order: int, config: CombineConfig, trace: bool, terms: int = 1,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with."""
    cut = Cut.of(experts, rows, n, outer, world, config.bn, config.across)
    return constants(
        _params_of(terms), config, world, transposed, dtype, trace, ROWS=cut.height, STAGES=cut.stages,
        ORDER=order, BIASED=biased, SPANNING=cut.spanning, PART=min(config.part, cut.height), TERMS=terms,
    )  # fmt: skip


def launch_expert_combine(
    memory: PeerMemory,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor,
    outer: int,
    order: int,
    config: CombineConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
) -> None:
    """The sum of `x[i] @ w[i]`, plus `bias: [E, N]`; run d goes to rank d.

    x[i]: [E, R, K_i], R = (outer, W, run); w[i]: [E, K_i, N], all transposed or none; added up in fp32, and
    rounded once. out: [W, E, outer * run, N], by source. The world is a multiple of `config.across` where a
    run has 128 rows and more. trace: three rows of events a program, for the teams that copy alone and after
    they have multiplied.
    """
    (experts, rows, _), n = x[0].shape, w[0].shape[2]
    ks = tuple(xi.shape[2] for xi in x)
    found, template = _prepared(
        memory, experts, rows, ks, n, w[0].stride(2) != 1, x[0].dtype, bias is not None, outer, order, config,
        trace is not None,
    )  # fmt: skip
    if compile_only:
        return
    params = filled(template, site, trace, out=out, bias=bias)
    height = params.runs.height
    map_terms(params, x, w, config, height)
    set_map(params, "y", out[memory.rank].view(-1, params.runs.run, n), height, 64)
    launch(found, params, config.cluster)


@per_memory
def _prepared(
    memory: PeerMemory, experts: int, rows: int, ks: tuple[int, ...], n: int, transposed: bool,
    dtype: torch.dtype, biased: bool, outer: int, order: int, config: CombineConfig, trace: bool,
) -> tuple[Kernel, ctypes.Structure]:  # fmt: skip
    """The kernel and the parameters that do not change from call to call."""
    world, cut = memory.world, Cut.of(experts, rows, n, outer, memory.world, config.bn, config.across)
    compiled_with = combine_constants(
        experts, rows, n, outer, world, transposed, dtype, biased, order, config, trace, len(ks)
    )
    found = kernel(SOURCE, "expert_combine", compiled_with, cut.shared_bytes)
    # Spanning, what is computed at a time is for all ranks: they send it at the same time.
    visit = 1 if cut.spanning else config.visit or cut.per * cdiv(cut.cols, config.along)
    params = _params_of(len(ks))(
        **of_call(memory, blocks(memory, config)), inbox=views(memory.inbox), signals=views(memory.signals),
        inbox_half=memory.inbox.half(torch.uint8), signals_half=memory.signals.half(torch.int32),
        runs=cut.runs, n=n, k=ks, part_rows=cut.part_rows, rows=cut.rows, cols=cut.cols,
        visit=visit,
    )  # fmt: skip
    return found, params
