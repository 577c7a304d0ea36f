"""What launchers of the kernels over gemm.cuh share: sizes, tensor maps, and how many blocks run at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from autofuse.lowering.torch_internals import current_raw_stream
from autofuse.native_kernels.gpu.memory import EVENTS, SHARED_MEMORY, PeerMemory

from .launcher import Kernel, kernel, most_clusters, tensor_map

BM, BK, THREADS = 128, 64, 384
CLUSTERS = (1, 2, 4, 8)

TENSOR_MAP = ctypes.c_byte * 128
POINTERS = ctypes.c_void_p * 8

P = TypeVar("P", bound=ctypes.Structure)
Constants: TypeAlias = tuple[tuple[str, int], ...]


def shared_bytes(bn: int, stages: int, split: int = 1, rows: int = BM) -> int:
    """Of a block: stages of x and of the weight, a staged tile, partial sums, barriers, room to align it."""
    partials = rows // split * bn * 4 * (split - 1)
    return stages * (rows + bn) * BK * 2 + rows * bn * 2 + partials + 16 * (stages + 2) + 1024


def most_stages(bn: int, split: int = 1, rows: int = BM, beside: int = 0) -> int:
    """As many blocks of K in flight as there is room for, of tiles of `rows` rows; `beside`: bytes in use."""
    fixed, more = (shared_bytes(bn, stages, split, rows) for stages in (0, 1))
    return (SHARED_MEMORY - beside - fixed) // (more - fixed)


@cache
def clusters_at_once(device: torch.device) -> tuple[int, ...]:
    """How many clusters of each of CLUSTERS this GPU runs at once, a block a multiprocessor.

    GPUs of one model differ: clusters lie within groups of processors, of which some are switched off.
    """
    with torch.cuda.device(device):
        empty = kernel("occupancy.cu", "occupancy", (), SHARED_MEMORY)
        return tuple(most_clusters(empty, cluster, THREADS) for cluster in CLUSTERS)


class ClusterConfig(Protocol):
    """What all configurations of kernels over gemm.cuh say."""

    @property
    def bn(self) -> int: ...
    @property
    def across(self) -> int: ...
    @property
    def along(self) -> int: ...
    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""


def blocks(memory: PeerMemory, config: ClusterConfig) -> int:
    """How many blocks a launch has, the same on all ranks."""
    cluster = config.cluster
    return min(memory.clusters[CLUSTERS.index(cluster)], memory.programs // cluster) * cluster


def constants(
    config: ClusterConfig, world: int, transposed: bool, dtype: torch.dtype, trace: bool, **own: int
) -> Constants:
    """What a kernel is compiled with; `own`: what it alone has, or has otherwise."""
    shared = {
        "W": world,
        "ROWS": BM,
        "ACROSS": config.across,
        "ALONG": config.along,
        "SPLIT": 1,
        "BN": config.bn,
        "TRANSPOSED": transposed,
        "FP16": dtype is torch.float16,
        "TRACE": trace,
        "EVENTS": EVENTS,
    }
    return tuple((name, int(value)) for name, value in (shared | own).items())


def map_operands(
    params: ctypes.Structure, x: Tensor, w: Tensor, config: ClusterConfig, rows: int = BM
) -> None:
    """Sets `params.x` and `params.w`: boxes of which each block of a cluster loads a share."""
    set_map(params, "x", x, rows // config.along, BK)
    map_weight(params, w, config.bn // config.across)


def set_map(params: ctypes.Structure, name: str, matrix: Tensor, box_rows: int, box_cols: int) -> None:
    ctypes.memmove(getattr(params, name), tensor_map(matrix, box_rows, box_cols), 128)


def filled(template: P, site: int, trace: Tensor | None, **tensors: Tensor | None) -> P:
    """What is the same in all calls of a kind, with the tensors of one."""
    params = type(template).from_buffer_copy(template)
    params.site = site
    for name, tensor in (tensors | {"trace": trace}).items():
        if tensor is not None:
            setattr(params, name, tensor.data_ptr())
    return params


def map_weight(params: ctypes.Structure, w: Tensor, across: int) -> None:
    """Sets `params.w`, of a weight `[K, N]` or a stack of such."""
    ctypes.memmove(params.w, weight_map(w, across), 128)


def weight_map(w: Tensor, across: int) -> bytes:
    """Of boxes of BK x 64, as wide as the swizzle, or of `across` columns of a transpose."""
    return tensor_map(w, BK, 64) if w.stride(-1) == 1 else tensor_map(w.transpose(-2, -1), across, BK)


def map_terms(
    params: ctypes.Structure, x: Sequence[Tensor], w: Sequence[Tensor], config: ClusterConfig, rows: int
) -> None:
    """As `map_operands` of a sum of products: `params.x` and `params.w` are arrays."""
    for i, (xi, wi) in enumerate(zip(x, w, strict=True)):
        ctypes.memmove(params.x[i], tensor_map(xi, rows // config.along, BK), 128)
        ctypes.memmove(params.w[i], weight_map(wi, config.bn // config.across), 128)


def launch(found: Kernel, params: Any, cluster: int, threads: int = THREADS) -> None:
    """On the current stream, `params.programs` blocks."""
    found.launch(params.programs, cluster, threads, params, current_raw_stream(found.device))
