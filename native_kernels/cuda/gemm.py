"""What launchers of the kernels over gemm.cuh share: sizes, tensor maps, and how many blocks run at once."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from autofuse.native_kernels.triton.memory import PeerMemory

from .launcher import kernel, most_clusters, tensor_map

BM, BK, THREADS = 128, 64, 384
CLUSTERS = (1, 2, 4, 8)
SHARED_MEMORY = 227 * 1024

TENSOR_MAP = ctypes.c_byte * 128
POINTERS = ctypes.c_void_p * 8


def shared_bytes(bn: int, stages: int, more: int = 0) -> int:
    """Of a block: stages of x and of the weight, a staged tile, barriers, `more`, and room to align it."""
    return stages * (BM + bn) * BK * 2 + BM * bn * 2 + 16 * (stages + 1) + more + 1024


@cache
def clusters_at_once(device: torch.device) -> tuple[int, ...]:
    """How many clusters of each of CLUSTERS this GPU runs at once, a block a multiprocessor.

    GPUs of one model differ: clusters lie within groups of processors, of which some are switched off.
    """
    with torch.cuda.device(device):
        empty = kernel("occupancy.cu", "occupancy", (), SHARED_MEMORY)
        return tuple(most_clusters(empty, cluster, THREADS) for cluster in CLUSTERS)


def blocks(memory: PeerMemory, cluster: int) -> int:
    """How many blocks a launch has, the same on all ranks."""
    return min(memory.clusters[CLUSTERS.index(cluster)], memory.programs // cluster) * cluster


def map_operands(params: ctypes.Structure, x: Tensor, w: Tensor, across: int, along: int, bn: int) -> None:
    """Sets `params.x` and `params.w`: boxes of which each block of a cluster loads a share."""
    set_map(params, "x", x, BM // along, BK)
    if w.stride(1) == 1:
        set_map(params, "w", w, BK, 64)  # of 64 columns, as wide as the swizzle
    else:
        set_map(params, "w", w.t(), bn // across, BK)


def set_map(params: ctypes.Structure, name: str, matrix: Tensor, box_rows: int, box_cols: int) -> None:
    ctypes.memmove(getattr(params, name), tensor_map(matrix, box_rows, box_cols), 128)
