"""Launches matmul_reduce.cu: matmul_all_reduce and matmul_reduce_scatter, computed by clusters of blocks.

Blocks of a cluster load a share of a block of x or of the weight each and send it to all that need it, so that the
L2 cache is read less; which is what bounds a product of few rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.native_kernels.triton.memory import EVENTS, LONGEST_ROW, Need, PeerMemory, cdiv

from .launcher import Kernel, kernel, most_clusters, tensor_map

BM, BK, THREADS = 128, 64, 384


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_byte * 128),
        ("w", ctypes.c_byte * 128),
        ("out", ctypes.c_void_p),
        ("inbox", ctypes.c_void_p * 8),
        ("finished", ctypes.c_void_p * 8),
        ("signals", ctypes.c_void_p * 8),
        ("state", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("inbox_half", ctypes.c_int64),
        ("finished_half", ctypes.c_int64),
        ("signals_half", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("m", "n", "k", "rank", "site", "chunk_rows", "stretch", "rows", "cols"),
                *("height", "pitch", "out_pitch", "visit", "lag", "programs"),
            )
        ),
    )


@dataclass(frozen=True)
class ClusterReduceConfig:
    """How `matmul_reduce.cu` runs.

    bn: columns of a tile of 128 rows; across: blocks of a cluster with one block of the weight, of as many owners;
    along: those with one block of x; stages: blocks of K in flight; visit: tiles a visit (0: a share of the
    blocks); part: rows that are reduced by one team at a time.
    """

    bn: int = 256
    across: int = 2
    along: int = 1
    stages: int = 3
    visit: int = 0
    part: int = 16

    @property
    def shared_bytes(self) -> int:
        return self.stages * (BM + self.bn) * BK * 2 + BM * (self.bn * 2 + 16) + 16 * self.stages + 16 + 1024 + 16 * self.bn * 2


@dataclass(frozen=True)
class _Cut:
    """Tiles of a chunk; a tile that spans all owners has `height` rows of each."""

    inner: int
    stretch: int
    rows: int
    cols: int
    height: int
    spanning: bool

    @classmethod
    def of(cls, m: int, n: int, outer: int, world: int, bn: int) -> _Cut:
        inner = cdiv(m, world * outer)
        stretch = 1 if m <= BM else cdiv(inner, BM)
        return cls(inner, stretch, outer * stretch, cdiv(n, bn), inner if m <= BM else BM, m <= BM)

    def part(self, config: ClusterReduceConfig) -> int:
        """Rows of a part: as configured where that divides the rows of a tile."""
        return config.part if self.height % config.part == 0 else self.height


def cluster_reduce_needs(
    m: int, n: int, outer: int, itemsize: int, world: int, all_ranks: bool, config: ClusterReduceConfig
) -> Need:
    """What a call uses."""
    cut = _Cut.of(m, n, outer, world, config.bn)
    chunk = cut.rows * cut.height * cut.cols * config.bn * itemsize
    counters = world * cut.rows * cut.cols * (1 + cut.height // cut.part(config) * all_ranks)
    return Need(
        inbox=2 * (world * chunk + LONGEST_ROW),
        finished=2 * world * chunk * all_ranks,
        signals=2 * 4 * counters,
    )


def cluster_reduce_kernel(
    world: int, transposed: bool, dtype: torch.dtype, mean: bool, all_ranks: bool, order: int, cut: _Cut,
    trace: bool, config: ClusterReduceConfig,
) -> tuple[str, str, tuple[tuple[str, int], ...], int]:  # fmt: skip
    """What `kernel` compiles."""
    constants = {
        "W": world,
        "ORDER": order,
        "ACROSS": config.across,
        "ALONG": config.along,
        "BN": config.bn,
        "STAGES": config.stages,
        "TRANSPOSED": transposed,
        "FP16": dtype is torch.float16,
        "ALL": all_ranks,
        "MEAN": mean,
        "SPANNING": cut.spanning,
        "HEIGHT": cut.height,
        "PART": cut.part(config),
        "TRACE": trace,
        "EVENTS": EVENTS,
    }
    named = tuple((name, int(value)) for name, value in constants.items())
    return "matmul_reduce.cu", "matmul_reduce", named, config.shared_bytes


def launch_cluster_matmul_reduce(
    memory: PeerMemory,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    outer: int,
    order: int,
    config: ClusterReduceConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """As `launch_matmul_reduce` of `native_kernels.triton.matmul_reduce`, cut by rows; world a multiple of
    `config.across`; of at most 128 rows, outer is 1 and `across`, too."""
    (m, k), n, world, rank = x.shape, w.shape[1], memory.world, memory.rank
    cut = _Cut.of(m, n, outer, world, config.bn)
    transposed = w.stride(1) != 1
    found = kernel(
        *cluster_reduce_kernel(
            world, transposed, x.dtype, mean, all_ranks, order, cut, trace is not None,
            config,
        )  # fmt: skip
    )
    if compile_only:
        return
    cluster = config.across * config.along
    programs = _blocks(found, cluster)
    parts = cut.rows * cut.cols * (cut.height // cut.part(config))
    pitch = cut.cols * config.bn * x.element_size()
    height = cut.rows * cut.height

    params = _Params(
        chunk_rows=cut.inner, stretch=cut.stretch, rows=cut.rows, cols=cut.cols, height=height, pitch=pitch,
        m=m, n=n, k=k, rank=rank, site=site, out_pitch=out.stride(0) * x.element_size(),
        visit=config.visit or max(1, programs // world),
        lag=parts if parts < 3 * programs else (programs // world + 1) * (cut.height // cut.part(config)),
        programs=programs, out=out.data_ptr(), state=memory.state.data_ptr(),
        trace=(memory.state if trace is None else trace).data_ptr(),
        inbox_half=memory.inbox.half(torch.uint8), finished_half=memory.finished.half(torch.uint8),
        signals_half=memory.signals.half(torch.int32),
    )  # fmt: skip
    shares = config.bn // config.across
    weight = (
        tensor_map(w.t(), shares, BK) if transposed else tensor_map(w, BK, BK)
    )
    ctypes.memmove(params.x, tensor_map(x, BM // config.along, BK), 128)
    ctypes.memmove(params.w, weight, 128)
    for r in range(world):
        params.inbox[r] = memory.inbox.views[r].data_ptr()
        params.finished[r] = memory.finished.views[r].data_ptr()
        params.signals[r] = memory.signals.views[r].data_ptr()
    found.launch(programs, cluster, THREADS, params, torch.cuda.current_stream().cuda_stream)


def _blocks(found: Kernel, cluster: int) -> int:
    count = _most.get((found, cluster))
    if count is None:
        count = _most[found, cluster] = most_clusters(found, cluster, THREADS) * cluster
    return count


_most: dict[tuple[Kernel, int], int] = {}
