"""From the dense ops to their GPU kernels, which need Triton: imported when a GPU first calls one."""

import importlib.util
from typing import Any


def reduce_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_reduce`; NotImplemented without Triton."""
    if importlib.util.find_spec("triton") is None:
        return NotImplemented
    from autofuse.lowering.gpu.ops import run_reduce

    return run_reduce(*args)


def gather_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_gather`; NotImplemented without Triton."""
    if importlib.util.find_spec("triton") is None:
        return NotImplemented
    from autofuse.lowering.gpu.ops import run_gather

    return run_gather(*args)
