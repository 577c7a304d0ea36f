"""Launches expert_dispatch.cu: all_to_all_expert_matmul with fixed capacity, by clusters of blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.experts import MOST_WEIGHTS, Cut, Runs, tile_cols
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
    views,
    weight_map,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel, tensor_map
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, CopyEngine
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, per_memory

SOURCE = "expert_dispatch.cu"
MOST_SLICES = 254


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", TENSOR_MAP),
        ("exchanged", TENSOR_MAP * 2),
        *fields(TENSOR_MAP * MOST_WEIGHTS, "w", "y"),
        ("parts", ctypes.c_void_p),
        ("bias", ctypes.c_void_p * MOST_WEIGHTS),
        *fields(POINTERS, "memory", "signals"),
        *fields(ctypes.c_void_p, "state", "trace"),
        *fields(ctypes.c_int64, "half", "signals_half"),
        ("runs", Runs),
        *fields(ctypes.c_int32, "n", "k", "rank", "site", "part_rows", "keep", "rows", "cols"),
        *fields(ctypes.c_int32, "slice_rows", "slices", "credit", "programs"),
    )


@dataclass(frozen=True)
class DispatchConfig:
    """The configuration of `expert_dispatch.cu`.

    bn: columns of a tile of 128 rows; across: blocks of a cluster with one block of the weight, along: with
    one block of x; within: whether those `across` work on rows of one rank, or of as many ranks (where tiles
    span ranks, on neighbouring rows of one expert); slices: of a part, in rows; copied: by copy engines.
    """

    bn: int = 256
    across: int = 2
    along: int = 1
    within: bool = False
    slices: int = 4
    copied: bool = False

    @property
    def cluster(self) -> int:
        return self.across * self.along


def slices_of(
    experts: int, rows: int, n: int, outer: int, world: int, config: DispatchConfig
) -> tuple[Cut, int]:
    """And the rows of tiles of a slice: whole experts, whole runs, or whole tiles."""
    cut = Cut.of(experts, rows, n, outer, world, config.bn, config.across)
    unit = cut.per if cut.spanning else cut.stretch if cut.run % BM else 1
    slices = min(config.slices, MOST_SLICES)
    return cut, cdiv(cdiv(cut.rows, slices), unit) * unit


def dispatch_needs(experts: int, rows: int, k: int, world: int, config: DispatchConfig) -> Need:
    """The memory that a call needs: `rows` of each expert, of 16-bit floats."""
    exchanged = experts * rows * k * 2
    if config.copied:
        return Need(copies=exchanged, copy_signals=4 * world * config.slices)
    return Need(inbox=2 * exchanged, signals=2 * 4 * world * config.slices)


def dispatch_constants(
    experts: int, rows: int, n: int, outer: int, world: int, transposed: bool, dtype: torch.dtype,
    biased: bool, config: DispatchConfig, trace: bool, weights: int = 1,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with."""
    cut, _ = slices_of(experts, rows, n, outer, world, config)
    return constants(
        _Params, config, world, transposed, dtype, trace, ROWS=cut.height, STAGES=cut.stages, BIASED=biased,
        ENGINES=config.copied, SPANNING=cut.spanning, WITHIN=cut.spanning or config.within,
        WEIGHTS=weights,
    )  # fmt: skip


def launch_expert_dispatch(
    memory: PeerMemory,
    x: Tensor,
    w: Sequence[Tensor],
    out: Sequence[Tensor],
    outer: int,
    config: DispatchConfig,
    engine: CopyEngine | None = None,
    keep: bool = False,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Sequence[Tensor] = (),
) -> None:
    """`x: [W, E, outer * run, K]`, by destination, becomes `X: [E, R, K]`; out[i] = X @ w[i] + bias[i].

    x is contiguous; R = (outer, W, run). Of up to MOST_WEIGHTS weights, all of them row-major or all
    transposed, w[i]: [E, K, N]; out[i]: [E, R, N]; bias[i]: [E, N], or there is none. keep: `exchanged` is
    called next. The world is a multiple of `config.across` unless `config.within`, which takes runs of a
    multiple of 128 * across rows; where a run has fewer than 128 rows nothing is copied by engines. trace:
    three rows of events a program.
    """
    world, experts, part_rows, k = x.shape
    rows, n = part_rows * world, w[0].shape[2]
    found, template, slice_height = _prepared(
        memory, experts, rows, k, n, w[0].stride(2) != 1, x.dtype, len(bias) > 0, outer, config,
        trace is not None, len(w),
    )  # fmt: skip
    if compile_only:
        return
    params = filled(template, site, trace, parts=x)
    params.keep, run, height = keep, params.runs.run, params.runs.height
    params.bias[: len(bias)] = [b.data_ptr() for b in bias]
    for i, (wi, y) in enumerate(zip(w, out, strict=True)):
        ctypes.memmove(params.w[i], weight_map(wi, config.bn // config.across), 128)
        ctypes.memmove(params.y[i], tensor_map(y if run < BM else y.view(-1, run, n), height, 64), 128)
        note(params, "w", wi, i, is_map=True)
        note(params, "y", y, i, is_map=True)
    for i, b in enumerate(bias):
        note(params, "bias", b, i)
    if run >= BM:
        set_map(params, "x", x[memory.rank].view(-1, run, k), height // config.along, BK)
    if config.copied:
        assert engine is not None
        engine.push(x.view(world, -1, k), slice_height, params.slices)
    launch(found, params, config.cluster)
    if config.copied:
        assert engine is not None
        engine.join()


def exchanged(memory: PeerMemory, x: Tensor, outer: int, config: DispatchConfig) -> Tensor:
    """A copy of X, `[E, R, K]`, after a launch that was to keep it; `x` is what was exchanged."""
    world, experts, part_rows, k = x.shape
    if config.copied:
        parts = memory.copies.views[memory.rank].view(x.dtype)[: x.numel()].view(x.shape).clone()
        parts[memory.rank] = x[memory.rank]
        runs = parts.view(world, experts, outer, -1, k).movedim(0, 2)
        return runs.reshape(experts, world * part_rows, k)
    return memory.received((experts, world * part_rows, k), x.dtype)


@per_memory
def _prepared(
    memory: PeerMemory, experts: int, rows: int, k: int, n: int, transposed: bool, dtype: torch.dtype,
    biased: bool, outer: int, config: DispatchConfig, trace: bool, weights: int,
) -> tuple[Kernel, _Params, int]:  # fmt: skip
    """The kernel, the parameters that do not change from call to call, and the rows of a slice."""
    world = memory.world
    cut, slice_rows = slices_of(experts, rows, n, outer, world, config)
    compiled_with = dispatch_constants(
        experts, rows, n, outer, world, transposed, dtype, biased, config, trace, weights
    )
    found = kernel(SOURCE, "expert_dispatch", compiled_with, cut.shared_bytes)
    region, signals = (
        (memory.copies, memory.copy_signals) if config.copied else (memory.inbox, memory.signals)
    )
    half = region.half(dtype)
    params = _Params(
        **of_call(memory, blocks(memory, config)), memory=views(region), signals=views(signals),
        half=region.half(torch.uint8), signals_half=signals.half(torch.int32), runs=cut.runs, n=n, k=k,
        part_rows=cut.part_rows, rows=cut.rows, cols=tile_cols(n, config, weights),
        slice_rows=slice_rows, slices=cdiv(cut.rows, slice_rows), credit=FIRST_CREDIT,
    )  # fmt: skip
    own = region.views[memory.rank].view(dtype)
    for parity in range(1 if config.copied else 2):
        stack = own[parity * half :][: experts * rows * k].view(-1, rows if cut.spanning else cut.run, k)
        box = tensor_map(stack, cut.height // config.along, BK)
        ctypes.memmove(params.exchanged[parity], box, 128)
    slice_height = slice_rows * BM if cut.run % BM == 0 else slice_rows // cut.stretch * cut.run
    return found, params, min(slice_height, cut.part_rows)
