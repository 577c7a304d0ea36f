"""What has run at the sites of this process: the way of every kind of call, and the calls that fell back.

A report is made while a graph is compiled. The way of a call is chosen later, when the call is prepared. The
code that prepares a call notes the way here, once for each kind of call. The code that leaves a call to torch
because something is missing counts it here. A report joins both when it is read. The key of a site is the
same in a graph from a compile cache."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .notes import place

MEASURED, PREDICTED = "measured", "predicted"

MOST = 4096
"""The number of kinds of calls, and of kinds of fall-backs, that are kept. Sizes may change without end."""

Shapes: TypeAlias = tuple[tuple[int | None, ...], ...]
"""Shapes of the operands by which calls are told apart. A None in the key of a site stands for any size."""


@dataclass(frozen=True)
class SiteKey:
    """The key of a site, or of the calls of one kind at a site.

    place: `file:line` without the folder; where ops were merged several of them, with `+` between.
    """

    op: str
    place: str
    group: str
    shapes: Shapes

    @classmethod
    def of(cls, op: str, site: str, group: str, shapes: Shapes) -> SiteKey:
        return cls(op, place(site), group, shapes)

    def has(self, call: SiteKey) -> bool:
        """Whether the key of a call fits this site."""
        return (self.op, self.place, self.group) == (call.op, call.place, call.group) and _fit(
            self.shapes, call.shapes
        )


@dataclass(frozen=True)
class Timed:
    """A way by its name, and the microseconds that it takes the GPUs.

    known: `MEASURED` at these sizes, `PREDICTED`, or empty without a time.
    """

    name: str
    us: float | None = None
    known: str = ""


@dataclass(frozen=True)
class Run:
    """What runs the calls of one kind at a site.

    fused: whether a kernel of ours runs them, else torch does. captured: whether these are calls in CUDA
    graphs. torch, ours: the fastest known way without and with a kernel of ours.
    """

    shapes: Shapes
    way: Timed
    fused: bool
    captured: bool = False
    torch: Timed | None = None
    ours: Timed | None = None


@dataclass(frozen=True)
class FallBack:
    """Calls that torch ran because something was missing."""

    shapes: Shapes
    why: str
    count: int


@dataclass(frozen=True)
class Ran:
    """All that has run at a site."""

    runs: tuple[Run, ...] = ()
    fell_back: tuple[FallBack, ...] = ()


def is_new(kind: Hashable) -> bool:
    """Whether this is the first question for calls of this kind."""
    with _lock:
        found = kind not in _kinds
        if found:
            _remember(_kinds, kind, None)
        return found


def ran(key: SiteKey, run: Run) -> None:
    """Notes what runs such calls from now on."""
    with _lock:
        _remember(_runs, (key, run.captured), run)


def fell_back(key: SiteKey, why: str) -> None:
    """Counts a call that torch runs, and why."""
    with _lock:
        _remember(_fell_back, (key, why), _fell_back.get((key, why), 0) + 1)


@dataclass(frozen=True)
class Note:
    """The note of a prepared call. Its launcher calls `ran` if the call may run, else `fell_back`."""

    key: SiteKey
    run: Run

    def ran(self) -> None:
        ran(self.key, self.run)

    def fell_back(self, why: str) -> None:
        fell_back(self.key, why)


def of_site(site: SiteKey) -> Ran:
    """What has run at a site until now, smaller shapes first."""
    with _lock:
        runs = [run for (key, _), run in _runs.items() if site.has(key)]
        counts = [FallBack(key.shapes, why, n) for (key, why), n in _fell_back.items() if site.has(key)]
    runs.sort(key=lambda run: (run.shapes, run.captured))
    return Ran(tuple(runs), tuple(counts))


def of_op(op: str) -> list[Run]:
    """What has run the calls of an op at all sites; the latest kind of calls last."""
    with _lock:
        return [run for (key, _), run in _runs.items() if key.op == op]


def forget() -> None:
    """Drops all notes and counts."""
    with _lock:
        for each in (_runs, _fell_back, _kinds):
            each.clear()


_runs: dict[tuple[SiteKey, bool], Run] = {}
_fell_back: dict[tuple[SiteKey, str], int] = {}
_kinds: dict[Hashable, None] = {}
_lock = threading.Lock()


def _remember(known: dict[Any, Any], at: Any, value: Any) -> None:
    if at not in known and len(known) == MOST:
        del known[next(iter(known))]  # the oldest
    known[at] = value


def _fit(pattern: Shapes, shapes: Shapes) -> bool:
    """Whether the shapes are equal to the pattern wherever the pattern has a size."""
    return [len(dims) for dims in pattern] == [len(dims) for dims in shapes] and all(
        size is None or size == other
        for dims, others in zip(pattern, shapes, strict=True)
        for size, other in zip(dims, others, strict=True)
    )
