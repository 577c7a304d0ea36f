"""The plan shape of a fused op in a graph: the values that its executor makes plans from."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch import fx

from autofuse.lowering.orders import PlanShape
from autofuse.lowering.torch_internals import group_size

from .graph.anchors import fused_op
from .graph.follow import expression, value
from .graph.functional import arguments


class _DependsOnData(Exception):
    """A size had no value while the graph was traced."""


def plan_shape(node: fx.Node, hints: Mapping[sympy.Symbol, int]) -> PlanShape | None:
    """The shape of the plans at the sizes seen while tracing.

    None if `node` is not a fused op, or if a size that the plans depend on depends on data.
    """
    op = fused_op(node)
    given = None if op is None else arguments(node)
    if op is None or given is None:
        return None
    values = list(given.values())
    if op.plan_shape is None:
        group, order, _ = values[-3:]
        return PlanShape.of_any_size(op.name, order, group_size(group))
    try:
        concrete = fx.node.map_aggregate(fx.node.map_arg(values, value), lambda v: _concrete(v, hints))
        return op.plan_shape(op.parse(tuple(concrete)))
    except _DependsOnData:
        return None


def _concrete(value: object, hints: Mapping[sympy.Symbol, int]) -> object:
    """A tensor as one on the device meta, a size as a number; another value as it is."""
    if isinstance(value, torch.Tensor):
        shape = [_number(size, hints) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    return _number(value, hints) if isinstance(value, torch.SymInt) else value


def _number(size: int | torch.SymInt, hints: Mapping[sympy.Symbol, int]) -> int:
    known = sympy.sympify(expression(size)).subs(hints)
    if not known.is_number:
        raise _DependsOnData
    return int(known)
