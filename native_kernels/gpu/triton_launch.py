"""The parameters that Triton's launcher passes to the driver for a kernel, as bytes for `prepared.py`.

The layout is that of Triton 3.6 (`backends/nvidia/driver.py`); kernels of other releases are not prepared.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .prepared import MAP_BYTES, At, Launched, replaced

KNOWN = ("3.6",)
"""Releases of Triton whose launcher is known."""

_INTEGERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"} | {
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"
}  # fmt: skip


def launched(compiled: Any, programs: int, args: Sequence[Any]) -> Launched | None:
    """The launch of a compiled kernel with these arguments, as constants follow them; None if not known."""
    meta = getattr(compiled, "metadata", None)
    if meta is None or not triton.__version__.startswith(KNOWN):
        return None
    scratch = meta.global_scratch_size or meta.profile_scratch_size
    if scratch or meta.num_ctas != 1 or meta.launch_cooperative_grid:
        return None
    hooks = triton.knobs.runtime.launch_enter_hook
    if getattr(hooks, "calls", hooks):  # of a profiler
        return None
    params = _Params()
    maps = iter(getattr(meta, "tensordesc_meta", None) or ())
    types = list(compiled.src.signature.values())[: len(args)]
    if not all(params.add(arg, kind, maps) for arg, kind in zip(args, types, strict=True)):
        return None
    for _ in ("global_scratch", "profile_scratch"):
        params.append("Q", 0)
    return Launched(
        int(compiled.function), programs, 32 * meta.num_warps, meta.shared, 0, bytes(params.data),
        tuple(params.offsets), tuple(params.places), bool(meta.launch_pdl), compiled,
    )  # fmt: skip


class _Params:
    """Parameters one after another, each aligned."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.offsets: list[int] = []
        self.places: list[At] = []

    def add(self, arg: Any, kind: str, maps: Any) -> bool:
        """The parameters that an argument becomes; false for one that is not known."""
        if kind == "constexpr":
            return True
        if isinstance(arg, TensorDescriptor):
            meta = next(maps, None)
            if not kind.startswith("tensordesc") or meta is None:
                return False
            found = _tensor_map(arg, meta)
            if found is None:
                return False
            self._begin(64)
            self.places.append(At(len(self.data), arg.base.data_ptr(), is_map=True))
            self.data += found
            for size in arg.shape:
                self.append("i", size)
            for step in arg.strides:
                self.append("q", step)
            return True
        if kind.startswith("*"):
            address = arg if isinstance(arg, int) else arg.data_ptr()
            self.append("Q", address)
            if isinstance(arg, Tensor):
                self.places.append(At(self.offsets[-1], address, is_map=False))
            return True
        if kind in _INTEGERS and isinstance(arg, int):
            self.append(_INTEGERS[kind], arg)
            return True
        if kind == "fp32" and isinstance(arg, float):
            self.append("f", arg)
            return True
        return False

    def append(self, code: str, value: float) -> None:
        self._begin(struct.calcsize(code))
        self.data += struct.pack(code, value)

    def _begin(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % alignment)
        self.offsets.append(len(self.data))


def _tensor_map(descriptor: TensorDescriptor, meta: dict[str, Any]) -> bytes | None:
    """The map that Triton makes; None unless it is that of another address but for the address."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    base = descriptor.base
    found = _bytes_of(make_tensordesc_arg(descriptor, meta)[0])
    moved = TensorDescriptor(_Moved(base), descriptor.shape, descriptor.strides, descriptor.block_shape)
    other = _bytes_of(make_tensordesc_arg(moved, meta)[0])
    return found if found != other == replaced(found, base.data_ptr() + _Moved.BY) else None


class _Moved:
    """A tensor elsewhere."""

    BY = 1 << 20

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, tensor.data_ptr() + self.BY

    def data_ptr(self) -> int:
        return self._address


def _bytes_of(tensor_map: Any) -> bytes:
    """Of Triton's object for a map: a Python object, and the map at the next multiple of 128 bytes."""
    return ctypes.string_at(id(tensor_map) + MAP_BYTES, MAP_BYTES)
