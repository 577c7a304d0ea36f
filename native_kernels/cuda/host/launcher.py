"""Loads and launches kernels through the CUDA driver, and encodes tensor maps for their TMA loads.

Nothing here imports the driver's bindings before a kernel or a tensor map is asked for.
"""

import ctypes
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autofuse.native_kernels.gpu.dependent import is_dependent
from autofuse.native_kernels.gpu.driver import bindings, call
from autofuse.native_kernels.gpu.prepared import Launched, record

from .compiler import KERNELS, Constants, compile_cubin

_MOST_BOX = 256
"""Rows, or columns, of what one TMA instruction moves."""


class Kernel:
    """A kernel that the driver has loaded on the device that was current then; `kernel` makes it.

    device: index of the device; registers, spilled_bytes: of each thread.
    """

    def __init__(self, name: str, cubin: bytes, shared_bytes: int) -> None:
        self._driver = driver = bindings()
        self.name, self.shared_bytes = name, shared_bytes
        self.device = torch.cuda.current_device()
        self._configs: dict[tuple[int, int, int, int, bool], Any] = {}
        self._enter_context()
        self._module = call(driver.cuModuleLoadData, cubin)
        self._function = call(driver.cuModuleGetFunction, self._module, name.encode())
        attributes = driver.CUfunction_attribute
        call(
            driver.cuFuncSetAttribute,
            self._function,
            attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared_bytes,
        )
        self.registers: int = call(
            driver.cuFuncGetAttribute, attributes.CU_FUNC_ATTRIBUTE_NUM_REGS, self._function
        )
        self.spilled_bytes: int = call(
            driver.cuFuncGetAttribute, attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, self._function
        )

    def launch(
        self,
        grid: int,
        cluster: int,
        threads: int,
        params: ctypes.Structure,
        stream: int,
    ) -> None:
        """Start `grid` blocks, in clusters, on the device of this kernel; not all need to run at once.

        The kernel's one parameter, `const __grid_constant__` and alignas(64), is a copy of `params`.
        `stream`: as `torch.cuda.Stream.cuda_stream` has it. RuntimeError if the driver refuses.
        """
        dependent = is_dependent()
        key = grid, cluster, threads, stream, dependent
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._config(*key)
        # The driver copies whole 64 bytes, as alignas(64) has them, before it returns; also into a graph.
        size = ctypes.sizeof(params)
        held = params if size % 64 == 0 else ctypes.create_string_buffer(bytes(params), -(-size // 64) * 64)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        at = ctypes.addressof(pointers)
        (error,) = self._driver.cuLaunchKernelEx(config, self._function, at, 0)
        if error == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread that has used no CUDA yet, such as one of autograd's, has no context.
            self._enter_context()
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, at, 0)
        if error:
            raise RuntimeError(
                f"{self.name} could not be launched ({grid} blocks of {threads} threads in clusters of "
                f"{cluster}, {self.shared_bytes} bytes of shared memory): {error!r}"
            )
        record(
            lambda: Launched(
                int(self._function), grid, threads, self.shared_bytes, cluster, bytes(held), (0,),
                tuple(getattr(params, "noted", ())), dependent, self,
            )
        )  # fmt: skip

    def _config(self, grid: int, cluster: int, threads: int, stream: int, dependent: bool = False) -> Any:
        """A launch configuration; each stream has its own, since the driver may read it in another thread."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        clusters = driver.CUlaunchAttribute()
        clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        clusters.value.clusterDim.x = cluster
        clusters.value.clusterDim.y = clusters.value.clusterDim.z = 1
        attributes = [clusters]
        if dependent:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _enter_context(self) -> None:
        """Make torch's context current in this thread; the driver keeps one for each device."""
        torch.cuda.init()
        device = call(self._driver.cuDeviceGet, self.device)
        call(self._driver.cuCtxSetCurrent, call(self._driver.cuDevicePrimaryCtxRetain, device))


def macros(params: type[ctypes.Structure], constants: Mapping[str, int]) -> Constants:
    """`constants`, and CHECK_PARAMS: static_asserts that C++ lays out `Params` as ctypes lays out `params`.

    A source has CHECK_PARAMS behind its `struct Params`, so that it only compiles where both agree.
    """
    size = -(-ctypes.sizeof(params) // 64) * 64  # of alignas(64)
    asserts = [f'static_assert(sizeof(Params) == {size}, "size of Params");']
    for name, *_ in params._fields_:
        offset = getattr(params, name).offset
        at = f"__INTADDR__(&((Params*)0)->{name})"  # NVRTC 13.0 has no offsetof
        asserts.append(f'static_assert({at} == {offset}, "Params::{name}");')
    return (*((name, int(value)) for name, value in constants.items()), ("CHECK_PARAMS", "".join(asserts)))


def kernel(source: str, name: str, constants: Constants, shared_bytes: int, folder: Path = KERNELS) -> Kernel:
    """The kernel `name` of the file `source`, for the current device; compiled and loaded at the first call.

    `shared_bytes`: dynamic shared memory of a block. Not to be called first while a CUDA graph is captured:
    loading waits for the device. RuntimeError if it does not compile or does not load.
    """
    return _loaded(source, name, constants, shared_bytes, folder, torch.cuda.current_device())


def most_clusters(kernel: Kernel, cluster: int, threads: int) -> int:
    """How many clusters of `cluster` blocks run at once."""
    config = kernel._config(cluster, cluster, threads, 0)
    kernel._enter_context()
    found: int = call(kernel._driver.cuOccupancyMaxActiveClusters, kernel._function, config)
    return found


def tensor_map(matrix: Tensor, box_rows: int, box_cols: int, swizzle: int = 128) -> bytes:
    """The CUtensorMap, 128 bytes, with which TMA moves boxes of a row-major matrix of bf16 or fp16.

    Also of a stack of such matrices, `[.., rows, cols]`: boxes of one of them at a time. Zeros are loaded for
    what lies outside, and nothing is stored there. `swizzle`: 0, 32, 64 or 128 bytes. ValueError where TMA
    cannot do it.
    """
    return _encode(
        matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype, box_rows, box_cols, swizzle
    )


@lru_cache(maxsize=4096)
def _encode(
    address: int,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    box_rows: int,
    box_cols: int,
    swizzle: int,
) -> bytes:
    """The tensor map, which depends on these arguments only."""
    if stride[-1] != 1:
        raise ValueError(f"TMA needs a row-major matrix: its columns are {stride[-1]} elements apart")
    # Where a second row would be does not matter to a matrix of one, but TMA has rules for it.
    least = -(-2 * shape[-1] // 16) * 16
    # Bytes from one to the next, but for the last dim.
    pitches = [2 * step if size > 1 else least for size, step in zip(shape, stride, strict=True)][:-1]
    box = (1,) * (len(shape) - 2) + (box_rows, box_cols)
    width = 2 * box[-1]
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"TMA is set up for bfloat16 and float16 alone, not for {dtype}")
    if swizzle not in (0, 32, 64, 128):
        raise ValueError(f"TMA swizzles 0, 32, 64 or 128 bytes, not {swizzle}")
    if 0 in shape:
        raise ValueError(f"TMA needs a matrix with elements, not {' x '.join(map(str, shape))}")
    if pitches[-1] < 2 * shape[-1]:
        raise ValueError(
            f"TMA is set up for rows that do not overlap: {shape[-1]} columns, {pitches[-1]} bytes apart"
        )
    if address % 16 or any(pitch % 16 for pitch in pitches):
        raise ValueError(
            f"TMA needs rows that begin at multiples of 16 bytes: the first is at {address:#x}, "
            f"and they are {pitches[-1]} bytes apart"
        )
    if not all(0 < size <= _MOST_BOX for size in box):
        raise ValueError(f"TMA moves boxes of up to {_MOST_BOX} x {_MOST_BOX}, not {box[-2]} x {box[-1]}")
    if width % 16 or (swizzle and width > swizzle):
        limit = f", at most {swizzle} to be swizzled so" if swizzle else ""
        raise ValueError(f"rows of a box need a multiple of 16 bytes{limit}: {box[-1]} columns have {width}")

    driver = bindings()
    types = driver.CUtensorMapDataType
    swizzles = driver.CUtensorMapSwizzle
    bf16 = dtype == torch.bfloat16
    encoded = call(
        driver.cuTensorMapEncodeTiled,
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if bf16 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        len(shape),
        address,
        [driver.cuuint64_t(size) for size in reversed(shape)],
        [driver.cuuint64_t(pitch) for pitch in reversed(pitches)],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B" if swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)


@cache
def _loaded(
    source: str,
    name: str,
    constants: Constants,
    shared_bytes: int,
    folder: Path,
    device: int,
) -> Kernel:
    return Kernel(name, compile_cubin(source, dict(constants), folder=folder), shared_bytes)
