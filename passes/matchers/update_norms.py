"""Values of no dims that are computed from norms of whole tensors, as LAMB and clipping scale an update by.

They are evaluated in symbols. LAMB has those of the norms of the parameter and of the direction of its
update, and 0 in place of one or both, so that conditions on norms are true or false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.passes.graph.follow import aten, is_reshape, prims, tensor


class NotARule(Exception):
    """The nodes compute something else."""


P, U = sympy.Symbol("|p|", positive=True), sympy.Symbol("|u|", positive=True)
"""The norms of the parameter and of its direction."""

NORMS = (P, U)
_NO = sympy.S.Zero
ZEROS = ((_NO, U), (P, _NO), (_NO, _NO))
"""What stands for the norms, where none is 0, and where some are."""

Sums = (aten.sum.default, aten.sum.dim_IntList)
_WIDE = (torch.float32, torch.float64)


def squared(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The factors of whose products `node` is the sum over all elements, in float32 or float64."""
    total = tensor(node)
    if node.target not in Sums or total is None or total.dim() or total.dtype not in _WIDE:
        return None
    product = _same_elements(node.args[0])
    val = tensor(product)
    if val is None or val.dtype not in _WIDE:
        return None
    if product.target is aten.mul.Tensor:
        factors = product.args
    elif product.target is aten.pow.Tensor_Scalar and product.args[1] == 2:
        factors = (product.args[0],) * 2
    else:
        return None
    if not all(isinstance(f, fx.Node) for f in factors):
        return None
    a, b = (_same_elements(f) for f in factors)
    return a, b


def _same_elements(node: fx.Node) -> fx.Node:
    """What the node is a reshape of, or the same in float64."""
    while is_reshape(node) or (
        node.target is prims.convert_element_type.default and node.args[1] == torch.float64
    ):
        node = node.args[0]
    return node


def step_of(node: fx.Node) -> Callable[..., Any] | None:
    """What the node computes of its arguments, as sympy has it; None if it is none of a value of no dims."""
    val = tensor(node)
    if val is None or val.dim() or val.dtype not in (*_WIDE, torch.bool):
        return None
    return _fma if str(node.target) == "prims.fma.default" else _STEPS.get(node.target)


def leads_to_norms(node: fx.Node) -> bool:
    """Whether the node may lie between a tensor and what is computed from its norm."""
    val = tensor(node)
    return step_of(node) is not None or is_reshape(node) or (node.target in Sums and val is not None)


def filled_with(node: object) -> int | float | bool | None:
    """The value of a tensor that is filled with one number."""
    filled = isinstance(node, fx.Node) and node.target is aten.full.default
    found = node.args[1] if filled and isinstance(node, fx.Node) else None
    return found if isinstance(found, (int, float)) else None


@dataclass
class Scalars:
    """Evaluates values of no dims. Raises NotARule, or an error of sympy.

    late: whether a node is computed from the sum. symbol: what stands for a value that is not looked into.
    square: what stands for the sum of products of two nodes over all elements.
    """

    late: Callable[[fx.Node], bool]
    symbol: Callable[[fx.Node], Any]
    square: Callable[[fx.Node, fx.Node, fx.Node], Any]
    known: dict[fx.Node, Any] = field(default_factory=dict)
    reading: dict[fx.Node, bool] = field(default_factory=dict)

    def of(self, value: object) -> Any:
        if not isinstance(value, fx.Node):
            return sympy.sympify(value) if isinstance(value, (bool, int, float)) else value
        if value not in self.known:
            self.known[value] = self._of(value)
        return self.known[value]

    def _of(self, node: fx.Node) -> Any:
        filled = filled_with(node)
        if filled is not None:
            return sympy.sympify(filled)
        factors = squared(node)
        if factors is not None:
            listed = [_listed(f) for f in factors]
            if None in listed:
                return self.square(node, *factors)
            return sympy.Add(*(self.of(a) * self.of(b) for a, b in zip(*listed, strict=True)))
        added = _listed(_same_elements(node.args[0])) if node.target in Sums else None
        if added is not None:
            return sympy.Add(*map(self.of, added))
        step = step_of(node)
        if not self.late(node) and not self._reads_norms(node):
            return self.symbol(node)
        if step is None:
            raise NotARule(f"{node.name} is computed from what is reduced")
        return step(*map(self.of, node.args), **node.kwargs)

    def _reads_norms(self, node: fx.Node) -> bool:
        """Whether a value of no dims is computed from a sum of squares."""
        if node not in self.reading:
            above = squared(node) is not None or (
                step_of(node) is not None and any(map(self._reads_norms, node.all_input_nodes))
            )
            self.reading[node] = above
        return self.reading[node]


def steps_in_order(node: fx.Node) -> list[fx.Node]:
    """The node and all values of no dims that it is computed from, down from sums of squares: `Scalars` knows
    the inputs of each before it comes to it, so that no chain is too deep."""
    found: set[fx.Node] = set()
    work = [node]
    while work:
        above = work.pop()
        if above in found:
            continue
        found.add(above)
        factors = squared(above)
        if factors is None or _listed(factors[0]) is not None:
            work += (n for n in above.all_input_nodes if leads_to_norms(n) or n.target is aten.cat.default)
    return sorted(n for n in found if (val := tensor(n)) is not None and not val.dim())


def joined_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node has all elements of."""
    parts = node.args[0] if node.target is aten.cat.default else [node]
    return [_same_elements(part) for part in parts]


def _listed(joined: fx.Node) -> list[fx.Node] | None:
    """The values of no dims that a vector is joined of."""
    found = joined_of(joined)
    return found if all((val := tensor(n)) is not None and not val.dim() for n in found) else None


def _fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def _where(condition: Any, a: Any, b: Any) -> Any:
    if condition not in (sympy.true, sympy.false):
        raise ValueError(f"{condition} is not known")
    return a if condition == sympy.true else b


def _plus(sign: int) -> Callable[..., Any]:
    return lambda a, b, alpha=1: a + sign * alpha * b


def _power(a: Any, exponent: Any) -> Any:
    return a ** sympy.Rational(exponent)


_STEPS: dict[object, Callable[..., Any]] = {
    aten.add.Tensor: _plus(1),
    aten.sub.Tensor: _plus(-1),
    aten.mul.Tensor: lambda a, b: a * b,
    aten.div.Tensor: lambda a, b: a / b,
    aten.neg.default: lambda a: -a,
    aten.reciprocal.default: lambda a: 1 / a,
    aten.sqrt.default: sympy.sqrt,
    aten.pow.Tensor_Scalar: _power,
    aten.maximum.default: sympy.Max,
    aten.minimum.default: sympy.Min,
    aten.clamp_min.default: sympy.Max,
    aten.clamp_max.default: sympy.Min,
    aten.where.self: _where,
    aten.bitwise_and.Tensor: sympy.And,
    aten.bitwise_or.Tensor: sympy.Or,
    aten.bitwise_not.default: sympy.Not,
    aten.logical_and.default: sympy.And,
    aten.logical_or.default: sympy.Or,
    aten.logical_not.default: sympy.Not,
    prims.convert_element_type.default: lambda a, dtype: a,
    aten.clone.default: lambda a, **options: a,
    aten.alias.default: lambda a: a,
    aten.detach.default: lambda a: a,
}
for _name, _relation in (
    ("gt", sympy.Gt),
    ("ge", sympy.Ge),
    ("lt", sympy.Lt),
    ("le", sympy.Le),
    ("eq", sympy.Eq),
    ("ne", sympy.Ne),
):
    _packet = getattr(aten, _name)
    _STEPS |= {_packet.Scalar: _relation, _packet.Tensor: _relation}
