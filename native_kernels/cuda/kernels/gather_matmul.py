"""Launches gather_matmul.cu: all_gather_matmul, computed by clusters of blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.gemm import (
    BK,
    BM,
    POINTERS,
    TENSOR_MAP,
    Constants,
    blocks,
    constants,
    fields,
    filled,
    launch,
    note,
    of_call,
    set_map,
    shared_bytes,
    views,
    weight_map,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel, tensor_map
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, CopyEngine
from autofuse.native_kernels.gpu.memory import LONGEST_ROW, Need, PeerMemory, cdiv, per_memory

SOURCE = "gather_matmul.cu"


@cache
def _params_of(weights: int) -> type[ctypes.Structure]:
    class Params(ctypes.Structure):
        _fields_ = (
            *fields(TENSOR_MAP, "x", "gathered"),
            *fields(TENSOR_MAP * weights, "w", "y"),
            ("part", ctypes.c_void_p),
            ("bias", ctypes.c_void_p * weights),
            *fields(POINTERS, "memory", "signals"),
            *fields(ctypes.c_void_p, "state", "trace"),
            ("signals_half", ctypes.c_int64),
            ("m", ctypes.c_int32),
            ("n", ctypes.c_int32 * weights),
            *fields(ctypes.c_int32, "k", "rank", "site", "chunk", "inner", "stretch", "rows", "cols"),
            *fields(ctypes.c_int32, "half_rows", "slice_rows", "slices", "k_slice", "k_slices"),
            *fields(ctypes.c_int32, "credit", "gives_credit", "programs"),
        )

    return Params


@dataclass(frozen=True)
class ClusterGatherConfig:
    """The configuration of `gather_matmul.cu`.

    bn: columns of a tile of 128 rows; across: blocks of a cluster that share a block of the weight; along:
    blocks that share a block of x; within: whether the `across` blocks work on rows of one part, or of as
    many parts; stages: blocks of K in flight; slices, k_slices: of a part, in rows and in K; copied: copy
    engines move the parts, and k_slices is 1.
    """

    bn: int = 256
    across: int = 2
    along: int = 1
    within: bool = False
    stages: int = 3
    slices: int = 1
    k_slices: int = 1
    copied: bool = False

    @property
    def cluster(self) -> int:
        return self.across * self.along

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.bn, self.stages)


def cluster_gather_needs(chunk: int, k: int, itemsize: int, world: int, config: ClusterGatherConfig) -> Need:
    """The memory that a call needs."""
    gathered = world * chunk * k * itemsize
    if config.copied:
        return Need(copies=gathered, copy_signals=4 * world * config.slices)
    return Need(inbox=2 * (gathered + LONGEST_ROW), signals=2 * 4 * world * config.slices * config.k_slices)


def cluster_gather_constants(
    m: int, world: int, transposed: bool, dtype: torch.dtype, biased: bool, config: ClusterGatherConfig,
    trace: bool, weights: int = 1,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with; m: rows of all parts."""
    return constants(
        _params_of(weights), config, world, transposed, dtype, trace, STAGES=config.stages,
        WITHIN=config.within, BIASED=biased, ENGINES=config.copied, SPANNING=m <= BM, WEIGHTS=weights,
    )  # fmt: skip


def launch_cluster_gather(
    memory: PeerMemory,
    part: Tensor,
    w: Sequence[Tensor],
    out: Sequence[Tensor],
    outer: int,
    config: ClusterGatherConfig,
    engine: CopyEngine | None = None,
    credit: bool = True,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Sequence[Tensor] = (),
) -> Tensor:
    """As `launch_gather_matmul` of `native_kernels.triton`, and returns the same.

    The world is a multiple of `config.across`, unless `config.within`; of at most 128 rows in all, outer and
    across are 1, and nothing is copied. trace: three rows of events a program.
    """
    chunk, k = part.shape
    widths = tuple(wi.shape[1] for wi in w)
    found, template, gathered, slice_height = _prepared(
        memory, chunk, k, widths, w[0].stride(1) != 1, part.dtype, bool(bias), outer, config,
        trace is not None,
    )  # fmt: skip
    if compile_only:
        return gathered
    params = filled(template, site, trace, part=part)
    params.gives_credit = credit
    set_map(params, "x", part, BM // config.along, BK)
    for i, (wi, y) in enumerate(zip(w, out, strict=True)):
        ctypes.memmove(params.w[i], weight_map(wi, config.bn // config.across), 128)
        ctypes.memmove(params.y[i], tensor_map(y.view(-1, params.inner, widths[i]), BM, 64), 128)
        note(params, "w", wi, i, is_map=True)
        note(params, "y", y, i, is_map=True)
    for i, b in enumerate(bias):
        params.bias[i] = b.data_ptr()
        note(params, "bias", b, i)
    if config.copied:
        assert engine is not None
        engine.push(part, slice_height, params.slices)
    launch(found, params, config.cluster)
    if config.copied:
        assert engine is not None
        engine.join()
    return gathered


@per_memory
def _prepared(
    memory: PeerMemory, chunk: int, k: int, widths: tuple[int, ...], transposed: bool, dtype: torch.dtype,
    biased: bool, outer: int, config: ClusterGatherConfig, trace: bool,
) -> tuple[Kernel, Any, Tensor, int]:  # fmt: skip
    """The kernel, the parameters that do not change, the gathered memory, and the rows of a slice."""
    world, m, inner = memory.world, memory.world * chunk, chunk // outer
    compiled_with = cluster_gather_constants(m, world, transposed, dtype, biased, config, trace, len(widths))
    found = kernel(SOURCE, "gather_matmul", compiled_with, config.shared_bytes)
    region, signals = (
        (memory.copies, memory.copy_signals) if config.copied else (memory.inbox, memory.signals)
    )
    half_rows = 0 if config.copied else region.half(dtype, k) // k
    gathered = region.matrix(memory.rank, dtype, 0, half_rows + m, k)
    spanning = m <= BM
    stretch = 1 if spanning else cdiv(inner, BM)
    rows = 1 if spanning else outer * stretch
    slice_rows = cdiv(rows, config.slices)
    if inner % BM:  # a slice holds whole stretches
        slice_rows = cdiv(slice_rows, stretch) * stretch
    k_slice = cdiv(cdiv(k, BK), config.k_slices) * BK
    params = _params_of(len(widths))(
        **of_call(memory, blocks(memory, config)), memory=views(region), signals=views(signals),
        signals_half=signals.half(torch.int32), m=m, n=widths, k=k, chunk=chunk,
        inner=m if spanning else inner, stretch=stretch, rows=rows,
        cols=sum(cdiv(n, config.bn) for n in widths), half_rows=half_rows, slice_rows=slice_rows,
        slices=cdiv(rows, slice_rows), k_slice=k_slice,
        k_slices=cdiv(k, k_slice), credit=FIRST_CREDIT,
    )  # fmt: skip
    set_map(params, "gathered", gathered, BM // config.along, BK)
    slice_height = slice_rows * BM if inner % BM == 0 else slice_rows // stretch * inner
    return found, params, gathered, min(slice_height, chunk)
