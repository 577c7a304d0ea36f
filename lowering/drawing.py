"""Drawings of plans: ranks down, steps across, as SVG for a page and as text for a terminal.

Both draw the actions of the plans that executors run. A step is a stage of the algorithm and has no fixed
duration: a step in which several peers access one rank takes longer than a step in which every peer has a
link of its own. Hence both drawings show the contention of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from autofuse.lowering.plan import (
    Action,
    Compute,
    Copy,
    Plan,
    Reduce,
    Send,
    Signal,
    Store,
    Wait,
    contention,
)

RANKS, STEPS = 16, 64
"""The largest numbers of ranks and steps that are drawn. A drawing states what it leaves out."""

KINDS = {
    "compute": "compute",
    "update": "compute, add what arrived",
    "send": "send",
    "reduce": "reduce",
    "copy": "copy",
    "wait": "wait",
}
"""The kinds of marks, with their names in the legend. Waits are drawn, signals are not."""


@dataclass(frozen=True)
class Mark:
    """A run of equal actions of one rank in a step: `count` tiles of a chunk, or waits.

    `chunk` is the source of a wait, or the tile of a one-shot plan, which has one chunk. `peer` is the rank
    at the other end of the link, if data crosses a link; `pulls`: the data comes from the peer.
    """

    kind: str
    chunk: int
    peer: int | None
    pulls: bool
    count: int


def marks(plan: Plan, step: int) -> list[Mark]:
    """The marks of a plan in one step, in program order."""
    actions = [a for a in plan.actions if a.step == step and not isinstance(a, Signal)]
    found = []
    for key, group in groupby(actions, key=lambda a: _key(plan, a)):
        same = list(group)
        sources = {a.source for a in same if isinstance(a, Wait)}
        kind, chunk, peer, pulls = key
        found.append(Mark(kind, min(sources, default=chunk), peer, pulls, len(sources) or len(same)))
    return found


def _key(plan: Plan, action: Action) -> tuple[str, int, int | None, bool]:
    """(kind, chunk, peer, pulls). Consecutive waits form one run."""
    match action:
        case Wait():
            return "wait", -1, None, False
        case Compute(tile=tile, dest=dest):
            kind = "update" if action.store is Store.UPDATE and action.step else "compute"
        case Send(tile=tile, dest=dest):
            kind = "send"
        case Copy(tile=tile, source=source):
            return "copy", tile.chunk, None if source == plan.rank else source, True
        case Reduce(tile=tile):
            return "reduce", tile.index if plan.one_shot else tile.chunk, None, True
        case Signal():
            raise AssertionError("signals are not drawn")
    chunk = tile.index if plan.one_shot else tile.chunk
    if dest != plan.rank:
        return kind, chunk, dest, False
    pulls = kind == "compute" and plan.pulls and tile.chunk != plan.rank
    return kind, chunk, tile.chunk if pulls else None, pulls


def title(plans: Sequence[Plan]) -> str:
    """`matmul_all_reduce: direct, 4 ranks, 8 tiles a rank`."""
    plan = plans[0]
    tiles = len(plan.tiles())
    shape = ", one shot" if plan.one_shot else ""
    return (
        f"{plan.op}: {plan.order.value}{shape}, {plan.world} ranks, {tiles} tile{'s' * (tiles != 1)} a rank"
    )


def left_out(plans: Sequence[Plan]) -> str:
    """`drawn: 16 of 32 ranks`; empty if nothing is left out."""
    steps = len(contention(plans))
    pairs = ((len(plans), RANKS, "ranks"), (steps, STEPS, "steps"))
    parts = [f"{most} of {all_} {what}" for all_, most, what in pairs if all_ > most]
    return f"drawn: {', '.join(parts)}" if parts else ""


# --- Text ---------------------------------------------------------------------------------------------

_LETTERS = {"send": "s", "reduce": "r", "copy": "c"}


def draw_text(plans: Sequence[Plan], width: int) -> str:
    """The plans of all ranks, `plans[r].rank == r`, as a table in parts of at most `width` columns.

    `2` computes a tile of chunk 2. `2>` stores it at its owner, `2>0` at rank 0, and `<2` reads the input
    from rank 2. `+` adds the received partial sum, `x4` means four tiles. `s`: send, `r`: reduce, `c`: copy,
    `w`: wait (for a rank, `*`: for all ranks). Raises ValueError if the widest step does not fit into the
    width.
    """
    busiest = contention(plans)
    head = ["step", *(f"rank {plan.rank}" for plan in plans[:RANKS]), "peers"]
    columns = [
        [str(step), *(" ".join(map(_code, marks(plan, step))) for plan in plans[:RANKS]), str(busiest[step])]
        for step in range(min(STEPS, len(busiest)))
    ]
    parts: list[list[list[str]]] = []
    used = width
    for column in columns:
        room = 2 + max(map(len, column))
        if used + room > width:
            parts.append([head])
            used = max(map(len, head))
        if used + room > width:
            raise ValueError(f"a timeline of {width} columns has no room for a step; give it {used + room}")
        parts[-1].append(column)
        used += room
    lines = [title(plans)]
    for part in parts:
        widths = [max(map(len, column)) for column in part]
        rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*part, strict=True))
        lines += ["", *rows]
    notes = ["", "N: a tile of chunk N, N> at its owner, N>R at rank R, <N from rank N; xT: T tiles"]
    notes += ["s send, r reduce, c copy, w wait; peers: the most that meet at one rank's memory"]
    return "\n".join([*lines, *notes, *filter(None, [left_out(plans)])])


def _code(mark: Mark) -> str:
    if mark.kind == "wait":
        return f"w{mark.chunk}" if mark.count == 1 else "w*"
    number = f"{mark.chunk}{'+' * (mark.kind == 'update')}"
    if mark.peer is not None:
        other = "" if mark.peer == mark.chunk else str(mark.peer)
        number = f"{other}<{number}" if mark.pulls else f"{number}>{other}"
    times = f"x{mark.count}" if mark.count > 1 else ""
    return f"{_LETTERS.get(mark.kind, '')}{number}{times}"


# --- SVG ----------------------------------------------------------------------------------------------

STYLE = """\
.plan{font:11px ui-sans-serif,system-ui,sans-serif;color-scheme:inherit}
.plan text{fill:light-dark(#4a5260,#a9b2c0)}.plan text.hot{fill:light-dark(#b3261e,#ff9d94);font-weight:700}
.plan .b text{fill:light-dark(#fff,#10141a);text-anchor:middle;font-weight:600}
.plan .b.send text,.plan .b.copy text{fill:var(--c)}
.plan .b rect{fill:var(--c)}
.plan .b.send rect,.plan .b.copy rect{fill:light-dark(#fff,#14181f);stroke:var(--c);stroke-width:1.5}
.plan .b.copy rect{stroke-dasharray:3 2}
.plan .b.wait rect{fill:light-dark(#c3c9d3,#4d5766)}
.plan .cut{stroke:light-dark(#fff,#14181f)}.plan .step{stroke:light-dark(#e3e6eb,#2b323d)}
.plan .a{fill:none;stroke:var(--c);stroke-width:1.4}.plan .a.all{stroke:light-dark(#6b7483,#8e98a8)}
.plan .k0{--c:light-dark(#2f62c9,#7fa8f8)}.plan .k1{--c:light-dark(#b24a12,#e8986a)}
.plan .k2{--c:light-dark(#23784a,#6fc795)}.plan .k3{--c:light-dark(#7a48b8,#bd9bea)}
.plan .k4{--c:light-dark(#a92f66,#e88bb2)}.plan .k5{--c:light-dark(#0d7583,#5fc3cf)}
.plan .k6{--c:light-dark(#7d6608,#cdb55a)}.plan .k7{--c:light-dark(#56616f,#a3afbe)}
"""
"""The style of the classes of a drawing, for light and dark pages. A chunk has the colour of its owner; every
mark also shows the number of the chunk."""

_LEFT, _TOP, _PITCH, _BOX, _UNIT, _LANE, _GAP, _PAD = 52, 22, 30, 18, 18, 26, 2, 5


def draw_svg(plans: Sequence[Plan], style: bool = True) -> str:
    """The plans of all ranks, `plans[r].rank == r`, as one `<svg>` element without ids.

    Rows are ranks, columns are steps. A box is a run of tiles, an arrow is data that crosses a link, and the
    last row shows the number of peers that access one rank. `style`: with STYLE inside, for a file of its
    own.
    """
    busiest = contention(plans)[:STEPS]
    drawn = plans[:RANKS]
    bottom = _TOP + _PITCH * len(drawn)
    parts = [f'<text x="0" y="{bottom + 14}">peers</text>', '<text x="0" y="12">step</text>']
    parts += [f'<text x="0" y="{_middle(p.rank) + 4}">rank {p.rank}</text>' for p in drawn]
    at = float(_LEFT)
    for step, peers in enumerate(busiest):
        parts.append(f'<path class="step" d="M{at:g} 2V{bottom + 18}"/>')
        inner, end = _draw_step(drawn, step, at)
        hot = ' class="hot"' if peers > 1 else ""
        parts += [f'<text x="{at + _PAD:g}" y="12">{step}</text>', *inner]
        parts.append(f'<text x="{at + _PAD:g}" y="{bottom + 14}"{hot}>{peers or ""}</text>')
        at = end
    height = bottom + 20
    note = left_out(plans)
    if note:
        parts.append(f'<text x="0" y="{height + 12}">{note}</text>')
        height += 18
    width = max(at, 160)
    label = escape(title(plans))
    return _svg(label, width, height, parts, style)


def draw_legend() -> str:
    """The kinds of boxes and their names, as an `<svg>` without STYLE."""
    parts, at = [], 1
    for i, (kind, name) in enumerate(KINDS.items()):
        mark = Mark(kind, i % 4, None, False, 2 if kind == "compute" else 1)
        words = {"compute": "compute 2 tiles of chunk 0", "copy": "copy from a peer"}.get(kind, name)
        parts.append(_box(mark, at, 12, words))
        at += _width(mark) + 6
        parts.append(f'<text x="{at}" y="16">{words}</text>')
        at += 6 * len(words) + 18
    return _svg("legend", at, 24, parts, False)


def _svg(label: str, width: float, height: int, parts: Sequence[str], style: bool) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" role="img" aria-label="{label}" '
        f'width="{width:g}" height="{height}" viewBox="0 0 {width:g} {height}">'
    )
    inside = f"<style>.plan{{color-scheme:light dark}}{STYLE}</style>" if style else ""
    return "".join([head, inside, *parts, "</svg>"])


def _middle(rank: int) -> int:
    return _TOP + _PITCH * rank + _PITCH // 2


def _draw_step(plans: Sequence[Plan], step: int, left: float) -> tuple[list[str], float]:
    """The elements of one step, whose column starts at `left`, and the end of the column."""
    pushed: dict[tuple[int, int], int] = {}
    pulled: dict[tuple[int, int], int] = {}
    for plan in plans:
        for action in plan.actions:
            if action.step == step:
                for source, dest, _ in plan.transfers(action):
                    over = pushed if source == plan.rank else pulled
                    over.setdefault((source, dest), _key(plan, action)[1])
    at = left + _PAD
    parts: list[str] = []
    if pulled:
        parts += _arrows(pulled, len(plans), at)
        at += _LANE
    boxes, end = [], at
    for plan in plans:
        x = at
        for mark in marks(plan, step):
            boxes.append(_box(mark, x, _middle(plan.rank), _describe(plan, mark)))
            x += _width(mark) + _GAP
        end = max(end, x)
    if pushed:
        parts += _arrows(pushed, len(plans), end)
        end += _LANE
    return parts + boxes, max(end, at + _UNIT) + _PAD - _GAP


def _width(mark: Mark) -> int:
    return 5 if mark.kind == "wait" else _UNIT + 6 * (min(mark.count, 8) - 1)


def _box(mark: Mark, x: float, middle: int, words: str) -> str:
    width, y = _width(mark), middle - _BOX // 2
    rect = f'<rect x="{x:g}" y="{y}" width="{width}" height="{_BOX}" rx="{2 if mark.kind == "wait" else 3}"/>'
    inside = rect
    if mark.kind != "wait":
        symbol = {"update": f"+{mark.chunk}", "reduce": "Σ"}.get(mark.kind, str(mark.chunk))
        # Lines between tiles, beside the number.
        for i in range(1, min(mark.count, 8)):
            inside += f'<path class="cut" d="M{x + _UNIT + 6 * (i - 1):g} {y + 3}v{_BOX - 6}"/>'
        inside += f'<text x="{x + _UNIT / 2:g}" y="{y + 13}">{symbol}</text>'
    colour = "" if mark.kind == "wait" else f" k{mark.chunk % 8}"
    return f'<g class="b {mark.kind}{colour}"><title>{words}</title>{inside}</g>'


def _describe(plan: Plan, mark: Mark) -> str:
    if mark.kind == "wait":
        return f"waits for {f'rank {mark.chunk}' if mark.count == 1 else f'{mark.count} peers'}"
    tiles = f"{mark.count} tile{'s' * (mark.count != 1)}"
    what = f"{KINDS[mark.kind]}: {tiles}" + (f" of chunk {mark.chunk}" if not plan.one_shot else "")
    if mark.peer is None:
        return what
    return f"{what} {'from' if mark.pulls else 'into'} rank {mark.peer}"


def _arrows(over: dict[tuple[int, int], int], world: int, left: float) -> list[str]:
    """The arrows of one step. If all ranks exchange with all, one line replaces the arrows."""
    start, end = left + 2, left + _LANE - 4
    if world > 2 and len(over) == world * (world - 1):
        middle = (start + end) / 2
        dots = "".join(f"M{middle - 3:g} {_middle(r)}h6" for r in range(world))
        return [f'<path class="a all" d="M{middle:g} {_middle(0)}V{_middle(world - 1)}{dots}"/>']
    found = []
    for (source, dest), chunk in over.items():
        # The arrow to a rank that is not drawn points down.
        a, b = _middle(min(source, world)), _middle(min(dest, world))
        turn = (start + end) / 2
        curve = f"M{start:g} {a}C{turn:g} {a} {turn:g} {b} {end:g} {b}m-4-3l4 3l-4 3"
        found.append(f'<path class="a k{chunk % 8}" d="{curve}"/>')
    return found
