"""Runs an expert op of any number of rows in a fused way.

Splits differ from rank to rank, so no decision about a call may depend on the splits of one rank. Before
every call that is not captured, the hosts tell each other how many rows their ranks have:

- If a rank has more rows than there is room for, the memory of all ranks grows.
- The rows that the busiest rank computes decide which configuration of the kernel runs.

With `config.equal_rows` all ranks bring the same number of rows. Then the hosts do not meet, and each rank
has room for all rows. A captured call has the same rows in every replay, and takes the configuration of the
last call that was not captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.gpu.choice.calls import once
from autofuse.lowering.gpu.choice.choose import configuration
from autofuse.lowering.gpu.choice.kernel import Way
from autofuse.lowering.gpu.choice.launcher import Launcher, contiguous
from autofuse.lowering.gpu.memory.told import values_of_all
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.lowering.reference.experts import KEPT
from autofuse.lowering.torch_internals import setting_of
from autofuse.native_kernels.cuda.kernels.dropless_combine import dropless_combine_needs, height_of
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import (
    dropless_dispatch_needs,
    dropless_dispatch_values,
)
from autofuse.native_kernels.gpu.memory import Need, PeerMemory

from .fixed import is_stack, layouts, made
from .kernels import Rows
from .unfused import grouped_product
from .ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem, rounded_rows

LEAST_ROWS = 1024
"""There is room for as many."""

LEAST_COMPUTED = 128
"""Calls in which the busiest rank computes fewer rows take the configuration for so many. Calls are prepared
for each power of two."""

MOST_WORST = 2 << 30
"""Bytes of the inbox up to which there is room for the worst case."""


Needs: TypeAlias = Callable[[int, int, int], Need]
"""Of rows, columns and ranks."""


class Counts(NamedTuple):
    """Numbers of rows of this rank in a call. held: its memory has to hold them; computed: it multiplies
    them; brought: they are of its own tokens; worst: the most that it may hold if all ranks bring equally
    many."""

    held: int
    computed: int
    brought: int
    worst: int


class Room(NamedTuple):
    """The same on all ranks. rows: that the memory of each rank holds; computed: by the busiest rank, rounded
    up to a power of two and at least LEAST_COMPUTED; 0 if that is not known."""

    rows: int
    computed: int


def dropless_problem_of(
    op: str, x: Tensor, w: Tensor, workspace: GpuWorkspace, weights: int = 1, gate: str = ""
) -> DroplessProblem:
    """The problem of a call with `x: [rows, K]` and `w: [E, K, N]`; weights: as `problem_of`."""
    experts, k, n = w.shape
    aligned = x.storage_offset() % 8 == 0 and is_stack(w)
    return DroplessProblem(
        op + DROPLESS, experts, k, n, workspace.world, x.dtype, workspace.programs, aligned, weights,
        gated=bool(gate), kept=gate.endswith(KEPT),
    )  # fmt: skip


class _Calls:
    """The calls of one site in one way, with any number of rows. What all calls share is decided once.

    variant: what kernels are compiled for, besides a problem. named: whether all calls run in the
    configuration of the way; if not, the rows of the busiest rank decide.
    """

    def __init__(
        self,
        op: str,
        workspace: GpuWorkspace,
        way: Way,
        problem: DroplessProblem,
        variant: Hashable,
        site: str,
        named: bool = True,
    ) -> None:
        self.group = weakref.ref(workspace.group)
        self._op, self._workspace, self._way = op, workspace, way
        self._problem, self._variant, self._site, self._named = problem, variant, site, named
        self._launchers: dict[Room, Launcher] = {}
        self._last: Launcher | None = None

    def goes_on(self) -> bool:
        return self._last is not None and self._last.goes_on()

    def _launcher(self, columns: int, rows: Counts, needs: Needs) -> Launcher | None:
        """That of a call with so many rows; None where memory would have to grow in a captured graph."""
        workspace = self._workspace
        room = _room_for(workspace, self._op, self._site, columns, rows)
        if not room.rows:
            return None
        self._last = self._launchers.get(room)
        if self._last is None:
            problem = replace(self._problem, rows=room.computed)
            way = self._way if self._named else configuration(self._way, problem, workspace)
            need = partial(needs, room.rows, columns, problem.world)
            self._last = self._launchers[room] = Launcher(
                workspace, way, self._op, self._site, problem, (problem, self._variant, room), need
            )
        return self._last


class DroplessCombine(_Calls):
    """`combine(x, w, bias, rows)`: `[sum(rows.received), N]` of a sum of products."""

    def again(
        self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, rows: Rows
    ) -> list[Tensor] | None:
        """As `__call__`, of a call like one before that was not captured; None where the call has to be
        prepared anew."""
        if x[0].shape[0] != sum(rows.sent) or not self.goes_on():
            return None
        return self(x, w, bias, rows)

    def __call__(
        self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, rows: Rows,
        trace: Tensor | None = None,
    ) -> list[Tensor] | None:  # fmt: skip
        """None if that cannot be captured. RuntimeError without room."""
        received, n = sum(rows.received), self._problem.columns
        counts = Counts(received, sum(rows.sent), received, received)  # it brings back what ranks brought
        launcher = self._launcher(n, counts, dropless_combine_needs)
        if launcher is None or launcher.enter(trace=trace) is None:
            return None
        out = x[0].new_empty(received, n)
        launcher.launch(x, w, out, bias, rows)
        launcher.leave()
        return [out]


class DroplessDispatch(_Calls):
    """`dispatch(x, w, bias, rows, keep)`: products `[sum(rows.received), N_i]` with all weights and, with
    `keep`, X. The first `problem.weights` are multiplied while the rows arrive, the others afterwards. Of a
    gated problem the products with both weights are one output, behind which they come if they are kept."""

    def again(
        self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], rows: Rows, keep: bool
    ) -> list[Tensor] | None:
        """As `DroplessCombine.again`, in the shortest way."""
        received, sent = sum(rows.received), sum(rows.sent)
        if rows.positions is not None and rows.positions.shape[0] != received:
            return None
        if not self.goes_on():
            return None
        launcher = self._in_room(received, sent)
        if launcher is None:
            return None
        count = self._problem.weights
        form, outputs = self._form(received, sent, rows), None
        if form is not None:
            made = [contiguous(received, self._problem.columns)] * self._problem.outputs
            outputs = launcher.again(
                (x, *w[:count]), made, _given(bias[:count], rows),
                form=form, values=dropless_dispatch_values(rows.received, rows.sent),
            )  # fmt: skip
        if outputs is None:
            return self._long(launcher, x, w, bias, rows, keep)
        rest = self._rest(launcher.memory, x.dtype, w, bias, rows, keep)
        if rest:
            launcher.leave_again()
        return outputs + rest

    def __call__(
        self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], rows: Rows, keep: bool,
        trace: Tensor | None = None,
    ) -> list[Tensor] | None:  # fmt: skip
        """None if that cannot be captured. RuntimeError without room."""
        launcher = self._in_room(sum(rows.received), sum(rows.sent))
        return None if launcher is None else self._long(launcher, x, w, bias, rows, keep, trace)

    def _in_room(self, received: int, sent: int) -> Launcher | None:
        counts = Counts(max(received, sent), received, sent, self._problem.world * sent)
        return self._launcher(self._problem.k, counts, dropless_dispatch_needs)

    def _form(self, received: int, sent: int, rows: Rows) -> Hashable:
        """Which kernel a call runs, with which operands; None where this rank has no rows, and no address."""
        height = height_of(received, self._problem.experts)
        return (height, rows.offsets is None, rows.positions is None) if received and sent else None

    def _long(
        self, launcher: Launcher, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], rows: Rows,
        keep: bool, trace: Tensor | None = None,
    ) -> list[Tensor] | None:  # fmt: skip
        memory = launcher.enter(trace=trace)
        if memory is None:
            return None
        received, count = sum(rows.received), self._problem.weights
        outputs = [x.new_empty(received, self._problem.columns) for _ in range(self._problem.outputs)]
        biases = [b for b in bias[:count] if b is not None]
        launcher.launch(x, w[:count], outputs, biases, rows, form=self._form(received, sum(rows.sent), rows))
        outputs += self._rest(memory, x.dtype, w, bias, rows, keep)
        launcher.leave()
        return outputs

    def _rest(
        self, memory: PeerMemory, dtype: torch.dtype, w: Sequence[Tensor], bias: Sequence[Tensor | None],
        rows: Rows, keep: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The products with weights that the kernel does not multiply by and, with `keep`, X."""
        count = self._problem.weights
        if not keep and len(w) == count:
            return []
        assert rows.offsets is not None
        exchanged = memory.received((sum(rows.received), self._problem.k), dtype)
        rest = zip(w[count:], bias[count:], strict=True)
        products = [grouped_product(exchanged, wi, b, rows.offsets) for wi, b in rest]
        return products + [exchanged] * keep


def _given(bias: Sequence[Tensor | None], rows: Rows) -> list[Tensor]:
    """The operands behind the outputs."""
    return [t for t in (*bias, rows.offsets, rows.positions) if t is not None]


def dropless_combine(
    workspace: GpuWorkspace, way: Way, problem: DroplessProblem, x: Sequence[Tensor], w: Sequence[Tensor],
    bias: Tensor | None, rows: Rows, site: str, trace: Tensor | None = None, named: bool = True,
) -> Tensor | None:  # fmt: skip
    """A call of `DroplessCombine`."""
    variant = dropless_combine_variant(w, bias)

    def make() -> DroplessCombine:
        return DroplessCombine(COMBINE, workspace, way, problem, (variant, trace is None), site, named)

    kind = made(COMBINE, way, problem, variant, site, named)
    found = (make() if trace is not None else once(workspace, kind, make))(x, w, bias, rows, trace)
    return None if found is None else found[0]


def dropless_dispatch(
    workspace: GpuWorkspace, way: Way, problem: DroplessProblem, x: Tensor, w: Sequence[Tensor],
    bias: Sequence[Tensor | None], rows: Rows, keep: bool, site: str, trace: Tensor | None = None,
    named: bool = True,
) -> list[Tensor] | None:  # fmt: skip
    """A call of `DroplessDispatch`."""
    variant = dropless_dispatch_variant(w, bias)

    def make() -> DroplessDispatch:
        return DroplessDispatch(DISPATCH, workspace, way, problem, (variant, trace is None), site, named)

    kind = made(DISPATCH, way, problem, variant, site, named)
    return (make() if trace is not None else once(workspace, kind, make))(x, w, bias, rows, keep, trace)


def dropless_combine_variant(w: Sequence[Tensor], bias: Tensor | None) -> Hashable:
    """What kernels are compiled for, besides a problem."""
    return layouts(w), bias is None


def dropless_dispatch_variant(w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Hashable:
    """The same."""
    return w[0].stride(), bias[0] is None


def last_told(workspace: GpuWorkspace, op: str, site: str, problem: DroplessProblem) -> DroplessProblem:
    """The problem with the rows that the busiest rank computed in the last call of the site, as far as the
    hosts told each other."""
    return replace(problem, rows=_known_of(workspace).computed.get((op, site), 0))


_equal_rows = setting_of(config, "equal_rows")


def _room_for(workspace: GpuWorkspace, op: str, site: str, columns: int, rows: Counts) -> Room:
    """For a call that exchanges rows of so many columns. The room has no rows where a CUDA graph is captured
    and the memory would have to grow."""
    known = _known_of(workspace)
    if torch.cuda.is_current_stream_capturing():
        room = known.rows.get((op, columns), 0)
        if room and rows.held > room:
            raise RuntimeError(
                f"{op}, rank {workspace.rank} of group {workspace.group_name}: {rows.held} rows are "
                f"captured, and there is room for {room}; run as many once before you capture"
            )
        return Room(room, known.computed.get((op, site), 0))
    if _equal_rows() and 2 * 2 * rows.worst * columns <= MOST_WORST:
        if rows.held > rows.worst:
            raise RuntimeError(
                f"{op} at {site}: rank {workspace.rank} gets {rows.held} rows, more than {rows.worst}: "
                "ranks do not bring equally many, as the setting equal_rows promises"
            )
        held, computed = rows.worst, rows.brought
    else:
        held, computed = told_by_all(workspace, op, site, (rows.held, rows.computed))
    known.rows[op, columns] = rounded_rows(max(held, known.rows.get((op, columns), LEAST_ROWS)))
    known.computed[op, site] = rounded_rows(max(computed, LEAST_COMPUTED))
    return Room(known.rows[op, columns], known.computed[op, site])


def told_by_all(workspace: GpuWorkspace, op: str, site: str, rows: Sequence[int]) -> list[int]:
    """The most that a rank has, of each number of rows."""
    told = values_of_all(workspace, op, site, "rows of all ranks", rows)
    return [max(each) for each in zip(*told, strict=True)]


@dataclass
class _Known:
    """What the ranks of a group know alike. rows: for which there is room, by op and columns; computed: as of
    `Room`, by op and site."""

    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    computed: dict[tuple[str, str], int] = field(default_factory=dict)


def _known_of(workspace: GpuWorkspace) -> _Known:
    return _known.setdefault(workspace, _Known())


_known: WeakKeyDictionary[GpuWorkspace, _Known] = WeakKeyDictionary()
agreements.append(_known)
