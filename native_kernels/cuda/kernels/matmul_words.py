"""Launches matmul_words.cu: matmul_all_reduce and matmul_reduce_scatter by flag-in-payload words."""

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
    most_stages,
    of_call,
    shared_bytes,
    views,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, per_memory

SOURCE = "matmul_words.cu"


@cache
def _params_of(terms: int) -> type[ctypes.Structure]:
    class Params(ctypes.Structure):
        _fields_ = (
            *fields(TENSOR_MAP * terms, "x", "w"),
            *fields(ctypes.c_void_p, "out", "bias", "added"),
            ("words", POINTERS),
            *fields(ctypes.c_void_p, "state", "trace"),
            ("half", ctypes.c_int64),
            *fields(ctypes.c_int32, "m", "n"),
            ("k", ctypes.c_int32 * terms),
            *fields(ctypes.c_int32, "rank", "site", "height", "slice", "rows", "cols"),
            *fields(ctypes.c_int32, "out_pitch", "programs"),
            ("scale", ctypes.c_float),
        )

    return Params


@dataclass(frozen=True)
class WordsConfig:
    """The configuration of `matmul_words.cu`.

    bn: columns of a tile; split: parts of K, one for each block of a cluster; once: of an all_reduce, every
    rank gets all parts, and sums are not sent; across: blocks of a cluster that share a block of the weight,
    for as many rows of tiles, where K is not split.
    """

    bn: int = 64
    split: int = 1
    once: bool = False
    across: int = 1

    along = 1

    @property
    def cluster(self) -> int:
        return self.split * self.across

    @property
    def stages(self) -> int:
        """Blocks of K in flight: as many as fit."""
        return most_stages(self.bn, self.split)

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.bn, self.stages, self.split)


def words_needs(m: int, n: int, itemsize: int, world: int, all_ranks: bool, config: WordsConfig) -> Need:
    """The memory that a call needs."""
    rows = m if config.once else cdiv(m, world) * (2 if all_ranks else 1)
    return Need(words=2 * world * rows * n * itemsize)


def words_constants(
    m: int, world: int, transposed: bool, dtype: torch.dtype, mean: bool, all_ranks: bool,
    config: WordsConfig, trace: bool, terms: int = 1, biased: bool = False, scaled: bool = False,
    added: bool = False,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with."""
    return constants(
        _params_of(terms),
        config,
        world,
        transposed,
        dtype,
        trace,
        STAGES=config.stages,
        ROWS=_rows(m),
        SPLIT=config.split,
        ALL=all_ranks,
        ONCE=config.once,
        MEAN=mean,
        TERMS=terms,
        BIASED=biased,
        SCALED=scaled,
        ADDED=added,
    )


def _rows(m: int) -> int:
    """Rows of a block of x: a multiple of 8, the rows of an atom of the swizzle."""
    return min(cdiv(m, 8) * 8, BM)


def launch_matmul_words(
    memory: PeerMemory,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: WordsConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    added: Tensor | None = None,
) -> None:
    """As `launch_matmul_packets` of `native_kernels.triton`. bias: [N], which each rank adds to its product
    before that is rounded. scale: by which it multiplies the rounded product. added: as `out`,
    contiguous, from a multiple of 16 bytes on; it is added to the rounded sums, which are rounded again.

    trace: three rows of events a program, of a warpgroup each.
    """
    m, n = x[0].shape[0], w[0].shape[1]
    ks = tuple(xi.shape[1] for xi in x)
    found, template = _prepared(
        memory, m, ks, n, w[0].stride(1) != 1, x[0].dtype, mean, all_ranks, config, trace is not None,
        bias is not None, scale is not None, added is not None,
    )  # fmt: skip
    if compile_only:
        return
    params = filled(template, site, trace, out=out, bias=bias, added=added)
    params.out_pitch, params.scale = out.stride(0) * out.element_size(), scale or 0.0
    map_terms(params, x, w, config, _rows(m))
    launch(found, params, config.cluster)


@per_memory
def _prepared(
    memory: PeerMemory, m: int, ks: tuple[int, ...], n: int, transposed: bool, dtype: torch.dtype, mean: bool,
    all_ranks: bool, config: WordsConfig, trace: bool, biased: bool, scaled: bool,
    added: bool,
) -> tuple[Kernel, ctypes.Structure]:  # fmt: skip
    """The kernel and the parameters that do not change from call to call."""
    compiled_with = words_constants(
        m, memory.world, transposed, dtype, mean, all_ranks, config, trace, len(ks), biased, scaled, added
    )
    found = kernel(SOURCE, "matmul_words", compiled_with, config.shared_bytes)
    rows, height = cdiv(m, BM), m if config.once else cdiv(m, memory.world)
    params = _params_of(len(ks))(
        **of_call(memory, blocks(memory, config)), words=views(memory.words),
        half=memory.words.half(torch.uint8), m=m, n=n, k=ks, height=height,
        slice=BM if config.once else cdiv(height, rows), rows=rows, cols=cdiv(n, config.bn),
    )  # fmt: skip
    return found, params
