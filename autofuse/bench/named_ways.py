"""Fused ways by name, of ops that may have no kernels for GPUs (yet).

A room `autofuse.lowering.gpu.<room>` with kernels has `names(op, *arguments)`, `run(name, op, *arguments)`
and perhaps `chosen(op, *arguments)`, all with the arguments of the op itself. For a room that has others,
this file is what changes.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from autofuse.lowering.ops.library import FUSED_OPS

REFERENCE = "reference"
"""What an op without a kernel runs: torch's own ops, one after another."""


def has_kernel(op: str) -> bool:
    """Whether the op runs anything but its reference on GPUs."""
    return FUSED_OPS[op].cuda is not None


def names(room: str, op: str, arguments: tuple[Any, ...]) -> list[str]:
    """All ways that can run this call; none where there is no such room."""
    module = _module(room)
    return [] if module is None else list(module.names(op, *arguments))


def run(room: str, name: str, op: str, arguments: tuple[Any, ...]) -> Tensor:
    """The op's first result in the way of that name."""
    return first(_module(room).run(name, op, *arguments))


def first(results: Tensor | list[Tensor]) -> Tensor:
    """The first result of an op that has one or several."""
    return results[0] if isinstance(results, list) else results


def chosen(room: str, op: str, arguments: tuple[Any, ...]) -> str:
    """The way that policy `auto` takes."""
    if not has_kernel(op):
        return REFERENCE
    ask = getattr(_module(room), "chosen", None)
    return "kernel" if ask is None else str(ask(op, *arguments))


def _module(room: str) -> Any:
    name = f"autofuse.lowering.gpu.{room}"
    return importlib.import_module(name) if find_spec(name) is not None else None
