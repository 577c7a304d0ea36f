"""How two GPUs of a host reach each other, as the driver and NVML tell."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from autofuse.lowering.cpu.rendezvous import Declined

OK = 0
NVLINK, ATOMICS = 2, 3
"""What `nvmlDeviceGetP2PStatus` is asked for."""


@cache
def without_atomics(index: int, other: int) -> bool:
    """Whether the link between two GPUs that this process sees has no native atomics, as PCIe has none."""
    from cuda.bindings import driver

    if int(driver.cuInit(0)[0]) != OK:
        return True
    devices = []
    for i in (index, other):
        error, device = driver.cuDeviceGet(i)
        if int(error) != OK:
            return True
        devices.append(device)
    wanted = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    error, found = driver.cuDeviceGetP2PAttribute(wanted, *devices)
    return int(error) != OK or not found


def why_not_between(uuid: str, other: str) -> str:
    """Why kernels cannot signal from one GPU to another, which this process need not see; empty if they can.

    CUDA_VISIBLE_DEVICES hides GPUs from CUDA alone.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "NVML is missing, which knows the links to GPUs that CUDA_VISIBLE_DEVICES hides"
    nvml.nvmlInit_v2()
    try:
        found = [ctypes.c_void_p(), ctypes.c_void_p()]
        for name, handle in zip((uuid, other), found, strict=True):
            if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{name}".encode(), ctypes.byref(handle)) != OK:
                return f"NVML does not see GPU {name}"
        for asked, what in ((NVLINK, "NVLink"), (ATOMICS, "native atomics")):
            status = ctypes.c_int(-1)
            error = nvml.nvmlDeviceGetP2PStatus(*found, asked, ctypes.byref(status))
            if error != OK or status.value != OK:
                return f"there is no {what} between GPUs {uuid} and {other}"
    finally:
        nvml.nvmlShutdown()
    return ""


def check_links(gpus: list[str], rank: int, meet: Callable[[str], list[str]]) -> None:
    """Raises Declined on all ranks if two of them share a GPU, or reach each other without NVLink.

    gpus: the UUID of each rank's.
    """
    for r, gpu in enumerate(gpus):
        if gpu in gpus[:r]:
            raise Declined(f"ranks {gpus.index(gpu)} and {r} use one GPU")
    problem = ""
    if torch.cuda.device_count() == 1:  # else `why_not` of gpu/support.py has asked CUDA
        found = (why_not_between(gpus[rank], gpu) for r, gpu in enumerate(gpus) if r != rank)
        problem = next(filter(None, found), "")
    for r, told in enumerate(meet(problem)):
        if told:
            raise Declined(f"rank {r}: {told}")
