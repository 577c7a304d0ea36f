"""Launches gather_matmul.cu: all_gather_matmul, computed by clusters of blocks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.native_kernels.triton.memory import EVENTS, LONGEST_ROW, Need, PeerMemory, cdiv

from .launcher import kernel, tensor_map
from .matmul_reduce import BK, BM, THREADS, _blocks


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_byte * 128),
        ("gathered", ctypes.c_byte * 128),
        ("w", ctypes.c_byte * 128),
        ("part", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("memory", ctypes.c_void_p * 8),
        ("signals", ctypes.c_void_p * 8),
        ("state", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("signals_half", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("m", "n", "k", "rank", "site", "chunk", "inner", "stretch", "rows", "cols"),
                *("half_rows", "slice_rows", "slices", "k_slice", "k_slices", "out_pitch", "programs"),
            )
        ),
    )


@dataclass(frozen=True)
class ClusterGatherConfig:
    """How `gather_matmul.cu` runs.

    bn: columns of a tile of 128 rows; across: blocks of a cluster with one block of the weight, along: with one block
    of x; within: whether those `across` work on rows of one part, or of as many parts; stages: blocks of K in flight;
    slices, k_slices: of a part, in rows and in K.
    """

    bn: int = 256
    across: int = 2
    along: int = 1
    within: bool = False
    stages: int = 3
    slices: int = 1
    k_slices: int = 1

    @property
    def shared_bytes(self) -> int:
        return self.stages * (BM + self.bn) * BK * 2 + BM * (self.bn * 2 + 16) + 16 * self.stages + 16 + 1024 + 12 * 1024 + 64


def cluster_gather_needs(chunk: int, k: int, itemsize: int, world: int, config: ClusterGatherConfig) -> Need:
    """What a call uses."""
    return Need(
        inbox=2 * (world * chunk * k * itemsize + LONGEST_ROW),
        signals=2 * 4 * world * config.slices * config.k_slices,
    )


def launch_cluster_gather_matmul(
    memory: PeerMemory,
    part: Tensor,
    w: Tensor,
    out: Tensor,
    outer: int,
    config: ClusterGatherConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """As `launch_gather_matmul` of `native_kernels.triton.gather_matmul`, moved by the kernel itself.

    world is a multiple of `config.across`, unless `config.within`; of at most 128 rows in all, outer and across are 1.
    """
    (chunk, k), n, world, rank = part.shape, w.shape[1], memory.world, memory.rank
    m, inner = world * chunk, chunk // outer
    spanning = m <= BM
    stretch = 1 if spanning else cdiv(inner, BM)
    rows = 1 if spanning else outer * stretch
    slice_rows = cdiv(rows, config.slices)
    if inner % BM:  # a slice holds whole stretches
        slice_rows = cdiv(slice_rows, stretch) * stretch
    slices = cdiv(rows, slice_rows)
    k_slice = cdiv(cdiv(k, BK), config.k_slices) * BK
    transposed = w.stride(1) != 1
    constants = {
        "W": world,
        "ACROSS": config.across,
        "ALONG": config.along,
        "WITHIN": config.within,
        "BN": config.bn,
        "STAGES": config.stages,
        "TRANSPOSED": transposed,
        "FP16": part.dtype is torch.float16,
        "BIASED": bias is not None,
        "SPANNING": spanning,
        "TRACE": trace is not None,
        "EVENTS": EVENTS,
    }
    named = tuple((name, int(value)) for name, value in constants.items())
    found = kernel("gather_matmul.cu", "gather_matmul", named, config.shared_bytes)
    half_rows = memory.inbox.half(part.dtype) // k
    gathered = memory.inbox.matrix(rank, part.dtype, 0, half_rows + m, k)
    if compile_only:
        return gathered
    cluster = config.across * config.along
    programs = _blocks(found, cluster)
    params = _Params(
        part=part.data_ptr(), out=out.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        state=memory.state.data_ptr(), trace=(memory.state if trace is None else trace).data_ptr(),
        signals_half=memory.signals.half(torch.int32), m=m, n=n, k=k, rank=rank, site=site, chunk=chunk,
        inner=m if spanning else inner, stretch=stretch, rows=rows, cols=cdiv(n, config.bn),
        half_rows=half_rows, slice_rows=slice_rows, slices=slices, k_slice=k_slice,
        k_slices=cdiv(k, k_slice), out_pitch=out.stride(0) * out.element_size(), programs=programs,
    )  # fmt: skip
    shares = config.bn // config.across
    weight = tensor_map(w.t(), shares, BK) if transposed else tensor_map(w, BK, BK)
    ctypes.memmove(params.x, tensor_map(part, BM // config.along, BK), 128)
    ctypes.memmove(params.gathered, tensor_map(gathered, BM // config.along, BK), 128)
    ctypes.memmove(params.w, weight, 128)
    for r in range(world):
        params.memory[r] = memory.inbox.views[r].data_ptr()
        params.signals[r] = memory.signals.views[r].data_ptr()
    found.launch(programs, cluster, THREADS, params, torch.cuda.current_stream().cuda_stream)
    return gathered
