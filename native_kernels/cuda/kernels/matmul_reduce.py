"""Launches matmul_reduce.cu: matmul_all_reduce and matmul_reduce_scatter, computed by clusters of blocks.

Each block of a cluster loads a share of a block of x or of the weight and multicasts it to the blocks that
need it, so that the L2 cache is read less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.gemm import (
    BM,
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
    shared_bytes,
    views,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, CopyEngine
from autofuse.native_kernels.gpu.memory import LONGEST_ROW, Need, PeerMemory, cdiv, per_memory

SOURCE = "matmul_reduce.cu"


@cache
def _params_of(terms: int) -> type[ctypes.Structure]:
    class Params(ctypes.Structure):
        _fields_ = (
            *fields(TENSOR_MAP * terms, "x", "w"),
            *fields(ctypes.c_void_p, "out", "bias", "added"),
            *fields(POINTERS, "inbox", "words", "signals"),
            *fields(ctypes.c_void_p, "state", "trace"),
            *fields(ctypes.c_int64, "inbox_half", "words_half", "signals_half"),
            *fields(ctypes.c_int32, "m", "n"),
            ("k", ctypes.c_int32 * terms),
            *fields(ctypes.c_int32, "rank", "site", "chunk_rows", "stretch", "rows", "cols"),
            *fields(ctypes.c_int32, "out_pitch", "visit", "lag", "programs"),
            ("scale", ctypes.c_float),
            ("outbox", ctypes.c_void_p),
            ("copied", POINTERS),
            ("stored", ctypes.c_void_p),
            *fields(ctypes.c_int32, "slice", "slices", "credit"),
        )

    return Params


@dataclass(frozen=True)
class ClusterReduceConfig:
    """The configuration of `matmul_reduce.cu`.

    bn: columns of a tile of 128 rows; across: blocks of a cluster that share a block of the weight, for as
    many owners; along: blocks that share a block of x; stages: blocks of K in flight; visit: tiles for one
    owner before those for the next (0: a share of the blocks); part: rows that a team reduces at a time;
    copied: copy engines move tiles to their owners, `slice` at a time; update: tiles are added at their
    owners as they come, and each sum is rounded, so that two runs may differ in their last bits.
    """

    bn: int = 256
    across: int = 2
    along: int = 1
    stages: int = 3
    visit: int = 0
    part: int = 16
    copied: bool = False
    slice: int = 32
    update: bool = False

    @property
    def cluster(self) -> int:
        return self.across * self.along

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.bn, self.stages)


@dataclass(frozen=True)
class _Cut:
    """Tiles of a chunk: `rows` of them down, in stretches of `stretch`, and `cols` across."""

    inner: int
    stretch: int
    rows: int
    cols: int
    slices: int

    @classmethod
    def of(cls, m: int, n: int, outer: int, world: int, config: ClusterReduceConfig) -> _Cut:
        inner = cdiv(m, world * outer)
        stretch = cdiv(inner, BM)
        rows, cols = outer * stretch, cdiv(n, config.bn)
        return cls(inner, stretch, rows, cols, cdiv(rows * cols, config.slice))


def cluster_reduce_needs(
    m: int, n: int, outer: int, itemsize: int, world: int, all_ranks: bool, config: ClusterReduceConfig
) -> Need:
    """The memory that a call needs."""
    cut = _Cut.of(m, n, outer, world, config)
    tiles = world * cut.rows * cut.cols
    nbytes = tiles * BM * config.bn * itemsize
    need = Need(words=2 * nbytes * all_ranks, signals=2 * 4 * tiles)
    if config.update:
        return need | Need(words=2 * nbytes // world)
    if not config.copied:
        return need | Need(inbox=2 * (nbytes + LONGEST_ROW))
    slices = world * cut.slices
    return need | Need(copies=nbytes, outbox=nbytes, copy_signals=4 * slices, done=2 * slices)


def cluster_reduce_constants(
    world: int, transposed: bool, dtype: torch.dtype, mean: bool, all_ranks: bool, order: int,
    config: ClusterReduceConfig, trace: bool, terms: int = 1, biased: bool = False, scaled: bool = False,
    added: bool = False,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with."""
    return constants(
        _params_of(terms), config, world, transposed, dtype, trace, STAGES=config.stages, ORDER=order,
        ALL=all_ranks, MEAN=mean, PART=config.part, ENGINES=config.copied, UPDATE=config.update, TERMS=terms,
        BIASED=biased, SCALED=scaled, ADDED=added,
    )  # fmt: skip


def launch_cluster_reduce(
    memory: PeerMemory,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    outer: int,
    order: int,
    config: ClusterReduceConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    engine: CopyEngine | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    added: Tensor | None = None,
) -> None:
    """As `launch_matmul_reduce` of `native_kernels.triton`, cut by rows, with the same bits. bias: [N], which
    each rank adds to its product before that is rounded. scale: by which it multiplies the rounded product.
    added: as `out`, contiguous, from a multiple of 16 bytes on; it is added to the rounded sums, which are
    rounded again.

    The world is a multiple of `config.across`. trace: three rows of events a program, for the teams that
    reduce alone and after they have multiplied. engine: copies what is `config.copied`.
    """
    m, n = x[0].shape[0], w[0].shape[1]
    ks = tuple(xi.shape[1] for xi in x)
    found, template = _prepared(
        memory, m, ks, n, w[0].stride(1) != 1, x[0].dtype, mean, all_ranks, outer, order, config,
        trace is not None, bias is not None, scale is not None, added is not None,
    )  # fmt: skip
    if compile_only:
        return
    params = filled(template, site, trace, out=out, bias=bias, added=added)
    params.out_pitch, params.scale = out.stride(0) * out.element_size(), scale or 0.0
    map_terms(params, x, w, config)
    if not config.copied:
        launch(found, params, config.cluster)
        return
    assert engine is not None
    cut = _Cut.of(m, n, outer, memory.world, config)
    tile_bytes = BM * config.bn * out.element_size()
    full = memory.done[: 2 * memory.world * cut.slices].view(2, memory.world, cut.slices)[1]
    engine.fork()
    launch(found, params, config.cluster)
    engine.forward(full, cut.rows * cut.cols * tile_bytes, config.slice * tile_bytes)
    engine.join()


@per_memory
def _prepared(
    memory: PeerMemory, m: int, ks: tuple[int, ...], n: int, transposed: bool, dtype: torch.dtype, mean: bool,
    all_ranks: bool, outer: int, order: int, config: ClusterReduceConfig, trace: bool, biased: bool,
    scaled: bool, added: bool,
) -> tuple[Kernel, ctypes.Structure]:  # fmt: skip
    """The kernel and the parameters that do not change from call to call."""
    world, cut = memory.world, _Cut.of(m, n, outer, memory.world, config)
    compiled_with = cluster_reduce_constants(
        world, transposed, dtype, mean, all_ranks, order, config, trace, len(ks), biased, scaled, added
    )
    found = kernel(SOURCE, "matmul_reduce", compiled_with, config.shared_bytes)
    programs = blocks(memory, config)
    in_tile = BM // config.part
    parts = cut.rows * cut.cols * in_tile
    inbox = memory.copies if config.copied else memory.words if config.update else memory.inbox
    params = _params_of(len(ks))(
        **of_call(memory, programs), inbox=views(inbox), words=views(memory.words),
        signals=views(memory.signals), copied=views(memory.copy_signals),
        inbox_half=0 if config.copied else inbox.half(torch.uint8),
        words_half=memory.words.half(torch.uint8), signals_half=memory.signals.half(torch.int32),
        m=m, n=n, k=ks, chunk_rows=cut.inner, stretch=cut.stretch, rows=cut.rows,
        cols=cut.cols, visit=config.visit or max(1, programs // world),
        lag=parts if parts < 3 * programs else (programs // world + 1) * in_tile,
        outbox=memory.outbox.data_ptr(), stored=memory.done.data_ptr(), slice=config.slice, slices=cut.slices,
        credit=FIRST_CREDIT,
    )  # fmt: skip
    return found, params
