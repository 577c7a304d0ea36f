"""Kernels in CUDA C++ on one GPU: clusters, captured graphs, other threads, and what TMA loads."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from autofuse.native_kernels.cuda.host.compiler import why_not
from autofuse.native_kernels.cuda.host.launcher import Kernel, kernel, most_clusters, tensor_map

pytestmark = [pytest.mark.gpu]

THREADS, CLUSTER = 128, 2

ADD = r"""
struct alignas(64) Params { const float* a; const float* b; float* out; int n; };

void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Each block adds the part of the other one of its cluster, which it reads from the other's shared memory.
extern "C" __global__ void add(const __grid_constant__ Params p) {
    __shared__ unsigned mine;
    if (threadIdx.x == 0) mine = blockIdx.x;
    cluster_barrier();
    unsigned rank, at, other;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(&mine));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(here), "r"(rank ^ 1));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(other) : "r"(at) : "memory");
    cluster_barrier();  // shared memory of a block that has ended is not there
    for (int i = other * blockDim.x + threadIdx.x; i < p.n; i += gridDim.x * blockDim.x)
        p.out[i] = p.a[i] + FACTOR * p.b[i];
}
"""

LOAD = r"""
struct alignas(64) Params { unsigned char map[128]; unsigned short* out; int row; int col; };

// One box goes to `out`, its swizzle undone.
extern "C" __global__ void load(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char box[];
    constexpr int BYTES = 2 * ROWS * COLS;
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(box)), barrier = to + BYTES;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(barrier), "r"(BYTES) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];"
                     :: "r"(to), "l"(p.map), "r"(p.col), "r"(p.row), "r"(barrier) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(barrier) : "memory");
    for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) {
        // The number of a piece of 128 bytes says how its chunks of 16 bytes have changed places.
        int at = 2 * i, change = SWIZZLE ? at / 128 & (SWIZZLE / 16 - 1) : 0;
        p.out[i] = *reinterpret_cast<unsigned short*>(box + (at ^ (change * 16)));
    }
}
"""


class Sum(ctypes.Structure):
    """As ADD has it, without what fills it up to 64 bytes."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
    )


class Box(ctypes.Structure):
    """As LOAD has it."""

    _fields_ = (
        ("map", ctypes.c_uint8 * 128),
        ("out", ctypes.c_void_p),
        ("row", ctypes.c_int),
        ("col", ctypes.c_int),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if problem := why_not():
        pytest.skip(problem)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "add.cu").write_text(ADD)
    (tmp_path / "load.cu").write_text(LOAD)
    return tmp_path


class Addition:
    """`out = a + 3 b`, of a length that no block divides."""

    def __init__(self, folder: Path, shared_bytes: int = 0) -> None:
        self.a, self.b = torch.randn(2, 10_007, device="cuda")
        self.out = torch.full_like(self.a, torch.nan)
        self.kernel = kernel("add.cu", "add", (("FACTOR", 3),), shared_bytes, folder)

    def launch(self, grid: int = 8) -> None:
        params = Sum(self.a.data_ptr(), self.b.data_ptr(), self.out.data_ptr(), self.a.numel())
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch(grid, CLUSTER, THREADS, params, stream)

    def check(self) -> None:
        torch.cuda.synchronize()
        torch.testing.assert_close(self.out, self.a + 3 * self.b)


def test_a_cluster_of_two(folder: Path) -> None:
    addition = Addition(folder)
    addition.launch()
    addition.check()
    assert addition.kernel.registers > 0
    assert addition.kernel.spilled_bytes == 0
    assert kernel("add.cu", "add", (("FACTOR", 3),), 0, folder) is addition.kernel


def test_in_a_graph(folder: Path) -> None:
    addition = Addition(folder)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        addition.launch()
    assert addition.out.isnan().all()  # only captured; `params` is gone
    for _ in range(3):
        addition.a.normal_()
        addition.out.fill_(torch.nan)
        graph.replay()
        addition.check()


def test_on_another_stream(folder: Path) -> None:
    addition, stream = Addition(folder), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        addition.launch()
    addition.check()


def test_in_a_thread_that_has_used_no_cuda(folder: Path) -> None:
    addition = Addition(folder)
    thread = threading.Thread(target=addition.launch)
    thread.start()
    thread.join()
    addition.check()


def test_as_many_clusters_as_run_at_once(folder: Path) -> None:
    """More than half of the shared memory of a multiprocessor: one block fits on each."""
    addition = Addition(folder, shared_bytes=160 << 10)
    most = most_clusters(addition.kernel, CLUSTER, THREADS)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert 0 < most <= processors // CLUSTER
    addition.launch(most * CLUSTER)
    addition.check()
    addition.launch(2 * most * CLUSTER)  # the others start later
    addition.check()
    with pytest.raises(RuntimeError, match="add could not be launched"):
        addition.launch(CLUSTER + 1)
    addition.launch()  # the refusal leaves nothing behind
    addition.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_what_tma_loads(folder: Path, swizzle: int, dtype: torch.dtype) -> None:
    """Boxes, also one that sticks out: zeros there."""
    rows, cols = 64, swizzle // 2 or 40
    whole = torch.randn(100, 128, device="cuda").to(dtype)
    matrix = whole[:, :72]
    constants = (("ROWS", rows), ("COLS", cols), ("SWIZZLE", swizzle))
    bytes_of_box = 2 * rows * cols
    loaded: Kernel = kernel("load.cu", "load", constants, bytes_of_box + 16, folder)
    out = torch.full((rows, cols), torch.nan, device="cuda", dtype=dtype)
    for row, col in ((0, 0), (8, 8), (70, 56)):
        encoded = tensor_map(matrix, rows, cols, swizzle)
        assert len(encoded) == 128
        params = Box((ctypes.c_uint8 * 128)(*encoded), out.data_ptr(), row, col)
        loaded.launch(1, 1, THREADS, params, torch.cuda.current_stream().cuda_stream)
        expected = torch.zeros_like(out)
        inside = matrix[row : row + rows, col : col + cols]
        expected[: inside.shape[0], : inside.shape[1]] = inside
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_tensor_map_of_one_row(folder: Path) -> None:
    """Its row stride, which no rule of TMA fits, does not matter."""
    row = torch.randn(1, 72, device="cuda", dtype=torch.bfloat16).as_strided((1, 72), (3, 1))
    assert tensor_map(row, 8, 64) == tensor_map(row.as_strided((1, 72), (72, 1)), 8, 64)
