"""Calls of ops as kernels take them: how one is run in the way that is chosen, or in a way that is named."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from autofuse import config
from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, current
from autofuse.lowering.ops.library import FUSED_OPS

from .choose import chosen, keep, way_of
from .kernel import Problem, Way, fused_ways, ways_of
from .measure import Trials, measure_once
from .points import Point


@dataclass(frozen=True)
class GpuCall:
    """A call of an op.

    run: what the op returns, in any way but the one that the op replaces; None if that cannot be captured.
    variant: what may be new about a call of a known problem. unfused: what the op replaces, where that is
    better than the op's reference. trials: what `AUTOFUSE_MEASURE` measures, if anything.
    """

    workspace: GpuWorkspace
    problem: Problem
    run: Callable[[Way], Any]
    variant: Hashable = None
    unfused: Callable[[], Any] | None = None
    trials: Trials | None = None

    def decide(self, capturing: bool) -> tuple[Way, bool]:
        """The way that policy `auto` takes, and whether the next call like this one takes it, too."""
        if config.measure and self.trials is not None:
            measure_once(self.workspace, self.problem, self.trials)
        return way_of(self.problem, self.workspace, self.variant, capturing)


def run_call(call: GpuCall | None) -> Any:
    """What the op returns, in the way that policy `auto` takes; NotImplemented for the op's reference."""
    if call is None:
        return NotImplemented
    with current(call.workspace.device):
        way, _ = call.decide(torch.cuda.is_current_stream_capturing())
        found = None if way.replaced else call.run(way)
        if found is None and call.unfused is not None:
            found = call.unfused()
    return NotImplemented if found is None else found


Calls: TypeAlias = Mapping[str, Callable[[Any], GpuCall | None]]
"""By op: from the record of its arguments to the call; None for what the kernels decline."""


@dataclass(frozen=True)
class ByName:
    """The ways of ops that have kernels, as `autofuse.bench.gpu.named_ways` asks for them."""

    calls: Calls

    def names(self, op: str, arguments: tuple[Any, ...], unfused: bool) -> list[str]:
        """The ways that can run it, if asked also those of libraries; none where no kernel can."""
        call = self._find(op, arguments)
        fused = [] if call is None else fused_ways(call.problem)
        return list(ways_of(call.problem)) if call is not None and fused and unfused else fused

    def run(self, name: str, op: str, arguments: tuple[Any, ...]) -> Any:
        """What the op returns. RuntimeError in a way that cannot be captured."""
        call = self._found(op, arguments)
        way = ways_of(call.problem)[name]
        if way.replaced:
            fused_op = FUSED_OPS[op]
            return fused_op.reference(fused_op.parse(arguments)) if call.unfused is None else call.unfused()
        found = call.run(way)
        if found is None:
            raise RuntimeError(f"{op}: {name} cannot be captured before it has run")
        return found

    def chosen(self, op: str, arguments: tuple[Any, ...]) -> str:
        """The way that takes the GPUs least, as far as is known."""
        call = self._found(op, arguments)
        return chosen(call.problem, call.workspace).name

    def keep(self, op: str, arguments: tuple[Any, ...], times: dict[str, float]) -> None:
        """Let `auto` decide by these microseconds, here and, on rank 0, in the user's own file."""
        call = self._found(op, arguments)
        keep(call.workspace, Point.of(call.problem, times))

    def _found(self, op: str, arguments: tuple[Any, ...]) -> GpuCall:
        call = self._find(op, arguments)
        if call is None:
            raise ValueError(f"{op} has no ways for this call")
        return call

    def _find(self, op: str, arguments: tuple[Any, ...]) -> GpuCall | None:
        fused_op = FUSED_OPS[op]
        given = fused_op.parse(arguments)
        if op not in self.calls or fused_op.gpu_gap(given) or fused_op.gpu_dtype_gap(given):
            return None
        try:
            return self.calls[op](given)
        except NotShared:
            return None
