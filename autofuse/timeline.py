"""What the programs of a fused kernel did, and when: kernel traces of all ranks as events, picture, table,
JSON.

A kernel trace is written by `stamp` in `native_kernels/triton/comm.py`: int64 `[programs, EVENTS, 2]`, zero
where nothing was written. A row is the device's clock in nanoseconds when an event ended, and `kind << 32 |
rank << 24 | tile`. An event begins when the one before it ends. Clocks of GPUs differ: times are microseconds
since the earliest begin on a rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from html import escape
from statistics import fmean


class Kind(IntEnum):
    """The kinds of events, with the numbers of `comm.py`."""

    BEGUN = 1
    WAITED = 2
    COMPUTED = 3
    DRAINED = 4
    REDUCED = 5
    COPIED = 6
    PUSHED = 7
    ENDED = 8


ALL_RANKS = 0xFF


@dataclass(frozen=True)
class Event:
    """One thing that a program did. `peer`: the owner of the tile, or the rank that was waited for; None: all
    ranks."""

    program: int
    kind: Kind
    peer: int | None
    tile: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of one rank, program by program, in order. `cut`: programs with more events than their trace
    holds."""

    rank: int
    programs: int
    events: tuple[Event, ...]
    cut: int

    @property
    def computed(self) -> float:
        """The time at which the last tile was computed; 0 if none was."""
        return max((e.end for e in self.events if e.kind is Kind.COMPUTED), default=0.0)

    @property
    def ended(self) -> float:
        return max(e.end for e in self.events)

    def layer(self, event: Event) -> str | None:
        """How an event is drawn, a key of LAYERS; None if it is not drawn."""
        if event.kind is Kind.COMPUTED:
            return "own" if event.peer == self.rank else "remote"
        return _DRAWN.get(event.kind)


LAYERS = {
    "remote": "compute, a peer's tile or one of all",
    "own": "compute, own tile",
    "wait": "wait",
    "reduce": "reduce",
    "copy": "copy",
    "move": "move, or wait for own stores",
}
"""Kinds of events with a colour of their own, and their names in the legend."""

_DRAWN = {
    Kind.WAITED: "wait",
    Kind.REDUCED: "reduce",
    Kind.COPIED: "copy",
    Kind.PUSHED: "move",
    Kind.DRAINED: "move",
}


def read(rank: int, trace: Sequence[Sequence[Sequence[int]]]) -> Timeline:
    """The timeline of a rank from its trace, `[programs, EVENTS, 2]`. ValueError if that is empty."""
    rows = [[(time, what) for time, what in program if time] for program in trace]
    start = min((row[0][0] for row in rows if row), default=None)
    if start is None:
        raise ValueError(
            f"the trace of rank {rank} is empty: expected events of a kernel launched with `trace`"
        )
    events = []
    cut = 0
    for program, row in enumerate(rows):
        full = len(row) == len(trace[program])  # the last event has then overwritten earlier ones
        cut += full
        before = row[0][0] if row else start
        for i, (time, what) in enumerate(row):
            begin = time if full and i == len(row) - 1 else before
            peer = what >> 24 & ALL_RANKS
            events.append(
                Event(
                    program,
                    Kind(what >> 32),
                    None if peer == ALL_RANKS else peer,
                    what & 0xFFFFFF,
                    (begin - start) / 1000,
                    (time - start) / 1000,
                )
            )
            before = time
    return Timeline(rank, len(rows), tuple(events), cut)


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """JSON for Perfetto or chrome://tracing, with a process for each rank and a thread for each program."""
    found: list[dict[str, object]] = []
    for timeline in timelines:
        pid = timeline.rank
        found.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid}"}})
        found += [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": p, "args": {"name": f"program {p}"}}
            for p in range(timeline.programs)
        ]
        found += [
            {
                "name": e.kind.name,
                "ph": "X",
                "pid": pid,
                "tid": e.program,
                "ts": e.begin,
                "dur": round(e.end - e.begin, 3),
                "args": {"tile": e.tile, "rank": "all" if e.peer is None else e.peer},
            }
            for e in timeline.events
        ]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": found}) + "\n"


# --- Table --------------------------------------------------------------------------------------------

_COLUMNS = ("kind", "count", "first", "mean", "last", "duration")


def summary(timelines: Sequence[Timeline]) -> str:
    """The count, begin and duration of events over all ranks, and the end of each rank."""
    groups: dict[tuple[Kind, str], list[Event]] = {}
    for timeline in timelines:
        for event in timeline.events:
            part = timeline.layer(event) if event.kind is Kind.COMPUTED else None
            groups.setdefault((event.kind, part or ""), []).append(event)
    rows = [list(_COLUMNS)]
    for (kind, part), events in sorted(groups.items()):
        ends = [e.end for e in events]
        duration = fmean(e.end - e.begin for e in events)
        times = (min(ends), fmean(ends), max(ends), duration)
        rows.append([f"{kind.name} {part}".strip(), str(len(events)), *(f"{t:.1f}" for t in times)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]
    lines += ["", "microseconds since the earliest begin on a rank; duration: mean"]
    for timeline in timelines:
        done = f"last tile computed at {timeline.computed:.1f}, kernel ended at {timeline.ended:.1f}"
        short = f"; the traces of {timeline.cut} programs were too short" if timeline.cut else ""
        lines.append(f"rank {timeline.rank}: {done}{short}")
    return "\n".join(lines)


# --- Picture ------------------------------------------------------------------------------------------

STYLE = """\
.timeline{font:11px ui-sans-serif,system-ui,sans-serif;color-scheme:light dark}
.timeline text{fill:light-dark(#4a5260,#a9b2c0)}.timeline .frame{fill:light-dark(#f6f7f9,#14181f)}
.timeline .tick{stroke:light-dark(#e3e6eb,#2b323d)}
.timeline .computed{stroke:light-dark(#b3261e,#ff9d94);stroke-dasharray:4 3}
.timeline .remote{fill:light-dark(#2f62c9,#7fa8f8)}.timeline .own{fill:light-dark(#8fb3f0,#38588f)}
.timeline .wait{fill:light-dark(#c3c9d3,#4d5766)}.timeline .reduce{fill:light-dark(#23784a,#6fc795)}
.timeline .copy{fill:light-dark(#7a48b8,#bd9bea)}.timeline .move{fill:light-dark(#b24a12,#e8986a)}
"""

_LEFT, _WIDTH, _LEGEND, _GAP = 60, 1100, 26, 34
_HEIGHT = 400
"""The number of programs of one rank that are drawn."""


def draw_svg(timelines: Sequence[Timeline], title: str) -> str:
    """One panel for each rank: programs down, time across. A dashed line marks the last computed tile of the
    rank."""
    scale = _WIDTH / (max(t.ended for t in timelines) or 1.0)
    parts = _legend()
    top = _LEGEND + 14.0
    for timeline in timelines:
        panel, height = _panel(timeline, top, scale)
        parts += panel
        top += height + _GAP
    width, label = _LEFT + _WIDTH + 40, escape(title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" role="img" aria-label="{label}" '
        f'width="{width}" height="{top:g}" viewBox="0 0 {width} {top:g}"><style>{STYLE}</style>'
        f'<text x="0" y="12">{label}</text>{"".join(parts)}</svg>\n'
    )


def _legend() -> list[str]:
    parts = []
    at = float(_LEFT)
    for layer, words in LAYERS.items():
        parts.append(f'<path class="{layer}" d="M{at:g} {_LEGEND - 8}h10v10h-10z"/>')
        parts.append(f'<text x="{at + 14:g}" y="{_LEGEND + 1}">{words}</text>')
        at += 34 + 6 * len(words)
    parts.append(f'<path class="computed" d="M{at:g} {_LEGEND - 3}h18"/>')
    return [*parts, f'<text x="{at + 22:g}" y="{_LEGEND + 1}">last tile computed</text>']


def _panel(timeline: Timeline, top: float, scale: float) -> tuple[list[str], float]:
    """The elements of one rank, and the height of its panel."""
    row = min(10.0, max(2.0, _HEIGHT / timeline.programs))
    height = row * timeline.programs
    bottom = top + height
    parts = [
        f'<path class="frame" d="M{_LEFT} {top:g}h{_WIDTH}v{height:g}h-{_WIDTH}z"/>',
        f'<text x="0" y="{bottom + 14:g}">rank {timeline.rank}</text>',
    ]
    for at in _ticks(_WIDTH / scale):
        x = _LEFT + at * scale
        parts.append(f'<path class="tick" d="M{x:.1f} {top:g}v{height + 3:g}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14:g}" text-anchor="middle">{at:g} µs</text>')
    for program in range(0, timeline.programs, max(1, round(28 / row))):
        y = top + program * row + row / 2 + 4
        parts.append(f'<text x="{_LEFT - 4}" y="{y:.1f}" text-anchor="end">{program}</text>')
    # One element for each colour, because there are tens of thousands of events.
    boxes: dict[str, list[str]] = {layer: [] for layer in LAYERS}
    for event in timeline.events:
        layer = timeline.layer(event)
        if layer is not None:
            x, wide = _LEFT + event.begin * scale, max(0.3, (event.end - event.begin) * scale - 0.6)
            y = top + event.program * row
            boxes[layer].append(f"M{x:.1f} {y:.1f}h{wide:.1f}v{row * 0.85:.1f}h-{wide:.1f}z")
    parts += [f'<path class="{layer}" d="{"".join(found)}"/>' for layer, found in boxes.items() if found]
    if timeline.computed:
        x = _LEFT + timeline.computed * scale
        parts.append(f'<path class="computed" d="M{x:.1f} {top - 4:g}v{height + 8:g}"/>')
    return parts, height


def _ticks(span: float) -> Iterable[float]:
    """0 and up to ten round numbers up to `span`."""
    magnitude = 10.0 ** math.floor(math.log10(span / 10))
    step = next(s * magnitude for s in (1, 2, 5, 10) if span / (s * magnitude) <= 10)
    return (i * step for i in range(int(span / step) + 1))
