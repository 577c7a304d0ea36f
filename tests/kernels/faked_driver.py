"""A CUDA driver that only notes what it gets, for launches without a GPU.

Kernels are not compiled; a tensor map is its address and zeros.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from autofuse.lowering.gpu.choice import launcher as lowering_launcher
from autofuse.native_kernels.cuda.host import gemm, launcher
from autofuse.native_kernels.cuda.kernels import dropless_dispatch, expert_dispatch, gather_matmul
from autofuse.native_kernels.gpu import copy_engine, dependent, prepared, triton_launch
from autofuse.native_kernels.gpu import driver as cuda_driver
from autofuse.native_kernels.gpu import memory as gpu_memory
from autofuse.native_kernels.gpu.prepared import Guard
from tests.kernels.launched import CUDA

STREAM, EVENT = 7, 99
ATTRIBUTE_BYTES, CLUSTER_DIMENSION, STREAM_SERIALIZATION = 72, 4, 6


class Driver:
    """launches: the bytes of every parameter, with grid, threads, shared bytes and cluster; sizes: how many
    each parameter has, of the launches of a call in turn; dependent: whether each of them may
    begin before those in front of it have ended; calls: all of the other functions, in their order, with the
    number of launches before."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.dependent: list[bool] = []
        self.recorded: list[tuple[int, int]] = []
        self.sizes: list[list[int]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.refused = ""
        """A function that fails."""
        self.puts = 0
        self.during: Callable[[], None] = lambda: None
        """Called behind a launch."""
        self.capturing = self.error = 0
        pointer, status = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
        address, number = ctypes.c_uint64, ctypes.c_uint32
        on_word = pointer, address, number, number
        kinds = (
            *((pointer,) * 4, (pointer,) * 2, (pointer, status), (pointer, pointer)),
            *((pointer, pointer, number), on_word, on_word, (address, address, ctypes.c_size_t, pointer)),
        )
        functions = (
            *(self._launch, self._record, self._is_capturing, self._replace),
            *map(self._noted, ("cuStreamWaitEvent", "cuStreamWaitValue32", "cuStreamWriteValue32")),
            self._noted("cuMemcpyDtoDAsync"),
        )
        self._held = [
            ctypes.CFUNCTYPE(ctypes.c_int, *kind)(f) for kind, f in zip(kinds, functions, strict=True)
        ]
        self.addresses = prepared._Driver(*(ctypes.cast(f, pointer).value for f in self._held))

    def _launch(self, config: int, function: int, params: int, extra: None) -> int:
        grid, _, _, threads, _, _, shared, stream, at, count = struct.unpack(
            "7I4xQQI", ctypes.string_at(config, 52)
        )
        assert (stream, function) == (STREAM, 77)
        cluster, dependent = 0, False
        for i in range(count):
            kind, *value = struct.unpack("i4x3I", ctypes.string_at(at + ATTRIBUTE_BYTES * i, 20))
            if kind == CLUSTER_DIMENSION:
                cluster, *rest = value
                assert rest == [1, 1]
            else:
                assert (kind, value[0]) == (STREAM_SERIALIZATION, 1)
                dependent = True
        pointers = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))
        given = [ctypes.string_at(pointers[i], size) for i, size in enumerate(self._sizes())]
        self.launches.append((grid, threads, shared, cluster, given))
        self.dependent.append(dependent)
        error = self.error
        self.during()
        return error

    def _sizes(self) -> list[int]:
        return self.sizes[len(self.launches) % len(self.sizes)] if self.sizes else []

    def put(self, to: Tensor, words: bytes) -> None:
        self.puts += 1

    def _record(self, event: int, stream: int) -> int:
        if event != EVENT:
            return self._noted("cuEventRecord")(event, stream)
        self.recorded.append((event, stream))
        return 0

    def _noted(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            self.calls.append((len(self.launches), name, *(int(arg or 0) for arg in args)))
            return int(name == self.refused)

        return function

    @property
    def bindings(self) -> Any:
        """Those of Python, for commands the long way; `calls` has them, too."""
        names = ("cuEventRecord", "cuStreamWaitEvent", "cuStreamWaitValue32", "cuStreamWriteValue32")
        handles = count(1000)

        def noted(name: str) -> Callable[..., tuple[int]]:
            function = self._noted(name)
            return lambda *args: (function(*args),)

        functions = {name: noted(name) for name in (*names, "cuMemcpyDtoDAsync")}
        return SimpleNamespace(
            **functions,
            cuStreamCreate=lambda flags: (0, next(handles)),
            cuEventCreate=lambda flags: (0, next(handles)),
            CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1)),
            CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2)),
            CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0),
            CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        )

    def _is_capturing(self, stream: int, status: Any) -> int:
        status[0] = self.capturing
        return 0

    def _replace(self, tensor_map: int, address: int) -> int:
        assert tensor_map % 64 == 0
        ctypes.memmove(tensor_map, struct.pack("Q", address), 8)
        return 0


class Words:
    """What a guard looks at."""

    def __init__(self) -> None:
        self.raised, self.bad_input = ctypes.c_int32(), ctypes.c_int64()
        self.failed, self.generation = ctypes.c_int32(), ctypes.c_int32(3)
        self.last, self.event = ctypes.c_int64(STREAM), ctypes.c_int64(EVENT)
        at = map(ctypes.addressof, (self.raised, self.bad_input))
        self.guard = Guard(*at, self.failed, self.generation, self.last, self.event)


class Compiled:
    """A kernel of Triton that was not compiled; its metadata are those of its settings."""

    function = 77

    def __init__(self, signature: dict[str, str], warps: int, pdl: bool) -> None:
        self.src = SimpleNamespace(signature=signature)
        descriptors = [kind for kind in signature.values() if kind.startswith("tensordesc")]
        self.metadata = SimpleNamespace(
            global_scratch_size=0, profile_scratch_size=0, num_ctas=1, launch_cooperative_grid=False,
            launch_pdl=pdl, num_warps=warps, shared=4096, tensordesc_meta=[{}] * len(descriptors),
        )  # fmt: skip

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: None


def _jit(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Compiled:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*args, **settings)
    _, signature, *_ = kernel._pack_args(backend, settings, bound, specialization, None)
    return Compiled(signature, settings["num_warps"], settings.get("launch_pdl", False))


def _map(matrix: Tensor, *rest: Any) -> bytes:
    return struct.pack("Q", matrix.data_ptr()).ljust(128, b"\0")


def _kernel(source: str, name: str, constants: Any, shared_bytes: int) -> launcher.Kernel:
    found = object.__new__(launcher.Kernel)
    found._driver = Mock(cuLaunchKernelEx=lambda *args: (0,))
    found.name, found.shared_bytes, found._function, found._configs, found.device = (
        name,
        shared_bytes,
        77,
        Mock(),
        0,
    )
    return found


@contextmanager
def faked() -> Iterator[Driver]:
    driver = Driver()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch.object(dependent, "_is_known", lambda: True))
        enter(patch.object(prepared, "driver", lambda: driver.addresses))
        bindings = driver.bindings
        enter(patch.object(cuda_driver, "bindings", lambda: bindings))
        enter(patch.object(copy_engine, "current_raw_stream", lambda device: STREAM))
        enter(patch.object(JITFunction, "run", _jit))
        enter(patch.object(gpu_memory, "_launched", {}))
        enter(patch.object(triton_launch, "_tensor_map", lambda descriptor, meta: _map(descriptor.base)))
        enter(patch.object(gemm, "current_raw_stream", lambda device: STREAM))
        enter(patch.object(lowering_launcher, "current_raw_stream", lambda device: STREAM))
        for module in CUDA:
            enter(patch.object(module, "kernel", _kernel))
        for module in (gemm, gather_matmul, expert_dispatch, dropless_dispatch):
            enter(patch.object(module, "tensor_map", _map))
        yield driver
