"""The CPU kernels: one C library, loaded with ctypes (a call takes about a microsecond and drops the GIL).

Importing this module never fails; without the library `available()` is false, `why_not()` says what to do,
and calling a kernel raises that text.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_long,
    c_size_t,
    c_uint8,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI_VERSION = 2
OK, TIMED_OUT, MISMATCH = range(3)  # what `wait` returns
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_HOW = "install a C++ compiler (g++ or clang) and reinstall autofuse"


def _load() -> tuple[ctypes.CDLL | None, str]:
    found = sorted(Path(__file__).parent.glob("_cpu*.so"))
    if not found:
        return None, f"autofuse was installed without its CPU kernels: {_HOW}"
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.af_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"the CPU kernels of autofuse cannot be loaded ({error}): {_HOW}"
    if version != ABI_VERSION:
        return None, f"the CPU kernels of autofuse have version {version}, expected {ABI_VERSION}: {_HOW}"
    return library, ""


_library, _why_not = _load()


def available() -> bool:
    """Whether the library was built and could be loaded."""
    return _library is not None


def why_not() -> str:
    """Why `available()` is false and what to do about it; empty when it is true."""
    return _why_not


def function(name: str, restype: Any, argtypes: Sequence[Any]) -> Callable[..., Any]:
    """The C function `name` with its types declared. Without the library: a function that raises
    RuntimeError with the reason, so that modules can bind their kernels when they are imported."""
    loaded = getattr(_library, name, None)
    if loaded is None:
        reason = _why_not or f"the CPU kernels of autofuse lack {name}: they are outdated, {_HOW}"

        def missing(*args: Any) -> Any:
            raise RuntimeError(reason)

        return missing
    loaded.restype = restype
    loaded.argtypes = list(argtypes)
    bound: Callable[..., Any] = loaded
    return bound


def address(tensor: Tensor) -> int:
    """Address of the first element of `tensor`."""
    return tensor.data_ptr()


# signal(slot, value)
signal = function("af_signal", None, [c_void_p, c_uint64])
# wait(slot, value, peer's header or None, epoch, hash, spin_us, timeout_ms) -> OK, TIMED_OUT or MISMATCH
wait = function("af_wait", c_int, [c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_int, c_int])
# meet(slots of others, own slots, ranks, value, headers, epoch, hash, spin_us, timeout_ms): as `wait`
meet = function(
    "af_meet",
    c_int,
    [c_void_p, c_void_p, c_int, c_uint64, c_void_p, c_uint64, c_uint64, c_int, c_int],
)
# publish(header, epoch, hash, text, length)
publish = function("af_publish", None, [c_void_p, c_uint64, c_uint64, c_char_p, c_uint64])

_create = function("af_segment_create", c_int, [c_char_p, c_int64])
_open = function("af_segment_open", c_int, [c_char_p])
_unlink = function("af_segment_unlink", c_int, [c_char_p])


class NoRoom(RuntimeError):
    """The machine has no room for a segment of shared memory."""


def create_segment(name: str, nbytes: int) -> int:
    """Make the shared memory `name`, zero-filled, and return its descriptor. Raises NoRoom when the machine
    has no room for it, RuntimeError when it cannot be made otherwise."""
    fd: int = _create(name.encode(), nbytes)
    if fd >= 0:
        return fd
    text = f"cannot get {nbytes} bytes of shared memory: {os.strerror(-fd)}"
    if -fd in (errno.ENOSPC, errno.ENOMEM):
        text += "; make /dev/shm larger (docker run --shm-size=..., mount -o remount,size=... /dev/shm)"
        raise NoRoom(text)
    raise RuntimeError(text)


def open_segment(name: str) -> int:
    """Descriptor of a peer's shared memory. Raises RuntimeError when it is not there."""
    fd: int = _open(name.encode())
    if fd < 0:
        raise RuntimeError(f"cannot open the shared memory {name} of a peer: {os.strerror(-fd)}")
    return fd


def unlink_segment(name: str) -> None:
    """Remove the name; processes that have mapped the memory keep it."""
    _unlink(name.encode())


_libc = ctypes.CDLL(None, use_errno=True)
_map, _unmap = _libc.mmap, _libc.munmap
_map.restype, _map.argtypes = c_void_p, [c_void_p, c_size_t, c_int, c_int, c_int, c_long]
_unmap.argtypes = [c_void_p, c_size_t]
_FAILED = c_void_p(-1).value  # MAP_FAILED


def map_segment(fd: int, nbytes: int) -> ctypes.Array[c_uint8]:
    """The shared memory behind `fd`, mapped as long as the result lives. Raises RuntimeError.

    Module mmap keeps a descriptor for each mapping, which a process with many groups has not enough of.
    """
    # On Linux all page faults are taken now instead of one by one in the first call.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = _map(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        raise RuntimeError(f"cannot map {nbytes} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
    mapped = (c_uint8 * nbytes).from_address(address)
    weakref.finalize(mapped, _unmap, address, nbytes).atexit = False
    return mapped


_reduce_rows = function(
    "af_reduce_rows",
    None,
    [
        c_void_p,
        c_int,
        c_int64,
        POINTER(c_void_p),
        POINTER(c_int64),
        POINTER(c_int),
        c_int,
        c_int64,
        c_int64,
        c_float,
    ],
)


@cache
def _arrays(n: int) -> tuple[Any, Any, Any]:
    return c_void_p * n, c_int64 * n, c_int * n


def reduce_rows(out: Tensor, parts: Sequence[Tensor], scale: float = 1.0) -> None:
    """`out = scale * (parts[0] + parts[1] + ...)`, summed in that order in float32 and rounded once.

    `out` and every part are `[rows, cols]` (or `[cols]`) with adjacent columns and any row stride, in any mix
    of float32, bfloat16 and float16. `out` may be one of the parts. Raises ValueError for anything else."""
    shape = out.shape
    n = len(parts)
    if n == 0:
        raise ValueError("reduce_rows needs at least one part")
    rows, cols = shape if len(shape) == 2 else (1, out.numel())
    out_stride = _row_stride(out, shape)
    pointers, strides, dtypes = _arrays(n)
    _reduce_rows(
        out.data_ptr(),
        DTYPES[out.dtype],
        out_stride,
        pointers(*[p.data_ptr() for p in parts]),
        strides(*[_row_stride(p, shape) for p in parts]),
        dtypes(*[DTYPES[p.dtype] for p in parts]),
        n,
        rows,
        cols,
        scale,
    )


def accumulate_rows(out: Tensor, received: Tensor, part: Tensor) -> None:
    """`out = received + part` with `out` and `received` in float32, `part` in any dtype of `reduce_rows`."""
    if out.dtype != torch.float32 or received.dtype != torch.float32:
        raise ValueError(
            f"accumulate_rows sums in float32; got out {out.dtype} and received {received.dtype}"
        )
    reduce_rows(out, (received, part))


def _row_stride(tensor: Tensor, shape: torch.Size) -> int:
    strides = tensor.stride()
    if tensor.shape == shape and tensor.dtype in DTYPES and 1 <= len(strides) <= 2:
        cols = shape[-1]
        if strides[-1] == 1 or cols == 1:
            return strides[0] if len(strides) == 2 and shape[0] > 1 else cols
    raise ValueError(
        f"expected tensors [rows, cols] of one shape with adjacent columns in {list(DTYPES)}; got "
        f"{tuple(tensor.shape)} with strides {strides} in {tensor.dtype} where the output is {tuple(shape)}"
    )
