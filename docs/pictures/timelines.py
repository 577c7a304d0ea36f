"""Draws the timelines of docs/gpu*.md: an SVG beside every text in docs/pictures/timelines.

python docs/pictures/timelines.py

A text has lanes by rank, then arrows from cause to effect:

    # title
    [rank 0]
    key: name of the lane
        begin end kind label
    [arrows]
    key time > key time

Time goes from left to right in hundredths of the picture. Lengths show order and overlap, not measurements.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_suffix("")

WIDTH, LEFT, RIGHT, TOP = 1000, 212, 14, 34
UNIT = (WIDTH - LEFT - RIGHT) / 100
GROUP_WIDTH = 66
BOX, GAP, GROUP_GAP, LEGEND = 40, 12, 10, 30
LINE, CHARACTER, PADDING, MOST_LINES = 11.5, 5.5, 5, 3
"""Of a label: height of a line and width of a character in pixels, and how many lines a box has room for."""

INK, FAINT, PAPER, BAND = "#1f2733", "#5b6675", "#ffffff", "#f4f6f9"

KINDS = {
    "multiply": ("#cfe0ff", "#2f62c9", "multiply, or pool rows"),
    "move": ("#ffdfbf", "#b24a12", "load, store, copy"),
    "wait": ("#ffffff", "#8a94a3", "wait"),
    "add": ("#cdeed7", "#23784a", "add"),
    "signal": ("#e6d8fa", "#7a48b8", "signal, count, credit"),
    "memory": ("#fff3bf", "#a08410", "memory holds"),
    "host": ("#dbe3ec", "#56616f", "host, copy stream"),
}
"""Of an interval: fill, outline, and what the legend says."""


@dataclass
class Lane:
    """One actor, such as a warp. intervals: begin, end, kind, label, in order."""

    name: str
    intervals: list[tuple[float, float, str, str]] = field(default_factory=list)


@dataclass
class Timeline:
    """lanes: by key; groups: a rank or the link, with the keys of its lanes; arrows: key, time, key, time."""

    title: str = ""
    lanes: dict[str, Lane] = field(default_factory=dict)
    groups: list[tuple[str, list[str]]] = field(default_factory=list)
    arrows: list[tuple[str, float, str, float]] = field(default_factory=list)


def parse(text: str) -> Timeline:
    """The timeline of a text. ValueError names a line that cannot be read."""
    found, lane = Timeline(), Lane("")
    for line in filter(str.strip, text.splitlines()):
        if title := re.fullmatch(r"# (.*)", line):
            found.title = title[1]
        elif group := re.fullmatch(r"\[(.*)\]", line):
            if group[1] != "arrows":
                found.groups.append((group[1], []))
        elif named := re.fullmatch(r"(\w+):(.*)", line):
            lane = found.lanes[named[1]] = Lane(named[2].strip())
            found.groups[-1][1].append(named[1])
        elif interval := re.fullmatch(r" +([\d.]+) ([\d.]+) (\w+) ?(.*)", line):
            lane.intervals.append((float(interval[1]), float(interval[2]), interval[3], interval[4]))
        elif arrow := re.fullmatch(r"(\w+) ([\d.]+) > (\w+) ([\d.]+)", line):
            found.arrows.append((arrow[1], float(arrow[2]), arrow[3], float(arrow[4])))
        else:
            raise ValueError(f"no line of a timeline: {line!r}")
    return found


def draw(timeline: Timeline) -> str:
    """The picture as SVG. ValueError where intervals of a lane overlap or a label has no room."""
    lanes, (tops, bottom) = timeline.lanes, _tops(timeline)
    used = {interval[2] for lane in lanes.values() for interval in lane.intervals}
    height = bottom + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(timeline.title)}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="10.5">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:g}" rx="6" fill="{PAPER}" stroke="#d5dae1"/>',
        _text(12, 21, timeline.title, size=13, bold=True),
        _text(WIDTH - RIGHT, 21, "time \N{RIGHTWARDS ARROW}", anchor="end", color=FAINT),
        *_bands(timeline, tops),
        *(_arrow(tops, *arrow) for arrow in timeline.arrows),
    ]
    for key, lane in lanes.items():
        parts.append(_text(GROUP_WIDTH + 14, tops[key] + BOX / 2 + 4, lane.name))
        parts += _boxes(key, lane, tops[key])
    parts += _legend([kind for kind in KINDS if kind in used], bottom + LEGEND / 2 + 3)
    return "\n".join([*parts, "</svg>\n"])


def _tops(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Where every lane begins, from the top, and where the last one ends."""
    tops, at = {}, float(TOP)
    for _, keys in timeline.groups:
        for key in keys:
            tops[key] = at + (GAP + GROUP_GAP) / 2
            at += BOX + GAP
        at += GROUP_GAP
    return tops, at


def _bands(timeline: Timeline, tops: dict[str, float]) -> Iterator[str]:
    """A band behind the lanes of every rank, with its name."""
    for name, keys in timeline.groups:
        top, height = tops[keys[0]] - GAP / 2, len(keys) * (BOX + GAP)
        yield f'<rect x="8" y="{top:g}" width="{WIDTH - 16}" height="{height}" rx="4" fill="{BAND}"/>'
        for i, word in enumerate(lines := textwrap.wrap(name, 9)):
            yield _text(16, top + height / 2 + 4 + (i - (len(lines) - 1) / 2) * LINE, word, bold=True)


def _boxes(key: str, lane: Lane, top: float) -> Iterator[str]:
    end_before = 0.0
    if len(lane.name) * CHARACTER > LEFT - GROUP_WIDTH - 16:
        raise ValueError(f"{key}: no room for {lane.name!r}")
    for begin, end, kind, label in lane.intervals:
        if not end_before <= begin < end <= 100:
            raise ValueError(f"{key}: {label!r} begins before the interval before it ends, or is outside")
        end_before = end
        x, width = LEFT + begin * UNIT, (end - begin) * UNIT - 1
        yield _rectangle(kind, x, top, width, BOX)
        lines = textwrap.wrap(label, max(1, int((width - PADDING) / CHARACTER)), break_long_words=False)
        if len(lines) > MOST_LINES or any(len(line) * CHARACTER > width - PADDING for line in lines):
            raise ValueError(f"{key}: no room for {label!r}: {lines}")
        for i, line in enumerate(lines):
            y = top + BOX / 2 + 4 + (i - (len(lines) - 1) / 2) * LINE
            yield _text(x + width / 2, y, line, anchor="middle")


def _arrow(tops: dict[str, float], source: str, begin: float, target: str, end: float) -> str:
    if begin > end:
        raise ValueError(f"an arrow goes back in time: {source} {begin:g} > {target} {end:g}")
    down = tops[target] > tops[source]
    y, to = tops[source] + BOX * down, tops[target] + (-1 if down else BOX + 1)
    x, x_to = LEFT + begin * UNIT, LEFT + end * UNIT
    return (
        f'<path d="M{x:.1f} {y:g}L{x_to:.1f} {to:g}" stroke="{FAINT}" stroke-width="1.3" fill="none" '
        'marker-end="url(#head)"/>'
    )


def _legend(kinds: list[str], y: float) -> Iterator[str]:
    x = 16.0
    for kind in kinds:
        yield _rectangle(kind, x, y - 9, 12, 12)
        yield _text(x + 17, y + 1, KINDS[kind][2], color=FAINT)
        x += 34 + len(KINDS[kind][2]) * CHARACTER


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    fill, outline, _ = KINDS[kind]
    dashes = ' stroke-dasharray="3 2"' if kind == "wait" else ""
    size = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="3"'
    return f'<rect {size} fill="{fill}" stroke="{outline}"{dashes}/>'


def _text(
    x: float, y: float, text: str, size: float = 0, bold: bool = False, anchor: str = "", color: str = INK
) -> str:
    style = f' font-size="{size:g}"' if size else ""
    style += ' font-weight="bold"' if bold else ""
    style += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{style}>{escape(text)}</text>'


def pictures() -> dict[Path, str]:
    """The SVG of every timeline, by the file that it is in."""
    texts = sorted(FOLDER.glob("*.txt"))
    return {path.with_suffix(".svg"): draw(parse(path.read_text())) for path in texts}


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
