"""From the dense ops to their GPU kernels, which need Triton: imported when a GPU first calls one."""

import functools
import importlib.util
from typing import Any


def reduce_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_reduce`; NotImplemented without Triton."""
    return _run("run_reduce", *args)


def gather_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_gather`; NotImplemented without Triton."""
    return _run("run_gather", *args)


def _run(name: str, *args: Any) -> Any:
    if not _has_triton():
        return NotImplemented
    from autofuse.lowering.gpu import ops

    return getattr(ops, name)(*args)


@functools.cache
def _has_triton() -> bool:
    """Asked once: every call of an op comes by here."""
    return importlib.util.find_spec("triton") is not None
