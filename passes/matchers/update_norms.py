"""Values of no dims that are computed from norms of whole tensors, as LAMB scales an update by.

They are evaluated in symbols for the norms of the parameter and of the direction of its update, and with 0 in
place of one or both, so that conditions on norms are true or false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.passes.graph.follow import aten, is_reshape, prims, tensor

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
