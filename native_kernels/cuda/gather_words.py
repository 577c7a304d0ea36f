"""Launches gather_words.cu: all_gather_matmul of at most 8 tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autofuse.native_kernels.triton.memory import EVENTS, SHARED_MEMORY, Need, PeerMemory, cdiv

from .gemm import BK, POINTERS, TENSOR_MAP, Constants, launch, set_map
from .launcher import Kernel, kernel

SOURCE = "gather_words.cu"
MOST_ROWS = 8
COLS = 64
"""Columns of Y that a warpgroup computes."""
TEAMS = 4
"""Warpgroups of a block that take x."""
HEAD = 64
"""Bytes before the thirds: how many calls there were, and how many lines each third holds, int64."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", TENSOR_MAP),
        *((name, ctypes.c_void_p) for name in ("part", "bias", "out", "kept")),
        ("memory", POINTERS),
        *((name, ctypes.c_void_p) for name in ("words", "state", "calls", "trace")),
        *((name, ctypes.c_int64) for name in ("third", "half")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("m", "n", "k", "rank", "site", "chunk", "tiles", "pieces", "out_pitch", "programs"),
            )
        ),
    )


@dataclass(frozen=True)
class WordsGatherConfig:
    """How `gather_words.cu` runs.

    groups: warpgroups of a block that multiply, 64 columns each; pieces: of K.
    """

    groups: int = 1
    pieces: int = 4

    @property
    def threads(self) -> int:
        return self.groups * 128 + 32 + 128 * TEAMS

    @property
    def stages(self) -> int:
        """Blocks of K in flight, as many for each team that takes x."""
        most = (SHARED_MEMORY - 2048) // (self._stage_bytes + 16)
        return min(16, most // TEAMS * TEAMS)

    @property
    def shared_bytes(self) -> int:
        """Of a block: stages, their barriers, and room to align it."""
        return self.stages * (self._stage_bytes + 16) + 1024

    @property
    def _stage_bytes(self) -> int:
        return (self.groups * COLS + MOST_ROWS) * BK * 2


def tiles_of(n: int, config: WordsGatherConfig) -> int:
    return cdiv(n, config.groups * COLS)


def words_gather_needs(m: int, k: int, n: int, itemsize: int, config: WordsGatherConfig) -> Need:
    """What a call uses."""
    sums = (config.pieces - 1) * tiles_of(n, config) * config.groups * COLS * MOST_ROWS * 4
    return Need(gathers=HEAD + 3 * (m * k * itemsize + 16), words=2 * sums)


def words_gather_constants(
    world: int, transposed: bool, dtype: torch.dtype, biased: bool, config: WordsGatherConfig, trace: bool
) -> Constants:
    """What the kernel is compiled with."""
    found = {
        "W": world,
        "G": config.groups,
        "TAKERS": 128 * TEAMS,
        "STAGES": config.stages,
        "TRANSPOSED": transposed,
        "FP16": dtype is torch.float16,
        "BIASED": biased,
        "TRACE": trace,
        "EVENTS": EVENTS,
    }
    return tuple((name, int(value)) for name, value in found.items())


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
    keep: bool = False,
) -> Tensor:
    """As `launch_gather_matmul_few` of `native_kernels.triton`, with `W * C <= 8`; returns X [W * C, K] with
    `keep`, else nothing of use.

    trace: two rows of events a program, of who multiplies and of who loads.
    """
    (chunk, k), n = part.shape, w.shape[1]
    found, template = _prepared(
        memory, chunk, k, n, w.stride(1) != 1, part.dtype, bias is not None, config, trace is not None
    )
    kept = part.new_empty(memory.world * chunk if keep else 0, k)
    if compile_only:
        return kept
    params = _Params.from_buffer_copy(template)
    params.part, params.out, params.site = part.data_ptr(), out.data_ptr(), site
    params.out_pitch = out.stride(0) * out.element_size()
    if keep:
        params.kept = kept.data_ptr()
    if bias is not None:
        params.bias = bias.data_ptr()
    if trace is not None:
        params.trace = trace.data_ptr()
    if w.stride(1) == 1:
        set_map(params, "w", w, BK, COLS)
    else:
        set_map(params, "w", w.t(), COLS, BK)
    launch(found, params, 1, config.threads)
    return kept


@lru_cache(maxsize=1024)
def _prepared(
    memory: PeerMemory, chunk: int, k: int, n: int, transposed: bool, dtype: torch.dtype, biased: bool,
    config: WordsGatherConfig, trace: bool,
) -> tuple[Kernel, _Params]:  # fmt: skip
    """The kernel, and what does not change from call to call."""
    m = memory.world * chunk
    compiled_with = words_gather_constants(memory.world, transposed, dtype, biased, config, trace)
    found = kernel(SOURCE, "gather_words", compiled_with, config.shared_bytes)
    params = _Params(
        words=memory.words.views[memory.rank].data_ptr(), state=memory.state.data_ptr(),
        calls=memory.gathers.views[memory.rank].data_ptr(), trace=memory.state.data_ptr(),
        third=(memory.gathers.views[0].numel() - HEAD) // 3 // 16 * 16, half=memory.words.half(torch.uint8),
        m=m, n=n, k=k, rank=memory.rank, chunk=chunk, tiles=tiles_of(n, config), pieces=config.pieces,
        programs=memory.programs,
    )  # fmt: skip
    for r in range(memory.world):
        params.memory[r] = memory.gathers.views[r].data_ptr() + HEAD
    return found, params
