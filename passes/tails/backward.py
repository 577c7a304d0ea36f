"""The backward of norms over columns, recognised by what it is decomposed into. V: the gradient of the normed
value, r: rsqrt as the forward has it, N columns.

rms_norm      V * r + (sum(V * x) * -0.5 * r^3 / N) * (2 * x)      the residual's gradient may come in between
layer_norm    (N * V - sum(V)) - xhat * sum(V * xhat)              its scale follows as a stage

A backward graph has r and xhat as inputs, so that nothing shows what they hold. The stages have the value of
these sums for any x and xhat, and for any r that is one number a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from autofuse.passes.graph.follow import argument, aten, expression, tensor
from autofuse.passes.graph.layout import same_size

_MUL = aten.mul.Tensor, aten.mul.Scalar


@dataclass(frozen=True)
class Found:
    """`text` with `{}` for each of `operands`; `node`: V behind it; `inner`: what it replaces."""

    text: str
    node: fx.Node
    operands: tuple[fx.Node, ...]
    inner: frozenset[fx.Node]


def backward_of(product: fx.Node, v: fx.Node) -> Found | None:
    """The backward of a norm that begins with a product of V, whose rows are summed."""
    x, columns = _factor(product, v), v.meta["val"].shape[-1]
    total = _only(product)
    if x is None or total is None or not _sums_rows(total, product) or not isinstance(columns, int):
        return None
    return _rms(product, total, v, x, columns) or _layer(product, total, v, x, columns)


def _only(n: fx.Node, where: Callable[[fx.Node], bool] = lambda n: True) -> fx.Node | None:
    users = list(n.users)
    return users[0] if len(users) == 1 and where(users[0]) else None


def _factor(n: fx.Node | None, of: fx.Node) -> fx.Node | None:
    """What `of` is multiplied by."""
    if n is None or n.target is not aten.mul.Tensor or of not in n.args[:2]:
        return None
    other = n.args[1] if n.args[0] is of else n.args[0]
    return other if isinstance(other, fx.Node) and other is not of else None


def _times(n: fx.Node | None, of: fx.Node | None, number: float) -> bool:
    return n is not None and n.target in _MUL and n.args[:2] == (of, number)


def _is_power(n: object, of: fx.Node, exponent: float) -> bool:
    return isinstance(n, fx.Node) and n.target is aten.pow.Tensor_Scalar and n.args == (of, exponent)


def _is_one_a_row(r: fx.Node) -> bool:
    val = tensor(r)
    return val is not None and (not val.dim() or same_size(expression(val.shape[-1]), 1))


def _sums_rows(n: fx.Node, v: fx.Node) -> bool:
    """Whether it is the sum over the last dim alone, which stays as a dim of size 1."""
    if (
        n.target is not aten.sum.dim_IntList
        or n.args[0] is not v
        or argument(n, 2, "keepdim", False) is not True
    ):
        return False
    rank, dims = len(v.meta["val"].shape), argument(n, 1, "dim")
    return (
        n.kwargs.get("dtype") is None
        and isinstance(dims, (list, tuple))
        and [d % rank for d in dims] == [rank - 1]
    )


def _rms(product: fx.Node, total: fx.Node, v: fx.Node, x: fx.Node, columns: int) -> Found | None:
    half = _only(total, lambda n: _times(n, total, -0.5))
    cubed = _only(half) if half is not None else None
    power = _factor(cubed, half) if half is not None else None
    if half is None or cubed is None or power is None or power.target is not aten.pow.Tensor_Scalar:
        return None
    r = power.args[0]
    if not isinstance(r, fx.Node) or not _is_power(power, r, 3) or not _is_one_a_row(r):
        return None
    inner = [product, total, half, cubed]
    last = _only(cubed)
    if last is not None and last.target is aten.expand.default:
        inner.append(last)
        last = _only(last)
    if last is None or last.target not in (aten.div.Scalar, aten.div.Tensor):
        return None
    if last.args != (inner[-1], columns):
        return None
    inner.append(last)
    shift = _only(last)
    double = _factor(shift, last)
    if shift is None or double is None or double.target not in _MUL or double.args[1] != 2:
        return None
    if double.args[0] is not x and not _is_power(double.args[0], x, 1):
        return None
    scaled = [u for u in v.users if u is not product and _factor(u, v) is r]
    if len(scaled) != 1:
        return None
    return _joined([*inner, shift], scaled[0], shift, x, r)


def _joined(inner: list[fx.Node], scaled: fx.Node, shift: fx.Node, x: fx.Node, r: fx.Node) -> Found | None:
    """`scaled + shift`, or `(residual + scaled) + shift`."""
    out, first = _only(shift), _only(scaled)
    if out is None or first is None or not _adds(out) or not _adds(first):
        return None
    text, inner = "project {} {}; mul {}", [*inner, scaled, out]
    if first is out:
        return Found(text, out, (x, r, r), frozenset(inner))
    residual = first.args[1] if first.args[0] is scaled else first.args[0]
    if list(first.users) != [out]:
        return None
    assert isinstance(residual, fx.Node)
    same = [n.meta["val"] for n in (residual, first, out)]
    if any(t.dtype != same[0].dtype or t.shape != same[0].shape for t in same):
        return None
    return Found(f"{text}; add {{}}", out, (x, r, r, residual), frozenset([*inner, first]))


def _adds(n: fx.Node) -> bool:
    both = all(isinstance(a, fx.Node) for a in n.args[:2])
    return n.target is aten.add.Tensor and both and argument(n, 2, "alpha", 1) == 1


def _layer(product: fx.Node, total: fx.Node, v: fx.Node, x: fx.Node, columns: int) -> Found | None:
    shift = _only(total)
    if shift is None or _factor(shift, total) is not x:
        return None
    out = _only(shift)
    wide = [u for u in v.users if _times(u, v, columns)]
    sums = [u for u in v.users if _sums_rows(u, v)]
    if out is None or len(wide) != 1 or len(sums) != 1:
        return None
    centred = _only(wide[0])
    if centred is None or _only(sums[0]) is not centred or not _subtracts(centred, wide[0], sums[0]):
        return None
    if _only(centred) is not out or not _subtracts(out, centred, shift):
        return None
    inner = frozenset([product, total, shift, wide[0], sums[0], centred, out])
    return Found(f"centre {{}}; mul {columns}", out, (x,), inner)


def _subtracts(n: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    return n.target is aten.sub.Tensor and n.args == (a, b) and argument(n, 2, "alpha", 1) == 1
