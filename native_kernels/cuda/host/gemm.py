"""Shared memory, parameters, tensor maps and numbers of blocks: for launchers of kernels over gemm.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from autofuse.lowering.torch_internals import current_raw_stream
from autofuse.native_kernels.gpu.memory import EVENTS, SHARED_MEMORY, PeerMemory, Region, cdiv
from autofuse.native_kernels.gpu.prepared import MAP_BYTES, At

from .compiler import Constants as Constants
from .launcher import Kernel, kernel, macros, most_clusters, tensor_map

BM, BK, THREADS = 128, 64, 384
BOX = 64
"""Columns of a box of the weight: the width of the swizzle."""
CLUSTERS = (1, 2, 4, 8)
PROGRESS_BYTES = 640
"""Shared memory for `Progress` of frame.cuh and for other words that a block declares."""

TENSOR_MAP = ctypes.c_byte * 128
POINTERS = ctypes.c_void_p * 8

P = TypeVar("P", bound=ctypes.Structure)


def fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type for a ctypes structure."""
    return tuple((name, kind) for name in names)


def views(region: Region) -> Any:
    """The addresses of the region of every rank, as POINTERS."""
    return POINTERS(*(view.data_ptr() for view in region.views))


def of_call(memory: PeerMemory, programs: int) -> dict[str, int]:
    """The fields that every kernel has and that are the same in all calls."""
    state = memory.state.data_ptr()  # also as the address of a trace that is not written
    return {"state": state, "trace": state, "rank": memory.rank, "programs": programs}


def shared_bytes(bn: int, stages: int, split: int = 1, rows: int = BM, staged: int | None = None) -> int:
    """Shared memory of a block: stages of x and w, a staged tile, partial sums, barriers, room to align.

    staged: the columns of a tile that are staged at once; None: all."""
    partials = rows // split * bn * 4 * (split - 1)
    wide = cdiv(bn, BOX) * BOX
    tile = rows * (wide if staged is None else staged) * 2
    return stages * (rows + wide) * BK * 2 + tile + partials + 16 * (stages + 2) + 1024


def most_stages(bn: int, split: int = 1, rows: int = BM, beside: int = 0, staged: int | None = None) -> int:
    """How many stages fit, for tiles of `rows` rows; beside: bytes of shared memory in other use."""
    fixed, more = (shared_bytes(bn, stages, split, rows, staged) for stages in (0, 1))
    return (SHARED_MEMORY - beside - fixed) // (more - fixed)


@cache
def clusters_at_once(device: torch.device) -> tuple[int, ...]:
    """How many clusters of 1, 2, 4 and 8 blocks this GPU runs at once, one block a multiprocessor.

    GPUs of one model differ: a cluster lies within a group of multiprocessors, some of which are disabled.
    """
    with torch.cuda.device(device):
        empty = kernel("occupancy.cu", "occupancy", (), SHARED_MEMORY)
        return tuple(most_clusters(empty, cluster, THREADS) for cluster in CLUSTERS)


class ClusterConfig(Protocol):
    """The fields that all configurations of kernels over gemm.cuh have."""

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
    """The number of blocks of a launch, the same on all ranks."""
    cluster = config.cluster
    return min(memory.clusters[CLUSTERS.index(cluster)], memory.programs // cluster) * cluster


def constants(
    params: type[ctypes.Structure],
    config: ClusterConfig,
    world: int,
    transposed: bool,
    dtype: torch.dtype,
    trace: bool,
    **own: int,
) -> Constants:
    """The macros of a kernel over gemm.cuh. own: macros that only this kernel has, and other values of macros
    that all have."""
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
    return macros(params, shared | own)


def set_map(params: ctypes.Structure, name: str, matrix: Tensor, box_rows: int, box_cols: int) -> None:
    ctypes.memmove(getattr(params, name), tensor_map(matrix, box_rows, box_cols), 128)
    note(params, name, matrix, is_map=True)


def note(params: Any, name: str, tensor: Tensor, index: int = 0, is_map: bool = False) -> None:
    """Notes for `gpu/prepared.py` that a field, or an entry of one, holds the address or the map of a
    tensor."""
    offset = getattr(type(params), name).offset + index * (MAP_BYTES if is_map else 8)
    params.noted = [*getattr(params, "noted", ()), At(offset, tensor.data_ptr(), is_map)]


def filled(template: P, site: int, trace: Tensor | None, **tensors: Tensor | None) -> P:
    """A copy of `template` with the site, the trace and the addresses of the tensors of one call."""
    params = type(template).from_buffer_copy(template)
    params.site = site
    for name, tensor in (tensors | {"trace": trace}).items():
        if tensor is not None:
            setattr(params, name, tensor.data_ptr())
            note(params, name, tensor)
    return params


def map_weight(params: ctypes.Structure, w: Tensor, across: int) -> None:
    """Set `params.w`: a weight `[K, N]`, or a stack of weights."""
    ctypes.memmove(params.w, weight_map(w, across), 128)
    note(params, "w", w, is_map=True)


def weight_map(w: Tensor, across: int) -> bytes:
    """The map of a weight: boxes of BK x BOX, or `across` rows of a transpose."""
    return tensor_map(w, BK, BOX) if w.stride(-1) == 1 else tensor_map(w.transpose(-2, -1), across, BK)


def map_terms(
    params: ctypes.Structure, x: Sequence[Tensor], w: Sequence[Tensor], config: ClusterConfig, rows: int = BM
) -> None:
    """Set `params.x` and `params.w`, a map for each term of a sum. A box is the share that a block
    of a cluster loads."""
    for i, (xi, wi) in enumerate(zip(x, w, strict=True)):
        ctypes.memmove(params.x[i], tensor_map(xi, rows // config.along, BK), 128)
        ctypes.memmove(params.w[i], weight_map(wi, config.bn // config.across), 128)
        for name, matrix in (("x", xi), ("w", wi)):
            note(params, name, matrix, i, is_map=True)


def launch(found: Kernel, params: Any, cluster: int, threads: int = THREADS) -> None:
    """Launch `params.programs` blocks on the current stream."""
    found.launch(params.programs, cluster, threads, params, current_raw_stream(found.device))
