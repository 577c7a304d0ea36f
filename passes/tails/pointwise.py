"""Pointwise ops as stages of a tail."""

from __future__ import annotations

from torch import fx

from autofuse.passes.graph.follow import argument, aten, dtype_of, is_cast, tensor
from autofuse.passes.matchers.product import constant

_UNARY = {aten.neg.default: "neg", aten.relu.default: "relu", aten.silu.default: "silu"}
_BINARY = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.rsub.Tensor: "rsub",
    aten.rsub.Scalar: "rsub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
}
_CLAMPS = {aten.clamp_min.default: "clamp_min", aten.clamp_max.default: "clamp_max"}
_SWAPPED = {"add": "add", "mul": "mul", "sub": "rsub", "rsub": "sub"}


def words_of(n: fx.Node, v: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
    """The stage as text, with `{}` for each of the operands; None if there is no such stage."""
    if is_cast(n):
        return f"to {str(dtype_of(n)).removeprefix('torch.')}", ()
    if n.target in _UNARY:
        return _UNARY[n.target], ()
    if n.target is aten.gelu.default:
        return f"gelu {argument(n, 1, 'approximate', 'none')}", ()
    if n.target in _BINARY:
        return _binary(n, v)
    if n.target in _CLAMPS:
        return (f"{_CLAMPS[n.target]} {n.args[1]!r}", ()) if is_number(n.args[1]) else None
    if n.target is aten.where.self and n.args[0] is not v:
        return _where(n, v)
    return None


def _binary(n: fx.Node, v: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
    name = _BINARY[n.target]
    left, right = n.args[:2]
    if argument(n, 2, "alpha", 1) != 1:
        return None
    other = right
    if left is not v:
        if name not in _SWAPPED:
            return None
        name, other = _SWAPPED[name], left
    if isinstance(other, fx.Node):
        return (f"{name} {{}}", (other,)) if tensor(other) is not None else None
    return (f"{name} {other!r}", ()) if is_number(other) else None


def _where(n: fx.Node, v: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
    mask, left, right = n.args
    dtype = dtype_of(v)
    name, other = ("where", right) if left is v else ("masked_fill", left)
    if not isinstance(mask, fx.Node) or not isinstance(other, fx.Node) or dtype is None:
        return None
    number = constant(other, dtype)
    if number is not None:
        return f"{name} {{}} {number!r}", (mask,)
    return f"{name} {{}} {{}}", (mask, other)


def is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
