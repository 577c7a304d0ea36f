"""The factor by which clipping scales gradients: a function of the norm of all of them.

    factor = scale * min(most, bound / (max(norm, floor) + eps))

It is evaluated in symbols for the squares of the norms of gradients (`update_norms.Scalars`), then read off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
from torch import fx

from .update_algebra import Algebra, Coefficient
from .update_norms import NotARule, Scalars, joined_of, steps_in_order

N = sympy.Symbol("|g|", positive=True)
"""The norm of all gradients of a group."""

Limits: TypeAlias = tuple[Coefficient, Coefficient, Coefficient, Coefficient]
"""bound, eps, floor, most (`lowering.update_rules.factor`)."""


@dataclass
class Norms:
    """Sums of squares of gradients that the graph has.

    gradients: by the nodes that hold some, their numbers. late: whether a node is computed from one.
    """

    gradients: Mapping[fx.Node, tuple[int, ...]]
    late: Callable[[fx.Node], bool]
    scalars: dict[str, fx.Node] = field(default_factory=dict)
    squares: dict[fx.Node, dict[int, Coefficient]] = field(default_factory=dict)
    """By node: multiples of the squares that it is the sum of."""

    def __post_init__(self) -> None:
        self._values = Scalars(self.late, self._symbol, self._square)
        self._clips: dict[sympy.Expr, tuple[Coefficient, Limits, set[int]]] = {}
        self._atoms = {node: str(held) for node, held in self.gradients.items()}
        self._held = {str(held): held for held in self.gradients.values()}
        self._names = {square_of(i): i for held in self.gradients.values() for i in held}

    def clip(
        self, factor: sympy.Expr, scalars: Mapping[str, fx.Node]
    ) -> tuple[Coefficient, Limits, set[int]]:
        """The scale, the limits, and the gradients whose norm it is. Raises NotARule."""
        if factor not in self._clips:
            self._clips[factor] = self._clip(factor, scalars)
        return self._clips[factor]

    def _clip(
        self, factor: sympy.Expr, scalars: Mapping[str, fx.Node]
    ) -> tuple[Coefficient, Limits, set[int]]:
        values = {}
        for symbol in factor.free_symbols:
            node = scalars[symbol.name]
            for step in steps_in_order(node):
                self._values.of(step)
            values[symbol] = self._values.of(node)
        return _read_off(factor.xreplace(values), self._names)

    def _symbol(self, node: fx.Node) -> sympy.Symbol:
        symbol = sympy.Symbol(f"scalar_{node.name}", real=True)
        self.scalars[symbol.name] = node
        return symbol

    def _square(self, node: fx.Node, a: fx.Node, b: fx.Node) -> sympy.Expr:
        if not self.late(node):
            return self._symbol(node)
        first, second = self._multiples(a), self._multiples(b)
        if first != second:
            raise NotARule(f"{node.name} is no sum of squares of gradients")
        self.squares[node] = {i: by**2 for i, by in first.items()}
        return sympy.Add(*(by * square_of(i) for i, by in self.squares[node].items()))

    def _multiples(self, node: fx.Node) -> dict[int, Coefficient]:
        """The gradients that a node has all elements of, and by what they are multiplied."""
        found: dict[int, Coefficient] = {}
        for part in joined_of(node):
            of = Algebra(self._atoms, self.late, scalars=self.scalars).of(part)
            ((key, by),) = of.items() if len(of) == 1 else (((), 0.0),)
            held = self._held.get(key[0], ()) if len(key) == 1 else ()
            if not held or found.keys() & {*held}:
                raise NotARule(f"{part.name} is no multiple of one gradient")
            found |= dict.fromkeys(held, by)
        return found


def square_of(gradient: int) -> sympy.Symbol:
    """What stands for the square of its norm."""
    return sympy.Symbol(f"|g{gradient}|^2", positive=True)


def _read_off(factor: sympy.Expr, names: Mapping[sympy.Symbol, int]) -> tuple[Coefficient, Limits, set[int]]:
    """As `Norms.clip`, of a factor in squares; names: the gradient of each."""
    powers = [p for p in factor.atoms(sympy.Pow) if abs(p.exp) == sympy.S.Half]
    roots = {p.base for p in powers if names.keys() & p.base.free_symbols}
    if len(roots) != 1:
        raise NotARule("a factor that is not by one norm")
    (root,) = roots
    terms: dict[sympy.Symbol, sympy.Expr] = {}
    for term in sympy.Add.make_args(sympy.expand(root)):
        squares = term.free_symbols & names.keys()
        if len(squares) != 1 or squares <= terms.keys():
            raise NotARule("a norm of more than gradients")
        (square,) = squares
        terms[square] = term / square
    weights = {*terms.values()}
    if len(weights) != 1 or any(by.has(*names) for by in weights):
        raise NotARule("a norm of different multiples of gradients")
    norm = N * sympy.sqrt(weights.pop())
    factor = factor.xreplace({sympy.sqrt(root): norm, 1 / sympy.sqrt(root): 1 / norm})
    if factor.free_symbols & names.keys():
        raise NotARule("a factor by norms of single gradients")
    scale, limits = _limits(factor)
    return scale, limits, {names[x] for x in terms}


def _limits(factor: sympy.Expr) -> tuple[Coefficient, Limits]:
    scale, least = factor.as_independent(N, as_Add=False)
    most, ratio = sympy.oo, least
    if isinstance(ratio, sympy.Max) and sympy.S.Zero in ratio.args:
        ratio = sympy.Max(*(a for a in ratio.args if a != 0))  # a factor is positive
    if isinstance(ratio, sympy.Min):
        free = [a for a in ratio.args if not a.has(N)]
        bound_by = [a for a in ratio.args if a.has(N)]
        _need(len(bound_by) == 1, factor)
        most, ratio = sympy.Min(*free), bound_by[0]
    bound, inverse = ratio.as_independent(N, as_Add=False)
    eps, rest = (1 / inverse).as_independent(N, as_Add=True)
    by, norm = rest.as_independent(N, as_Add=False)
    floor: Any = sympy.S.Zero
    if isinstance(norm, sympy.Max):
        floor = sympy.Max(*(a for a in norm.args if not a.has(N)))
        within, norm = sympy.Add(*(a for a in norm.args if a.has(N))).as_independent(N, as_Add=False)
        by, floor = by * within, floor / within
    _need(norm == N and not any(x.has(N) for x in (bound, eps, by, floor, most)), factor)
    return scale, (bound / by, eps / by, floor, most)


def _need(holds: bool, factor: sympy.Expr) -> None:
    if not holds:
        raise NotARule(f"a factor of {factor}")
