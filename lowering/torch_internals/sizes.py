"""Sizes of a graph that are symbols."""

import sys
from typing import Any

import sympy
import torch
from torch import fx


def size_hint(size: int | torch.SymInt, unbacked: int) -> int:
    """The value of `size` while tracing, with `unbacked` for symbols without a value."""
    if isinstance(size, int):
        return size
    expr = size.node.shape_env.replace(size.node.expr).xreplace(symbol_hints(size))
    return int(expr.xreplace(dict.fromkeys(expr.free_symbols, sympy.Integer(unbacked))))


def seen_size(size: int | torch.SymInt) -> int | None:
    """The value of `size` while tracing; None if it depends on data."""
    if isinstance(size, torch.SymInt):
        expr = size.node.shape_env.replace(size.node.expr)
        if not expr.free_symbols <= symbol_hints(size).keys():
            return None
    return size_hint(size, 0)


def symbol_hints(size: torch.SymInt) -> dict[sympy.Symbol, Any]:
    """The values of the symbols of a graph while it was traced."""
    shape_env = size.node.shape_env
    # torch 2.11 calls it var_to_val, later releases backed_var_to_val.
    name = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    return dict(getattr(shape_env, name))


def floor_divide(a: sympy.Expr, b: int) -> sympy.Expr:
    """`a // b` in the form that sizes of a graph have."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(a, sympy.Integer(b))


def floor_division(size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """`(a, b)` of a size `a // b`."""
    from torch.utils._sympy.functions import FloorDiv

    return (size.args[0], size.args[1]) if isinstance(size, FloorDiv) else None


def symbol_ranges(size: torch.SymInt) -> dict[sympy.Symbol, tuple[int, int]]:
    """The least and the largest value of every integer symbol of a graph. An unknown end is a number that no
    size reaches."""
    ranges = {}
    for symbol, known in size.node.shape_env.var_to_range.items():
        if not known.is_bool and symbol.is_integer:
            ends = (max(known.lower, 0), min(known.upper, sys.maxsize))
            ranges[symbol] = int(ends[0]), int(ends[1])
    return ranges


def guarded_symbols(graph: fx.Graph) -> set[sympy.Symbol]:
    """The symbols by which a graph can be guarded: those that had a value while it was traced and whose range
    is not fixed."""
    size = _any_symbol(graph)
    return set() if size is None else set(symbol_hints(size)) - fixed_symbols(graph)


def fixed_symbols(graph: fx.Graph) -> set[sympy.Symbol]:
    """The symbols whose range the user has fixed, by `mark_dynamic` with `min` or `max`: torch raises if a
    graph is guarded by them."""
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    any_size, found = _any_symbol(graph), set[sympy.Symbol]()
    for tracked in () if any_size is None else any_size.node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt):
                found |= size.node.expr.free_symbols
    return found


def guard_multiple(graph: fx.Graph, size: sympy.Expr, factor: int) -> bool:
    """Whether the size is a multiple of `factor` in all calls of this graph: calls for which the answer is
    another find, or compile, another graph."""
    from torch.utils._sympy.functions import Mod

    symbol = _any_symbol(graph)
    assert symbol is not None
    expr = sympy.Eq(Mod(size, sympy.Integer(factor)), 0)
    return bool(symbol.node.shape_env.evaluate_expr(expr))


def _any_symbol(graph: fx.Graph) -> torch.SymInt | None:
    for node in graph.nodes:
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else [val]:
            if isinstance(size, torch.SymInt):
                return size
    return None
