"""A call of an op as the kernels take it: what the op itself and what asks for its ways by name share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.ops.library import FUSED_OPS

from .choose import AnyProblem, Point, chosen, keep, ways_of


@dataclass(frozen=True)
class GpuCall:
    """`run(way)`: what the op returns, in a way that has a kernel; None where that cannot be captured.

    variant: what may be new about a call of a known problem; unfused: what it replaces, where that is better
    than the op's reference.
    """

    workspace: GpuWorkspace
    problem: AnyProblem
    run: Callable[[str], Any]
    variant: Hashable = None
    unfused: Callable[[], Any] | None = None


@dataclass(frozen=True)
class ByName:
    """The ways of ops that have kernels, as `autofuse.bench.gpu.named_ways` asks for them.

    calls: by op, from the record of its arguments to the call; None for what the kernels decline.
    """

    calls: Mapping[str, Callable[..., GpuCall | None]]

    def names(self, op: str, arguments: tuple[Any, ...], unfused: bool) -> list[str]:
        """The ways that can run it, if asked also what they replace; none where no kernel can."""
        call = self._find(op, arguments)
        found = {} if call is None else ways_of(call.problem)
        fused = [way for way, config in found.items() if config is not None]
        return list(found) if fused and unfused else fused

    def run(self, name: str, op: str, arguments: tuple[Any, ...]) -> Any:
        """What the op returns. RuntimeError in a way that cannot be captured."""
        call = self._found(op, arguments)
        if ways_of(call.problem)[name] is None:
            fused_op = FUSED_OPS[op]
            return fused_op.reference(fused_op.parse(arguments)) if call.unfused is None else call.unfused()
        found = call.run(name)
        if found is None:
            raise RuntimeError(f"{op}: {name} cannot be captured before it has run")
        return found

    def chosen(self, op: str, arguments: tuple[Any, ...]) -> str:
        """The way that takes the GPUs least, as far as is known."""
        call = self._found(op, arguments)
        return chosen(call.problem, call.workspace)

    def keep(self, op: str, arguments: tuple[Any, ...], times: dict[str, float]) -> None:
        """Let `auto` decide by these microseconds, here and, on rank 0, in the user's own table."""
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
        if fused_op.gpu_gap(given) or fused_op.gpu_dtype_gap(given):
            return None
        try:
            return self.calls[op](given)
        except NotShared:
            return None
