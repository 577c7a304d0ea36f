"""Whether there are GPU kernels for a device: asked at compile time and before a group meets."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from autofuse.lowering import torch_internals
from autofuse.native_kernels.cuda.host import compiler
from autofuse.native_kernels.gpu.state import MOST_TAIL_COLUMNS as MOST_TAIL_COLUMNS
from autofuse.native_kernels.gpu.state import MOST_TAIL_OPERANDS as MOST_TAIL_OPERANDS
from autofuse.native_kernels.gpu.state import MOST_TAIL_RESULTS as MOST_TAIL_RESULTS
from autofuse.native_kernels.gpu.state import MOST_TERMS as MOST_TERMS
from autofuse.native_kernels.gpu.state import MOST_TOKEN_ROWS as MOST_TOKEN_ROWS
from autofuse.native_kernels.gpu.state import MOST_WEIGHTS as MOST_WEIGHTS
from autofuse.native_kernels.gpu.state import TAIL_UNIT as TAIL_UNIT

from . import links

MOST_RANKS = 8
"""Ranks of a group: GPUs of one host that NVSwitch connects."""


@functools.cache
def has_triton() -> bool:
    """Asked once: every call of an op comes by here."""
    return importlib.util.find_spec("triton") is not None


def is_serial(device: torch.device) -> bool:
    """Whether launches return after their kernels have ended, as with CUDA_LAUNCH_BLOCKING=1 and under
    profilers that take kernels one by one. Asks the GPU, which sleeps for some milliseconds."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return True
    for _ in range(3):  # this thread may be the one that slept
        ended = torch.cuda.Event()
        torch_internals.gpu_sleep(20_000_000)
        ended.record(torch.cuda.current_stream(device))
        asleep = not ended.query()
        ended.synchronize()
        if asleep:
            return False
    return True


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why this device runs no fused kernels, None if it does; the same on all ranks of equal machines."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"there are kernels for CPUs and NVIDIA GPUs, not for {device.type}"
    if not has_triton():
        return "Triton is not installed; CUDA builds of torch bring it"
    if missing := compiler.why_not():
        return missing
    if not torch.cuda.is_available():
        return "this process sees no GPU"
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.get_device_capability(index) != (9, 0):
        name = torch.cuda.get_device_name(index)
        return f"the kernels are for compute capability 9.0 (Hopper), which {name} has not"
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    if not all(torch.cuda.can_device_access_peer(index, other) for other in others):
        return "this GPU cannot access all others directly"
    if any(links.without_atomics(index, other) for other in others):
        return "this GPU reaches others without native atomics, so not over NVLink"
    return None
