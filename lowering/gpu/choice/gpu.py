"""The properties of a GPU by which predictions scale, as the driver and NVML report them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

FLOPS_A_CYCLE = 4096
"""16-bit floating-point operations of a Hopper multiprocessor in a cycle."""
LOADED_A_CYCLE = 32
"""Bytes that a multiprocessor loads from the L2 in a cycle."""

NVLINK = 478e3
"""Bytes a microsecond of 18 links of NVLink 4; assumed if NVML does not report the links."""
_LINK_COUNT, _LINK_MEGABYTES_A_SECOND = 91, 90
"""Numbers of NVML's fields."""
_UINT = 0xFFFFFFFF
"""Mask of the part of nvmlFieldValue_t's value in which these fields have their number."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU: its peak rates.

    clock: cycles a microsecond; memory, link: bytes a microsecond, to its own memory and to all peers.
    """

    name: str
    multiprocessors: int
    clock: float
    memory: float
    link: float

    @property
    def flops(self) -> float:
        """Operations of a multiprocessor in a microsecond."""
        return FLOPS_A_CYCLE * self.clock

    @property
    def loads(self) -> float:
        """Bytes that a multiprocessor loads in a microsecond."""
        return LOADED_A_CYCLE * self.clock


def gpu_name(device: torch.device) -> str:
    """`h200` of NVIDIA H200."""
    return torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")


@cache
def described(device: torch.device) -> Gpu:
    """The properties of a device. RuntimeError if the driver does not tell one."""
    from cuda.bindings import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    kinds = driver.CUdevice_attribute

    def asked(kind: object) -> float:
        _, found = driver.cuDeviceGet(index)
        error, value = driver.cuDeviceGetAttribute(kind, found)
        if int(error):
            raise RuntimeError(f"the driver does not tell {kind} of {device}")
        return float(value)

    bits = asked(kinds.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
    bytes_a_cycle = 2 * bits / 8  # two transfers
    return Gpu(
        gpu_name(device),
        int(asked(kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)),
        asked(kinds.CU_DEVICE_ATTRIBUTE_CLOCK_RATE) / 1e3,
        asked(kinds.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) / 1e3 * bytes_a_cycle,
        _link(str(torch.cuda.get_device_properties(device).uuid)),
    )


class _Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("error", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


def _link(uuid: str) -> float:
    """Bytes a microsecond of all links of a GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return NVLINK
    nvml.nvmlInit_v2()
    try:
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return NVLINK
        asked = (_Field * 2)(_Field(_LINK_COUNT), _Field(_LINK_MEGABYTES_A_SECOND))
        failed = nvml.nvmlDeviceGetFieldValues(handle, 2, asked) or asked[0].error or asked[1].error
        count, rate = ((each.value & _UINT) for each in asked)
        return NVLINK if failed or not count * rate else float(count * rate)
    finally:
        nvml.nvmlShutdown()
