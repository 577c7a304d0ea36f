"""What has run at the sites of this process: the way of every kind of call, and the calls that fell back.

A report is made while a graph is compiled; what runs is decided afterwards, when calls are prepared. Code
that prepares a call notes here what runs it, once for each kind of call. Code that leaves a call to torch
because something is missing counts it. A report joins both when it is read. Sites are known by names that a
graph from a compile cache has, too.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .notes import place

MEASURED, PREDICTED = "measured", "predicted"

MOST = 4096
"""Kinds of calls that are remembered, and as many kinds of fall-backs: sizes may change without end."""

Shapes: TypeAlias = tuple[tuple[int | None, ...], ...]
"""Of the operands that name a call. None, in a site: any size."""


@dataclass(frozen=True)
class SiteKey:
    """A site as its calls know it, or the calls of one kind at a site.

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
        """Whether a call is one of this site, as far as names and sizes tell."""
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

    fused: a kernel of ours, else torch's. captured: in CUDA graphs. torch, ours: the fastest way of either
    whose time is known.
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
    """What is known of a site."""

    runs: tuple[Run, ...] = ()
    fell_back: tuple[FallBack, ...] = ()


def is_new(kind: Hashable) -> bool:
    """Whether calls of this kind have not been asked for; from now on they have."""
    with _lock:
        found = kind not in _kinds
        if found:
            _remember(_kinds, kind, None)
        return found


def ran(key: SiteKey, run: Run) -> None:
    """This runs such calls from now on."""
    with _lock:
        _remember(_runs, (key, run.captured), run)


def fell_back(key: SiteKey, why: str) -> None:
    """Counts a call."""
    with _lock:
        _remember(_fell_back, (key, why), _fell_back.get((key, why), 0) + 1)


@dataclass(frozen=True)
class Note:
    """What is to be noted of calls that are prepared: `ran` once they are let in, `fell_back` if not."""

    key: SiteKey
    run: Run

    def ran(self) -> None:
        ran(self.key, self.run)

    def fell_back(self, why: str) -> None:
        fell_back(self.key, why)


def of_site(site: SiteKey) -> Ran:
    """What has run there until now, smaller shapes first."""
    with _lock:
        runs = [run for (key, _), run in _runs.items() if site.has(key)]
        counts = [FallBack(key.shapes, why, n) for (key, why), n in _fell_back.items() if site.has(key)]
    runs.sort(key=lambda run: (run.shapes, run.captured))
    return Ran(tuple(runs), tuple(counts))


def of_op(op: str) -> list[Run]:
    """What has run calls of an op, wherever they are; the latest kind of calls last."""
    with _lock:
        return [run for (key, _), run in _runs.items() if key.op == op]


def forget() -> None:
    """As if nothing had run yet."""
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
    """Whether shapes differ from a pattern only where it has any size."""
    return [len(dims) for dims in pattern] == [len(dims) for dims in shapes] and all(
        size is None or size == other
        for dims, others in zip(pattern, shapes, strict=True)
        for size, other in zip(dims, others, strict=True)
    )
