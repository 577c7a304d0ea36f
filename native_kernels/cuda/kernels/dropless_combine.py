"""Launches dropless_combine.cu: expert_matmul_all_to_all of experts with any number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.gemm import (
    BM,
    POINTERS,
    PROGRESS_BYTES,
    TENSOR_MAP,
    Constants,
    blocks,
    constants,
    fields,
    filled,
    launch,
    map_terms,
    most_stages,
    of_call,
    shared_bytes,
    views,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, per_memory

SOURCE = "dropless_combine.cu"
SLICE, STARTS = 128, 8
HEIGHTS = (32, 64, BM)
"""Rows of a tile."""
MOST_EXPERTS = 1024
STARTS_OF_PARTS = ctypes.c_int32 * 9
"""Where the part of each of up to 8 ranks begins, and where the last one ends."""


@cache
def _params_of(terms: int) -> type[ctypes.Structure]:
    class Params(ctypes.Structure):
        _fields_ = (
            *fields(TENSOR_MAP * terms, "x", "w"),
            *fields(ctypes.c_void_p, "out", "bias", "offsets", "positions"),
            *fields(POINTERS, "inbox", "signals"),
            *fields(ctypes.c_void_p, "state", "trace"),
            *fields(ctypes.c_int64, "inbox_half", "signals_half"),
            *fields(STARTS_OF_PARTS, "sent", "received"),
            *fields(ctypes.c_int32, "rows", "n"),
            ("k", ctypes.c_int32 * terms),
            *fields(ctypes.c_int32, "rank", "site", "slots", "cols", "programs"),
        )

    return Params


@dataclass(frozen=True)
class DroplessConfig:
    """The configuration of `dropless_combine.cu` and `dropless_dispatch.cu`.

    bn: columns of a tile; across: blocks of a cluster with one block of the weight, for neighbouring rows of
    an expert; along: those with one block of x.
    """

    bn: int = 256
    across: int = 1
    along: int = 1

    @property
    def cluster(self) -> int:
        return self.across * self.along

    def stages(self, experts: int, height: int, staged: int | None = None) -> int:
        """Blocks of K in flight, beside which lie the rows of experts; staged: as of `shared_bytes`."""
        return most_stages(self.bn, rows=height, beside=8 * (experts + 2) + PROGRESS_BYTES, staged=staged)

    def shared_bytes(self, experts: int, height: int, staged: int | None = None) -> int:
        return shared_bytes(self.bn, self.stages(experts, height, staged), rows=height, staged=staged)


def height_of(rows: int, experts: int) -> int:
    """Rows of a tile, by how many an expert has on average: ranks need not agree on it."""
    return next(height for height in HEIGHTS if 2 * rows <= experts * height or height == BM)


def dropless_combine_needs(rows: int, n: int, world: int) -> Need:
    """What a call uses, of `rows` rows that a rank is sent in all, of 16-bit floats."""
    return Need(inbox=2 * rows * n * 2, signals=2 * 4 * (STARTS + world * cdiv(rows, SLICE)))


def dropless_constants(
    params: type[ctypes.Structure], experts: int, world: int, transposed: bool, dtype: torch.dtype,
    biased: bool, height: int, config: DroplessConfig, trace: bool, staged: int | None = None, **own: int,
) -> Constants:  # fmt: skip
    """The macros of both kernels; `own`: those that only one of them has."""
    return constants(
        params, config, world, transposed, dtype, trace, ROWS=height,
        STAGES=config.stages(experts, height, staged), BIASED=biased, EXPERTS=experts, **own,
    )  # fmt: skip


def dropless_combine_constants(
    experts: int, world: int, transposed: bool, dtype: torch.dtype, biased: bool, height: int,
    config: DroplessConfig, trace: bool, terms: int = 1,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with."""
    return dropless_constants(
        _params_of(terms), experts, world, transposed, dtype, biased, height, config, trace, TERMS=terms
    )


def launch_dropless_combine(
    memory: PeerMemory,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor,
    offsets: Tensor | None,
    positions: Tensor | None,
    received: Sequence[int],
    sent: Sequence[int],
    config: DroplessConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
) -> None:
    """The sum of `x[i] @ w[i]`, with the weight of each row's expert, plus `bias: [E, N]`.

    x[i]: [rows, K_i]; w[i]: [E, K_i, N], all transposed or none; added up in fp32, and rounded once.
    Row i goes to row `positions[i]` (int64; None: i) of a send buffer of as many rows: a permutation. Rows of
    expert e end at `offsets[e]` (int32; None: all have as many), behind the last one they are 0. Parts of the
    buffer have `sent[d]` rows, those of out: [sum(received), N], `received[s]`. Offsets and positions are
    contiguous, on the device. trace: three rows of events a program.
    """
    rows, (experts, _, n), ks = x[0].shape[0], w[0].shape, tuple(xi.shape[1] for xi in x)
    kind = memory, experts, ks, n, w[0].stride(2) != 1, x[0].dtype, bias is not None
    for height in HEIGHTS if compile_only else (height_of(rows, experts),):
        found, template = _prepared(*kind, height, config, trace is not None)
    if compile_only:
        return
    params = filled(template, site, trace, out=out, bias=bias, offsets=offsets, positions=positions)
    params.rows = rows
    params.sent[: memory.world + 1] = [0, *accumulate(sent)]
    params.received[: memory.world + 1] = [0, *accumulate(received)]
    # A rank without rows launches it, too; there is no tensor map of nothing.
    mapped = [(xi if rows else xi.new_empty(1, xi.shape[1])).unsqueeze(0) for xi in x]
    map_terms(params, mapped, w, config, height)
    launch(found, params, config.cluster)


@per_memory
def _prepared(
    memory: PeerMemory, experts: int, ks: tuple[int, ...], n: int, transposed: bool, dtype: torch.dtype,
    biased: bool, height: int, config: DroplessConfig, trace: bool,
) -> tuple[Kernel, ctypes.Structure]:  # fmt: skip
    """The kernel and the parameters that do not change from call to call."""
    world = memory.world
    compiled_with = dropless_combine_constants(
        experts, world, transposed, dtype, biased, height, config, trace, len(ks)
    )
    found = kernel(SOURCE, "dropless_combine", compiled_with, config.shared_bytes(experts, height))
    signals_half = memory.signals.half(torch.int32)
    params = _params_of(len(ks))(
        **of_call(memory, blocks(memory, config)), inbox=views(memory.inbox), signals=views(memory.signals),
        inbox_half=memory.inbox.half(torch.uint8), signals_half=signals_half, n=n, k=ks,
        slots=(signals_half - STARTS) // world, cols=cdiv(n, config.bn),
    )  # fmt: skip
    return found, params
