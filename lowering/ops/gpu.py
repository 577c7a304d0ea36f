"""From the ops to their GPU kernels, which need Triton: imported when a GPU first calls one."""

import importlib
from typing import Any

from autofuse.lowering.gpu.support import has_triton


def reduce_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.dense.call.run_reduce`; NotImplemented without Triton."""
    return _run("dense.call", "run_reduce", *args)


def gather_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.dense.call.run_gather`; NotImplemented without Triton."""
    return _run("dense.call", "run_gather", *args)


def embedding_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.embedding.call.run_embedding`; NotImplemented without Triton."""
    return _run("embedding.call", "run_embedding", *args)


def embedding_backward_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.embedding.backward.run_embedding_backward`; NotImplemented without Triton."""
    return _run("embedding.backward", "run_embedding_backward", *args)


def embedding_update_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.embedding.update.run_embedding_update`; NotImplemented without Triton."""
    return _run("embedding.update", "run_embedding_update", *args)


def combine_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.experts.call.run_combine`; NotImplemented without Triton."""
    return _run("experts.call", "run_combine", *args)


def dispatch_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.experts.call.run_dispatch`; NotImplemented without Triton."""
    return _run("experts.call", "run_dispatch", *args)


def _run(module: str, name: str, *args: Any) -> Any:
    if not has_triton():
        return NotImplemented
    return getattr(importlib.import_module(f"autofuse.lowering.gpu.{module}"), name)(*args)
