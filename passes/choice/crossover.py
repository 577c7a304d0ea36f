"""Finds the sizes at which a difference is positive: `s0 >= 384`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

LARGEST = 1 << 20
"""Takes the place of the upper end of an unbounded range."""

BETWEEN = (8, 64, 512, 4096, 32768)
"""Values that are looked at between the ends of a range, whatever the formula is."""

MOST_SAMPLES = 512
"""Bounds the time. Piecewise linear formulas need less than a hundred samples."""


@dataclass(frozen=True)
class Known:
    """The range `[least, most]` of a symbol. `hint`, its value while tracing, may differ between ranks."""

    least: int
    most: int
    hint: int | None


Sample: TypeAlias = tuple[float, tuple[bool, ...]]
Gain: TypeAlias = Callable[[Mapping[sympy.Symbol, int]], Sample]
"""The difference at given values of the symbols, and the branches that its formula took."""


def wins(gain: Gain, symbols: Mapping[sympy.Symbol, Known]) -> str:
    """Where `gain` is positive: `always`, `never`, or a condition in the symbols.

    With one symbol, the result is exact if the formula is linear between two values with the same branches.
    Of other formulas the signs at the ends of the range and at `BETWEEN` count.
    With several symbols, samples over all ranges decide between `always`, `never` and a condition. The
    condition is for the first symbol; its text names the values, the hints, of the other symbols.
    """
    if not symbols:
        return "always" if gain({})[0] > 0 else "never"
    if len(symbols) == 1:
        ((symbol, known),) = symbols.items()
        return _condition(symbol, known, lambda value: gain({symbol: value}))
    signs = {gain(values)[0] > 0 for values in _samples(symbols)}
    if len(signs) == 1:
        return "always" if signs.pop() else "never"
    (symbol, known), *others = sorted(symbols.items(), key=lambda item: str(item[0]))
    fixed = {other: k.least if k.hint is None else k.hint for other, k in others}
    found = _condition(symbol, known, lambda value: gain({symbol: value, **fixed}))
    return f"{found} at {', '.join(f'{other} = {value}' for other, value in fixed.items())}"


def _condition(symbol: sympy.Symbol, known: Known, sample: Callable[[int], Sample]) -> str:
    last = min(known.most, max(LARGEST, known.least))
    ranges = _positive(_grid(known.least, last), sample)
    if not ranges:
        return "never"
    if ranges == [(known.least, last)]:
        return "always"
    return " or ".join(_range(symbol, a, b, known.least, last) for a, b in ranges)


def _range(symbol: sympy.Symbol, start: int, stop: int, least: int, last: int) -> str:
    if start == stop:
        return f"{symbol} == {start}"
    if stop == last:
        return f"{symbol} >= {start}"
    return f"{symbol} <= {stop}" if start == least else f"{start} <= {symbol} <= {stop}"


def _grid(first: int, last: int) -> list[int]:
    return sorted({first, *(x for x in BETWEEN if first < x < last), last})


def _positive(grid: Sequence[int], sample: Callable[[int], Sample]) -> list[tuple[int, int]]:
    """The ranges of integers from the first of a grid to the last where the sample is positive."""
    at = {value: sample(value) for value in grid}
    work = [*itertools.pairwise(grid)][::-1] or [(grid[0], grid[0])]
    found: list[tuple[int, int]] = []
    while work:
        a, b = work.pop()
        up, down = at[a][0] > 0, at[b][0] > 0
        if b - a > 1 and (up != down or at[a][1] != at[b][1]) and len(at) < MOST_SAMPLES:
            middle = (a + b) // 2
            at[middle] = sample(middle)
            work += [(middle, b), (a, middle)]
        elif up and down:
            found.append((a, b))
        else:
            found += [(x, x) for x, positive in ((a, up), (b, down)) if positive]
    return _joined(found)


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in ascending order, with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and start <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _samples(symbols: Mapping[sympy.Symbol, Known]) -> list[dict[sympy.Symbol, int]]:
    """Combinations of values of all symbols: the ends of the ranges and, up to a limit, powers of 8
    between."""
    ends = [(k.least, min(k.most, max(LARGEST, k.least))) for k in symbols.values()]
    grids = [_grid(a, b) for a, b in ends]
    if _count(grids) > MOST_SAMPLES:
        grids = [sorted(set(pair)) for pair in ends]
    values = itertools.islice(itertools.product(*grids), MOST_SAMPLES)
    return [dict(zip(symbols, point, strict=True)) for point in values]


def _count(grids: Sequence[Sequence[int]]) -> int:
    count = 1
    for grid in grids:
        count *= len(grid)
    return count
