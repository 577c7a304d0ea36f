"""Sizes with symbols at given values of these.

Ranks that slice `s` rows have sizes such as `(s + 1) // 2` and `s - (s + 1) // 2`. The collective needs equal
slices, so that `s` is a multiple of 2. Other values are rounded up to a multiple. There the sizes of all
ranks are equal, and so are decisions that rest on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

import sympy

from autofuse.lowering.torch_internals import floor_division
from autofuse.passes.graph.layout import Size

Values: TypeAlias = "Mapping[sympy.Symbol, int]"


class Sized(Protocol):
    """What has sizes: a task, a cluster."""

    @property
    def sizes(self) -> tuple[Size, ...]: ...
    def map(self, f: Callable[[Size], Size]) -> Any: ...


T = TypeVar("T", bound=Sized)


def at_values(sized: T, values: Values) -> T:
    """`sized` with all sizes as numbers. A symbol that is divided is rounded up to a multiple of its divisor.
    A symbol that divides is at least 1."""
    divisors = _divisors(frozenset(size for size in sized.sizes if isinstance(size, sympy.Expr)))
    values = {
        s: max(1, -(-v // divisors[s])) * divisors[s] if s in divisors else v for s, v in values.items()
    }
    found: T = sized.map(lambda size: evaluate(size, values))
    return found


@functools.lru_cache(maxsize=1024)
def _divisors(sizes: frozenset[sympy.Expr]) -> dict[sympy.Symbol, int]:
    """By symbol of the floor divisions in `sizes`: the symbol is rounded up to a multiple of this number.

    The number is the least common multiple of all integers that divide terms in which this symbol is the only
    one. It is 1 for a symbol that only stands in divisors.
    """
    found: dict[sympy.Symbol, int] = {}
    for function in {atom for size in sizes for atom in size.atoms(sympy.Function)}:
        division = floor_division(function)
        if division is None:
            continue
        divided, by = division
        found |= {symbol: found.get(symbol, 1) for symbol in by.free_symbols}
        if by.is_Integer and len(divided.free_symbols) == 1:
            (symbol,) = divided.free_symbols
            found[symbol] = math.lcm(found.get(symbol, 1), int(by))
    return found


def evaluate(size: Size, values: Values) -> int:
    """The size at the given values of its symbols. Products and sums, the usual case, are fast."""
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Symbol):
        return values[size]
    if isinstance(size, sympy.Integer):
        return int(size)
    if isinstance(size, sympy.Mul):
        total = 1
        for part in size.args:
            if not (part.is_Integer or part.is_Symbol or part.is_Add):
                break  # a fraction or a power
            total *= evaluate(part, values)
        else:
            return total
    if isinstance(size, sympy.Add):
        return sum(evaluate(part, values) for part in size.args)
    return int(size.xreplace({symbol: sympy.Integer(values[symbol]) for symbol in size.free_symbols}))
