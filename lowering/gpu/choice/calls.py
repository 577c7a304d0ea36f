"""Runs a call of an op: in the way that the policy `auto` chooses, or in a way that is given by its name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, current
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.runs import Note, Run, Timed

from .choose import chosen, configuration, keep, predictor_for, times_of, way_of
from .kernel import Problem, Way, fused_ways, replaced, ways_of
from .launcher import NOT_CAPTURED
from .measure import Trials, measure_once
from .points import Point
from .timer import Call

M = TypeVar("M")

MOST_CALLS = 4096
"""The number of prepared calls that a group keeps."""


@dataclass(frozen=True)
class GpuCall:
    """A call of an op, with the record of its arguments.

    Attributes:
        run: makes the call in any way but the one that the op replaces, and returns what the op returns; None
            if the call cannot be captured.
        variant: what may be new about a call of a known problem.
        unfused: makes the call in the way that the op replaces, where the op's reference would be slower.
        trials: the calls that `AUTOFUSE_MEASURE` measures in place of this one.
        changed: the tensors that the call changes in place.
    """

    op: str
    arguments: Any
    workspace: GpuWorkspace
    problem: Problem
    run: Callable[[Way], Any]
    variant: Hashable = None
    unfused: Callable[[], Any] | None = None
    trials: Trials | None = None
    changed: Sequence[Tensor] = ()
    told: Callable[[], Problem] | None = None
    """Of a problem that lacks a size: the problem with the size that the ranks told each other before the
    last call. `run` then takes the fastest configuration of the way's kernel for this size."""
    named: Callable[[Way], Any] | None = None
    """With `told`: as `run`, but in the configuration of the way."""

    @property
    def as_told(self) -> Problem:
        """The problem, with all that ranks have told each other."""
        return self.problem if self.told is None else self.told()

    def run_named(self, way: Way) -> Any:
        """`run`, in the configuration of the way."""
        return (self.named or self.run)(way)

    @property
    def kind(self) -> Hashable:
        """The key in `workspace.calls` under which the settled way of calls like this one is kept."""
        return "settled", self.op, self.arguments.site, self.problem, self.variant

    def decide(self, capturing: bool) -> tuple[Way, bool]:
        """The way that policy `auto` takes, and whether the next call like this one takes it, too."""
        if not self.has_equal_parts(capturing):
            return replaced(self.problem), True
        if config.measure:
            trials = self.trials or self._itself
            measure_once(self.workspace, self.problem, trials, self.changed, self.told)
        return way_of(self.problem, self.workspace, self.variant, capturing)

    def has_equal_parts(self, capturing: bool) -> bool:
        """Whether all ranks have parts of equal sizes; if not, none of them chooses a way by its own."""
        return self.workspace.has_equal_parts(self.op, self.arguments.site, self.problem, capturing)

    def meet_others(self, capturing: bool) -> None:
        """Takes part in the decision of the other ranks, on a rank that runs the reference because of a size
        of its own."""
        self.has_equal_parts(capturing)
        predictor_for(self.workspace)

    def _itself(self, workspace: GpuWorkspace, problem: Problem) -> Mapping[str, Call]:
        """Trials that make this very call, in all its ways."""

        def call(way: Way) -> Call:
            return lambda i: (
                self.replaced() if way.replaced else captured_too(self.run_named(way), self.op, way)
            )

        return {name: call(way) for name, way in ways_of(problem).items()}

    def replaced(self) -> Any:
        """Makes the call in the way that the op replaces."""
        return FUSED_OPS[self.op].reference(self.arguments) if self.unfused is None else self.unfused()

    def configured(self, way: Way) -> Way:
        """The way in the configuration that `run` takes, by the sizes that ranks have told each other."""
        is_open = self.told is not None and way.fused
        return configuration(way, self.as_told, self.workspace) if is_open else way

    def note(self, way: Way, capturing: bool) -> Note:
        """The entry of such calls in reports, with the best times that the choice knows."""
        times = times_of(self.problem, self.workspace)
        way = self.configured(way)
        ways, key = ways_of(self.problem), FUSED_OPS[self.op].key(self.arguments)
        taken = next((time for time in times if time.name == way.name), Timed(way.name))
        ours = next((time for time in times if ways[time.name].fused), None)
        of_torch = next((time for time in times if not ways[time.name].fused), None)
        return Note(key, Run(key.shapes, taken, way.fused, capturing, of_torch, ours))


def captured_too(found: Any, op: str, way: Way) -> Any:
    """`found`, the result of a way. RuntimeError if it is None, as the way cannot be captured."""
    if found is None:
        raise RuntimeError(f"{op}: {way.name} cannot be captured before it has run")
    return found


def run_call(call: GpuCall | None) -> Any:
    """Makes the call in the way that policy `auto` takes, and returns what the op returns. NotImplemented for
    a call that the kernels decline."""
    if call is None:
        return NotImplemented
    with current(call.workspace.device):
        capturing = torch.cuda.is_current_stream_capturing()
        way, settled = call.decide(capturing)
        if settled and not capturing and call.kind not in call.workspace.calls:
            remember(call.workspace, call.kind, way)
        found = None if way.replaced else call.run(way)
        if found is None and not way.replaced:
            call.note(way, capturing).fell_back(NOT_CAPTURED)
        else:
            _note_once(call, way, capturing)
        return call.replaced() if found is None else found


def _note_once(call: GpuCall, way: Way, capturing: bool) -> None:
    kind, known = ("noted", call.op, call.arguments.site, call.problem, capturing), call.workspace.calls
    if known.get(kind) is not way:
        call.note(way, capturing).ran()
        remember(call.workspace, kind, way)


def remember(workspace: GpuWorkspace, kind: Hashable, made: Any) -> None:
    """Store `made` under `kind` in the calls of the workspace."""
    if len(workspace.calls) == MOST_CALLS:  # sizes may change without end
        workspace.calls.clear()
    workspace.calls[kind] = made


def once(workspace: GpuWorkspace, kind: Hashable, make: Callable[[], M]) -> M:
    """What was prepared for calls of this kind; `make` prepares it at the first call."""
    made: M | None = workspace.calls.get(kind)
    if made is None:
        made = make()
        remember(workspace, kind, made)
    return made


Calls: TypeAlias = Mapping[str, Callable[[Any], GpuCall | None]]
"""By op: from the record of its arguments to the call; None for what the kernels decline."""


@dataclass(frozen=True)
class ByName:
    """The ways of ops that have kernels, as `autofuse.bench.gpu.named_ways` asks for them."""

    calls: Calls

    def names(self, op: str, arguments: tuple[Any, ...], unfused: bool) -> list[str]:
        """The ways that can run the call, with `unfused` also those of libraries; none if no kernel can."""
        call = self._find(op, arguments)
        fused = [] if call is None else fused_ways(call.problem)
        return list(ways_of(call.problem)) if call is not None and fused and unfused else fused

    def run(self, name: str, op: str, arguments: tuple[Any, ...]) -> Any:
        """Makes the call in the way of this name. RuntimeError in a way that cannot be captured."""
        call = self._found(op, arguments)
        way = ways_of(call.problem)[name]
        if way.replaced:
            return call.replaced()
        return captured_too(call.run_named(way), op, way)

    def chosen(self, op: str, arguments: tuple[Any, ...]) -> str:
        """The way that is predicted to take least time on the GPUs."""
        call = self._found(op, arguments)
        return call.configured(chosen(call.problem, call.workspace)).name

    def keep(self, op: str, arguments: tuple[Any, ...], times: dict[str, float]) -> None:
        """Let `auto` decide by these microseconds, here and, on rank 0, in the user's own file."""
        call = self._found(op, arguments)
        keep(call.workspace, Point.of(call.as_told, times))

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
