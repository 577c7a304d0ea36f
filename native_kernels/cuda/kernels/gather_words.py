"""Launches gather_words.cu: all_gather_matmul of at most 256 tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.host.gemm import (
    BK,
    POINTERS,
    TENSOR_MAP,
    Constants,
    fields,
    filled,
    launch,
    map_weight,
    of_call,
    set_map,
    views,
)
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel, macros
from autofuse.native_kernels.gpu.memory import EVENTS, SHARED_MEMORY, Need, PeerMemory, cdiv, per_memory

SOURCE = "gather_words.cu"
MOST_ROWS = 256
_CHECKERS = {1: 6, 2: 2}
"""Most checker warps of a block, by warpgroups that multiply: the warps that neither multiply nor load."""
COLS = 64
"""Columns of Y that a warpgroup computes."""
LINE = 128
"""Bytes that TMA loads at once; thirds, and rows of x where possible, begin at multiples."""
HEAD = LINE
"""Bytes before the thirds, for int64 counts: of calls, and of lines that each third holds."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", TENSOR_MAP),
        ("x", TENSOR_MAP),
        *fields(ctypes.c_void_p, "part", "bias", "out", "kept"),
        *fields(POINTERS, "memory", "signals"),
        *fields(ctypes.c_void_p, "words", "state", "calls", "trace"),
        *fields(ctypes.c_int64, "third", "half", "signals_half"),
        *fields(ctypes.c_int32, "m", "n", "k", "rank", "site", "chunk", "tiles", "out_pitch", "programs"),
    )


@dataclass(frozen=True)
class WordsGatherConfig:
    """The configuration of `gather_words.cu`.

    groups: warpgroups of a block that multiply, 64 columns each; pieces: of K; ahead: KiB of the weight that
    a block loads ahead at most, since x has to wait behind them.
    """

    groups: int = 1
    pieces: int = 4
    ahead: int = 48

    def tiles(self, n: int) -> int:
        """Tiles of the output; each piece of K has as many blocks."""
        return cdiv(n, self.groups * COLS)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a block of the weight."""
        return self.groups * COLS * BK * 2

    def stages(self, tokens: int) -> tuple[int, int]:
        """Stages of x and of the weight: as many as fit."""
        x_bytes = tokens * BK * 2
        x = min((128 if tokens > 128 else 96 if tokens > 64 else 64) * 1024 // x_bytes, 32)
        left = SHARED_MEMORY - 1024 - x * (x_bytes + 24)
        return x, left // (self.weight_bytes + 16)

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory of a block: stages, their barriers, and room to align."""
        x, weight = self.stages(tokens)
        return x * (tokens * BK * 2 + 24) + weight * (self.weight_bytes + 16) + 1024


def tokens_of(m: int) -> int:
    """The tokens of a tile: a size of the tensor cores' instruction."""
    return max(8, 1 << (m - 1).bit_length())


def _is_signalled(m: int) -> bool:
    """Whether a signal says that x has arrived: with many tokens, checking all words takes longer."""
    return m > 64


def words_gather_needs(m: int, k: int, n: int, itemsize: int, world: int, config: WordsGatherConfig) -> Need:
    """The memory that a call needs."""
    sums = config.tiles(n) * config.groups * COLS * tokens_of(m) * 4 * config.pieces
    return Need(
        gathers=HEAD + 3 * (m * k * itemsize + LINE),
        words=2 * sums if config.pieces > 1 else 0,
        signals=2 * 4 * world if _is_signalled(m) else 0,
    )


def words_gather_constants(
    m: int, world: int, transposed: bool, dtype: torch.dtype, biased: bool, config: WordsGatherConfig,
    trace: bool,
) -> Constants:  # fmt: skip
    """The macros that the kernel is compiled with."""
    x_stages, weight_stages = config.stages(tokens_of(m))
    found = {
        "W": world,
        "TOKENS": tokens_of(m),
        "G": config.groups,
        "PIECES": config.pieces,
        "SIGNALLED": _is_signalled(m),
        "X_STAGES": x_stages,
        "CHECKERS": max(c for c in range(1, _CHECKERS[config.groups] + 1) if x_stages % c == 0),
        "W_STAGES": weight_stages,
        "AHEAD": config.ahead * 1024 // config.weight_bytes,
        "TRANSPOSED": transposed,
        "FP16": dtype is torch.float16,
        "BIASED": biased,
        "MEAN": False,
        "TRACE": trace,
        "EVENTS": EVENTS,
    }
    return macros(_Params, found)


def launch_gather_words(
    memory: PeerMemory,
    part: Tensor,
    w: Tensor,
    out: Tensor,
    config: WordsGatherConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """As `launch_gather_matmul_few` of `native_kernels.triton`, with `W * C <= MOST_ROWS`; kept: where
    X [W * C, K] is stored.

    trace: two rows of events a program, of who multiplies and of who loads x.
    """
    (chunk, k), n = part.shape, w.shape[1]
    found, template = _prepared(
        memory, chunk, k, n, w.stride(1) != 1, part.dtype, bias is not None, config, trace is not None
    )
    if compile_only:
        return
    params = filled(template, site, trace, part=part, out=out, bias=bias, kept=kept)
    params.out_pitch = out.stride(0) * out.element_size()
    map_weight(params, w, COLS)
    launch(found, params, 1)


@per_memory
def _prepared(
    memory: PeerMemory, chunk: int, k: int, n: int, transposed: bool, dtype: torch.dtype, biased: bool,
    config: WordsGatherConfig, trace: bool,
) -> tuple[Kernel, _Params]:  # fmt: skip
    """The kernel and the parameters that do not change from call to call."""
    m = memory.world * chunk
    compiled_with = words_gather_constants(m, memory.world, transposed, dtype, biased, config, trace)
    found = kernel(SOURCE, "gather_words", compiled_with, config.shared_bytes(tokens_of(m)))
    mine = memory.gathers.views[memory.rank]
    third = (mine.numel() - HEAD) // 3 // LINE * LINE
    params = _Params(
        **of_call(memory, config.tiles(n) * config.pieces), signals=views(memory.signals),
        words=memory.words.views[memory.rank].data_ptr(), calls=mine.data_ptr(),
        third=third, half=memory.words.half(torch.uint8),
        signals_half=memory.signals.half(torch.int32),
        m=m, n=n, k=k, chunk=chunk, tiles=config.tiles(n),
    )  # fmt: skip
    thirds = mine[HEAD:].view(dtype).as_strided((3, m, k), (third // 2, k, 1))
    set_map(params, "x", thirds, tokens_of(m), BK)
    for r in range(memory.world):
        params.memory[r] = memory.gathers.views[r].data_ptr() + HEAD
    return found, params
