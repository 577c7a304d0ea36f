"""From the dense ops to their GPU kernels, which need Triton: imported when a GPU first calls one."""

from typing import Any

from autofuse.lowering.gpu.support import has_triton


def reduce_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_reduce`; NotImplemented without Triton."""
    return _run("run_reduce", *args)


def gather_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_gather`; NotImplemented without Triton."""
    return _run("run_gather", *args)


def _run(name: str, *args: Any) -> Any:
    if not has_triton():
        return NotImplemented
    from autofuse.lowering.gpu import ops

    return getattr(ops, name)(*args)
