"""From the ops to their GPU kernels, which need Triton: imported when a GPU first calls one."""

import importlib
from typing import Any

from autofuse.lowering.gpu.support import has_triton


def reduce_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_reduce`; NotImplemented without Triton."""
    return _run("ops", "run_reduce", *args)


def gather_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.ops.run_gather`; NotImplemented without Triton."""
    return _run("ops", "run_gather", *args)


def embedding_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.embedding.run_embedding`; NotImplemented without Triton."""
    return _run("embedding", "run_embedding", *args)


def embedding_backward_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.embedding_backward.run_embedding_backward`; NotImplemented without Triton."""
    return _run("embedding_backward", "run_embedding_backward", *args)


def embedding_update_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.embedding_update.run_embedding_update`; NotImplemented without Triton."""
    return _run("embedding_update", "run_embedding_update", *args)


def combine_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.expert_ops.run_combine`; NotImplemented without Triton."""
    return _run("expert_ops", "run_combine", *args)


def dispatch_on_gpu(*args: Any) -> Any:
    """As `lowering.gpu.expert_ops.run_dispatch`; NotImplemented without Triton."""
    return _run("expert_ops", "run_dispatch", *args)


def _run(module: str, name: str, *args: Any) -> Any:
    if not has_triton():
        return NotImplemented
    return getattr(importlib.import_module(f"autofuse.lowering.gpu.{module}"), name)(*args)
