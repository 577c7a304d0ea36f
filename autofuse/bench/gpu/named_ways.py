"""Fused ops that may have kernels for GPUs, in ways with names.

`autofuse.lowering.gpu.by_name` has, of an op and its arguments:

    names(op, arguments, unfused) -> list[str]    the ways that can run it, if asked also those of libraries
    run(name, op, arguments)                      what the op returns
    chosen(op, arguments) -> str                  the way that policy `auto` takes
    keep(op, arguments, times)                    lets it decide by these microseconds of ways, from now on
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofuse.lowering.gpu.choice.timer import Call
from autofuse.lowering.gpu.support import has_triton
from autofuse.lowering.ops.library import FUSED_OPS

REFERENCE = "reference"
"""The way of an op that has no kernel for a call: torch's own ops, one after another."""


@dataclass(frozen=True)
class Fused:
    """An op, with the arguments that calls take by turns."""

    op: str
    arguments: Sequence[tuple[Any, ...]]
    whole: bool = False
    """A result is all that the op returns, not the first of it."""

    def auto(self, i: int) -> Any:
        """Call number i, as policy `auto` runs it."""
        return self._result(getattr(torch.ops.autofuse, self.op)(*self._at(i)))

    def names(self, unfused: bool = False) -> list[str]:
        """The ways that can run this call."""
        module = ways()
        return [] if module is None else list(module.names(self.op, self._at(0), unfused))

    def call(self, name: str) -> Call:
        """The same in the way of that name."""
        module = ways()
        return lambda i: self._result(module.run(name, self.op, self._at(i)))

    def chosen(self) -> str:
        """The way that policy `auto` takes."""
        module = ways()
        if module is None:
            return "kernel" if FUSED_OPS[self.op].cuda is not None else REFERENCE
        return str(module.chosen(self.op, self._at(0))) if self.names() else REFERENCE

    def keep(self, times: dict[str, float]) -> None:
        """Let policy `auto` decide by these microseconds of ways, from now on."""
        if times:
            ways().keep(self.op, self._at(0), times)

    def _result(self, results: Any) -> Any:
        return results[0] if isinstance(results, list) and not self.whole else results

    def _at(self, i: int) -> tuple[Any, ...]:
        return self.arguments[i % len(self.arguments)]


def ways() -> Any:
    """The module with the ways of all ops; None without Triton, which it needs."""
    return importlib.import_module("autofuse.lowering.gpu.by_name") if has_triton() else None
