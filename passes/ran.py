"""What has run at sites, as reports say it. It is decided after a report was made: see `lowering.runs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from autofuse.lowering.runs import Ran, Run, Shapes, Timed

MOST_LINES = 12
"""Of a site. `to_json` has all of them."""

_NAMES = {
    "cublas+nccl": "NCCL",
    "torch+nccl": "NCCL",
    "cublas+one_shot": "one-shot",
    "cublas+two_shot": "two-shot",
    "async_tp": "async TP",
}
"""Of torch's ways."""


class State(str, Enum):
    """What became of a site until now."""

    FUSED = "fused"
    """A kernel of ours runs, at least for some sizes."""
    AS_TORCH = "as torch"
    """A fused op is there, and takes torch's way, which is the fastest."""
    FELL_BACK = "fell back"
    """A fused op is there, but something kept it from running."""
    NOT_RUN = "not yet run"
    KEPT = "kept"


def state_of(ran: Ran) -> State:
    """Of a site that has a fused op."""
    if not ran.runs:
        return State.FELL_BACK if ran.fell_back else State.NOT_RUN
    return State.FUSED if any(run.fused for run in ran.runs) else State.AS_TORCH


def counted(states: Iterable[State]) -> str:
    """`3 fused (1 not yet run), 1 as torch, 2 kept`: those that have not run are meant to be fused."""
    count = Counter(states)
    waiting = count[State.NOT_RUN]
    fused = count[State.FUSED] + waiting
    told = "" if not waiting else " (not yet run)" if waiting == fused else f" ({waiting} not yet run)"
    parts = [f"{fused} fused{told}"]
    parts += [f"{count[state]} {state.value}" for state in (State.AS_TORCH, State.FELL_BACK) if count[state]]
    return ", ".join([*parts, f"{count[State.KEPT]} kept"])


def lines_of(ran: Ran) -> list[str]:
    """A line for each kind of calls, and for each reason to fall back."""
    lines = [f"{_calls(run)}: {_run_text(run)}" for run in ran.runs]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more kinds of calls"]
    counts: Counter[str] = Counter()
    for each in ran.fell_back:
        counts[each.why] += each.count
    return lines + [f"fell back {n} time{'s' * (n != 1)}: {why}" for why, n in counts.items()]


def _run_text(run: Run) -> str:
    """The way that runs, why, and the best of the others."""
    if run.fused:
        return _and(_timed(run.way), "best of torch", run.torch)
    name = _name(run.way)
    if run.way.us is None:
        return f"as torch: {name} is fastest here, as far as sizes tell"
    slower = run.ours is None or run.ours.us is None or run.way.us <= run.ours.us
    where = "is fastest here" if slower else "is fastest where the host launches each call"
    return _and(f"as torch: {name} {where}, {_time(run.way)}", "best of ours", run.ours)


def _shapes_text(shapes: Shapes) -> str:
    """`[512, 2048] [2048, 8192]`."""
    return " ".join(str(list(dims)) for dims in shapes)


def _calls(run: Run) -> str:
    return ", ".join(filter(None, (_shapes_text(run.shapes) or "all", "captured" if run.captured else "")))


def _and(text: str, what: str, other: Timed | None) -> str:
    return text if other is None or other.us is None else f"{text}; {what}: {_timed(other)}"


def _timed(way: Timed) -> str:
    return _name(way) if way.us is None else f"{_name(way)}, {_time(way)}"


def _time(way: Timed) -> str:
    return f"{way.us:.1f} us {way.known}"


def _name(way: Timed) -> str:
    return _NAMES.get(way.name, way.name)
