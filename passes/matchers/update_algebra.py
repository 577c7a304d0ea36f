"""What pointwise nodes compute, as polynomials: whether they are the rule of an optimizer, and its numbers.

A polynomial is a dict from a product of atoms, in sorted order, to its coefficient, a number or a sympy
expression in symbols for tensors of no dims. Atoms: `g` the gradient, a leaf for each tensor that the
rule changes as it was, `new` ones for what it becomes, `R` the root of the new second moment, and `Q` for
1 / (a R + e), of which there is one. Norms of whole tensors are symbols in coefficients (`update_norms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from autofuse.passes.graph.follow import aten, prims, tensor

from .update_norms import NORMS, NotARule, Scalars, filled_with

Coefficient: TypeAlias = Any
"""float, or sympy.Expr."""

Polynomial: TypeAlias = dict[tuple[str, ...], Coefficient]

TOLERANCE = 1e-6
"""Of coefficients that a rule needs equal: several roundings of a float32."""


NARROW = (torch.bfloat16, torch.float16)
"""Dtypes besides float32 that a gradient and a parameter may have."""

_CASTS = {prims.convert_element_type.default: 0, aten.copy.default: 1}
"""Ops that may round, and which argument."""


def before_rounding(value: fx.Node) -> fx.Node:
    """What the new value of a parameter of 16 bits is rounded from; of others the value."""
    source = value.args[_CASTS[value.target]] if _is_rounded(value) else value
    return source if isinstance(source, fx.Node) else value


def _is_rounded(node: fx.Node) -> bool:
    val = tensor(node) if node.target in _CASTS else None
    return val is not None and val.dtype in NARROW


def number(value: Coefficient) -> Polynomial:
    return {(): value}


def atom(name: str) -> Polynomial:
    return {(name,): 1.0}


def plus(a: Polynomial, b: Polynomial, scale: Coefficient = 1.0) -> Polynomial:
    total = dict(a)
    for key, value in b.items():
        total[key] = total.get(key, 0.0) + value * scale
    return {key: value for key, value in total.items() if value != 0}


def times(a: Polynomial, b: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for key, value in a.items():
        total = plus(total, {tuple(sorted(key + other)): factor * value for other, factor in b.items()})
    return total


def constant(a: Polynomial) -> Coefficient | None:
    """The value of a polynomial without atoms."""
    return a.get((), 0.0) if a.keys() <= {()} else None


def equal(a: Coefficient, b: Coefficient) -> bool:
    """Whether coefficients are equal but for roundings; symbols must be the same."""
    terms, others = (sympy.expand(sympy.sympify(x)).as_coefficients_dict() for x in (a, b))
    pairs = [(float(terms[key]), float(others[key])) for key in {*terms, *others}]
    return all(abs(x - y) <= TOLERANCE * max(1e-30, abs(x), abs(y)) for x, y in pairs)


def computed(node: fx.Node, known: dict[fx.Node, str]) -> str:
    """A name of a value of no dims, equal for values that are computed alike from the same nodes: programs
    compute the same rate for every tensor. known: names of nodes above."""
    if node not in known:
        above = [tensor(n) for n in node.all_input_nodes]
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if is_pointwise and above and all(val is not None and not val.dim() for val in above):
            given = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{computed(n, known)}")
            known[node] = sha256(f"{node.target} {given}".encode()).hexdigest()[:16]
        else:
            known[node] = node.name
    return known[node]


@dataclass
class Algebra:
    """Evaluates nodes. known: nodes that are atoms. late: whether a node is computed from the sum.

    second: the atom of the new second moment. read: the atoms that have been read. norms: the symbols of the
    norm of the parameter and of the norm of its direction. measured: the atom of that parameter.
    """

    known: Mapping[fx.Node, str]
    late: Callable[[fx.Node], bool]
    second: str | None = None
    quotient: tuple[Coefficient, Coefficient] | None = None
    scalars: dict[str, fx.Node] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    norms: tuple[Coefficient, Coefficient] = NORMS
    squares: dict[fx.Node, int] = field(default_factory=dict)
    measured: str | None = None
    direction: Polynomial | None = None

    def of(self, value: object, root: bool = False) -> Polynomial:
        """Raises NotARule. root: `value` is what becomes of an atom, not the atom."""
        if isinstance(value, (int, float)):
            return number(float(value))
        if not isinstance(value, fx.Node):
            raise NotARule(f"{value!r} is no operand of a rule")
        if not root and value in self.known:
            self.read.add(self.known[value])
            return atom(self.known[value])
        val = tensor(value)
        if val is None:
            raise NotARule(f"{value.name} is a number that is not known")
        constant = filled_with(value)
        if constant is not None:
            return number(float(constant))
        if not val.dim():
            return number(self.scalar(value))
        rule = rule_of(value)
        if value.op != "call_function" or rule is None or val.dtype != torch.float32:
            raise NotARule(f"{value.name} is no step of a rule")
        return rule(self, *value.args, **value.kwargs)

    def scalar(self, node: fx.Node) -> Coefficient:
        """A tensor of no dims: a symbol, or computed from norms if that of the direction is among them."""
        if self.late(node):
            try:
                return Scalars(self.late, self.symbol, self._square).of(node)
            except (NotARule, TypeError, ValueError, RecursionError):
                pass  # sympy raises the former two for what has no order; long sums are deep
        return self.symbol(node)

    def symbol(self, node: fx.Node) -> Coefficient:
        symbol = sympy.Symbol(f"scalar_{computed(node, {})}", real=True)
        self.scalars[symbol.name] = node
        return symbol

    def _square(self, node: fx.Node, a: fx.Node, b: fx.Node) -> Coefficient:
        if node not in self.squares:
            self.squares[node] = self._squared(node, self.of(a), self.of(b))
        return self.norms[self.squares[node]] ** 2

    def _squared(self, node: fx.Node, a: Polynomial, b: Polynomial) -> int:
        """Which of `norms` the node is the square of, the sum of products of a and b."""
        leaf = next(iter(a))[0] if len(a) == 1 and next(iter(a)) else ""
        if a == b == atom(leaf) and leaf.startswith("old ") and self.measured in (None, leaf):
            self.measured = leaf
            return 0
        if a == b and any("Q" in key for key in a) and self.direction in (None, a):
            self.direction = a
            return 1
        raise NotARule(f"{node.name} is of a norm that no rule has")

    def root(self, a: object) -> Polynomial:
        of = self.of(a)
        scale = constant(of)
        if scale is not None:
            return number(sympy.sqrt(scale) if isinstance(scale, sympy.Expr) else math.sqrt(scale))
        if self.second is None or of.keys() != {(self.second,)}:
            raise NotARule("a root that is not of the second moment")
        return times(atom("R"), self.root_of(of[(self.second,)]))

    def root_of(self, value: Coefficient) -> Polynomial:
        if isinstance(value, sympy.Expr):
            return number(sympy.sqrt(value))
        if value <= 0:
            raise NotARule("the root of a negative multiple")
        return number(math.sqrt(value))

    def over(self, a: Polynomial, b: Polynomial) -> Polynomial:
        divisor = constant(b)
        if divisor is not None:
            if divisor == 0:
                raise NotARule("a division by 0")
            return times(a, number(1 / divisor))
        if not b.keys() <= {(), ("R",)}:
            raise NotARule("a division by what is no root of the second moment")
        if self.quotient is None:
            self.quotient = (b[("R",)], b.get((), 0.0))
        elif not all(map(equal, self.quotient, (b[("R",)], b.get((), 0.0)))):
            raise NotARule("two different divisions")
        return times(a, atom("Q"))


def _scaled(sign: float) -> Callable[..., Polynomial]:
    def evaluate(algebra: Algebra, a: object, b: object, alpha: object = 1) -> Polynomial:
        return plus(algebra.of(a), times(algebra.of(b), algebra.of(alpha)), sign)

    return evaluate


def _same(algebra: Algebra, a: object, *options: object, **more: object) -> Polynomial:
    return algebra.of(a)


def _chosen(algebra: Algebra, condition: object, a: object, b: object) -> Polynomial:
    """What torch 2.11 makes of lerp has a condition on the weight, a number."""
    constant = filled_with(condition)
    if constant is None:
        raise NotARule("a choice by the values of a tensor")
    return algebra.of(a if constant else b)


def _power(algebra: Algebra, a: object, exponent: object) -> Polynomial:
    if exponent == 0.5:
        return algebra.root(a)
    if exponent != 2:
        raise NotARule(f"a power of {exponent}")
    return times(algebra.of(a), algebra.of(a))


def _addcmul(algebra: Algebra, a: object, b: object, c: object, value: object = 1) -> Polynomial:
    product = times(algebra.of(b), algebra.of(c))
    return plus(algebra.of(a), times(product, algebra.of(value)))


def _addcdiv(algebra: Algebra, a: object, b: object, c: object, value: object = 1) -> Polynomial:
    quotient = algebra.over(algebra.of(b), algebra.of(c))
    return plus(algebra.of(a), times(quotient, algebra.of(value)))


def _lerp(algebra: Algebra, a: object, b: object, weight: object) -> Polynomial:
    start = algebra.of(a)
    return plus(start, times(plus(algebra.of(b), start, -1.0), algebra.of(weight)))


_RULES: dict[object, Callable[..., Polynomial]] = {
    aten.add.Tensor: _scaled(1.0),
    aten.add.Scalar: _scaled(1.0),
    aten.sub.Tensor: _scaled(-1.0),
    aten.sub.Scalar: _scaled(-1.0),
    aten.mul.Tensor: lambda algebra, a, b: times(algebra.of(a), algebra.of(b)),
    aten.mul.Scalar: lambda algebra, a, b: times(algebra.of(a), algebra.of(b)),
    aten.div.Tensor: lambda algebra, a, b: algebra.over(algebra.of(a), algebra.of(b)),
    aten.div.Scalar: lambda algebra, a, b: algebra.over(algebra.of(a), algebra.of(b)),
    aten.neg.default: lambda algebra, a: times(algebra.of(a), number(-1.0)),
    aten.reciprocal.default: lambda algebra, a: algebra.over(number(1.0), algebra.of(a)),
    aten.square.default: lambda algebra, a: times(algebra.of(a), algebra.of(a)),
    aten.sqrt.default: lambda algebra, a: algebra.root(a),
    aten.pow.Tensor_Scalar: _power,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Scalar: _lerp,
    aten.where.self: _chosen,
    aten.copy.default: lambda algebra, a, b: algebra.of(b),
    prims.convert_element_type.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
}
"""What pointwise ops compute of their arguments."""


def _fma(algebra: Algebra, a: object, b: object, c: object) -> Polynomial:
    return plus(times(algebra.of(a), algebra.of(b)), algebra.of(c))


def rule_of(node: fx.Node) -> Callable[..., Polynomial] | None:
    """What the op of a node computes; None if no update has it. Inductor defines its fma late, so that it is
    known by name. What is rounded to 16 bits is a value of its own."""
    if _is_rounded(node):
        return None
    return _fma if str(node.target) == "prims.fma.default" else _RULES.get(node.target)
