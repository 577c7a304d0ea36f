"""For which sizes a difference is positive: `s0 >= 384`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

LARGEST = 1 << 20
"""Stands for the end of a range that has none."""

MOST_SAMPLES = 512
"""Bounds the time: piecewise linear formulas take less than a hundred, others may take more."""


@dataclass(frozen=True)
class Known:
    """What is known of a symbol: every value is in `[least, most]`; `hint`, the one while tracing, may differ
    from rank to rank."""

    least: int
    most: int
    hint: int | None


Sample: TypeAlias = tuple[float, tuple[bool, ...]]
Gain: TypeAlias = Callable[[Mapping[sympy.Symbol, int]], Sample]
"""The difference at given values of the symbols, and which way every branch of its formula went there."""


def wins(gain: Gain, symbols: Mapping[sympy.Symbol, Known]) -> str:
    """Where `gain` is positive: `always`, `never`, or a condition in the symbols.

    One symbol: exact if the formula is linear in it between two values with the same branches. Several:
    `always` and `never` are what samples over all their ranges say; a condition is for the first symbol, with
    the others at their hints, and says so.
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
    ranges = _positive(known.least, last, sample)
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


def _positive(first: int, last: int, sample: Callable[[int], Sample]) -> list[tuple[int, int]]:
    """The ranges of integers in `[first, last]` where the sample is positive."""
    at = {first: sample(first), last: sample(last)}
    work, found = [(first, last)], []
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
    """Ranges in ascending order, with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and start <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _samples(symbols: Mapping[sympy.Symbol, Known]) -> list[dict[sympy.Symbol, int]]:
    """Values over all ranges together: their ends, and powers of 8 between as far as there is room."""
    ends = [(k.least, min(k.most, max(LARGEST, k.least))) for k in symbols.values()]
    inner = [[x for x in (8, 64, 512, 4096, 32768) if a < x < b] for a, b in ends]
    grids = [sorted({a, *between, b}) for (a, b), between in zip(ends, inner, strict=True)]
    if _count(grids) > MOST_SAMPLES:
        grids = [sorted(set(pair)) for pair in ends]
    values = itertools.islice(itertools.product(*grids), MOST_SAMPLES)
    return [dict(zip(symbols, point, strict=True)) for point in values]


def _count(grids: Sequence[Sequence[int]]) -> int:
    count = 1
    for grid in grids:
        count *= len(grid)
    return count
