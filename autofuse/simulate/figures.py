"""Pictures of simulations as SVG: bars and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

STYLE = """\
.figure{font:11px ui-sans-serif,system-ui,sans-serif;color-scheme:light dark}
.figure text{fill:light-dark(#4a5260,#a9b2c0)}.figure .axis{stroke:light-dark(#e3e6eb,#2b323d)}
.figure .k0{fill:light-dark(#2f62c9,#7fa8f8)}.figure .k1{fill:light-dark(#b24a12,#e8986a)}
.figure .k2{fill:light-dark(#23784a,#6fc795)}.figure .k3{fill:light-dark(#7a48b8,#bd9bea)}
.figure .k4{fill:light-dark(#a92f66,#e88bb2)}.figure .k5{fill:light-dark(#0d7583,#5fc3cf)}
.figure polyline{fill:none;stroke-width:1.2}.figure .l0{stroke:light-dark(#2f62c9,#7fa8f8)}
.figure .l1{stroke:light-dark(#b24a12,#e8986a)}.figure .l2{stroke:light-dark(#23784a,#6fc795)}
"""
_LEFT, _TOP, _HEIGHT, _BAR = 60, 44, 220, 14


def bars(title: str, unit: str, groups: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Stacked bars: a group has bars, a bar has parts by name. Parts with one name have one colour."""
    names = list(dict.fromkeys(name for stack in groups.values() for bar in stack for name in bar))
    largest = max(sum(bar.values()) for stack in groups.values() for bar in stack) or 1.0
    parts, at = _frame(title, unit, names, largest), _LEFT + 8.0
    bottom = _TOP + _HEIGHT
    for label, stack in groups.items():
        middle = at + _BAR * len(stack) / 2
        for bar in stack:
            y = float(bottom)
            for name, value in bar.items():
                height = value / largest * _HEIGHT
                y -= height
                box = f'<rect class="k{names.index(name) % 6}" x="{at:g}" y="{y:.1f}"'
                words = escape(f"{label}: {name} {value:.4g} {unit}")
                parts.append(f'{box} width="{_BAR - 2}" height="{height:.1f}"><title>{words}</title></rect>')
            at += _BAR
        turned = f'transform="rotate(-50 {middle:g} {bottom + 14})" text-anchor="end"'
        parts.append(f'<text x="{middle:g}" y="{bottom + 14}" {turned}>{escape(label)}</text>')
        at += 10
    return _svg(title, at + 10, bottom + 120, parts)


def curves(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]], along: str) -> str:
    """Lines through points `(x, y)`."""
    largest = max((y for line in lines.values() for _, y in line), default=1.0) or 1.0
    longest = max((x for line in lines.values() for x, _ in line), default=1.0) or 1.0
    width, bottom = 900, _TOP + _HEIGHT
    parts = _frame(title, unit, list(lines), largest, width)
    for i, line in enumerate(lines.values()):
        points = " ".join(
            f"{_LEFT + x / longest * width:.1f},{bottom - y / largest * _HEIGHT:.1f}" for x, y in line
        )
        parts.append(f'<polyline class="l{i % 3}" points="{points}"/>')
    parts.append(
        f'<text x="{_LEFT + width}" y="{bottom + 16}" text-anchor="end">{longest:.4g} {along}</text>'
    )
    return _svg(title, _LEFT + width + 20, bottom + 30, parts)


def thinned(points: Sequence[tuple[float, float]], most: int = 600) -> list[tuple[float, float]]:
    """The largest value of every part of the time, for at most so many parts."""
    if not points:
        return []
    end = points[-1][0] or 1.0
    found: dict[int, float] = {}
    for x, y in points:
        part = min(most - 1, int(x / end * most))
        found[part] = max(y, found.get(part, 0.0))
    return [(part * end / most, y) for part, y in sorted(found.items())]


def _frame(title: str, unit: str, names: Sequence[str], largest: float, width: int = 0) -> list[str]:
    parts = [f'<text x="0" y="12">{escape(title)}</text>']
    at = float(_LEFT)
    for i, name in enumerate(names):
        parts.append(f'<rect class="k{i % 6}" x="{at:g}" y="20" width="10" height="10"/>')
        parts.append(f'<text x="{at + 14:g}" y="29">{escape(name)}</text>')
        at += 34 + 6 * len(name)
    for i in range(5):
        y = _TOP + _HEIGHT * (1 - i / 4)
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:g}" text-anchor="end">{_number(largest * i / 4)}</text>'
        )
        if width:
            parts.append(f'<path class="axis" d="M{_LEFT} {y:g}h{width}"/>')
    parts.append(f'<text x="0" y="{_TOP - 6}">{escape(unit)}</text>')
    return parts


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" '
        f'aria-label="{escape(title, quote=True)}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )
