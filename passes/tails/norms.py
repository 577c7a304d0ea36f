"""Norms over columns, recognised by what they are decomposed into.

rms           pow or mul -> mean -> add eps -> rsqrt -> mul
standardize   var_mean -> add eps -> rsqrt, sub -> mul
"""

from __future__ import annotations

from torch import fx

from autofuse.passes.graph.follow import argument, aten

from .pointwise import is_number
from .step import Step


def norm_of(reader: fx.Node, v: fx.Node) -> Step | None:
    """The norm of V that begins with one of its readers."""
    if _is_square(reader, v):
        return _rms(reader, v)
    return _standardize(reader, v) if reader.target is aten.var_mean.correction else None


def _only(n: fx.Node | None) -> fx.Node | None:
    """The only user of a node."""
    users = list(n.users) if n is not None else []
    return users[0] if len(users) == 1 else None


def _is_square(n: fx.Node, v: fx.Node) -> bool:
    if n.target is aten.pow.Tensor_Scalar:
        return n.args == (v, 2)
    return n.target is aten.mul.Tensor and n.args == (v, v)


def _over_columns(n: fx.Node, v: fx.Node) -> bool:
    """Whether a mean or variance is over the last dim alone, which stays as a dim of size 1."""
    rank = len(v.meta["val"].shape)
    dims = argument(n, 1, "dim")
    kept = argument(n, 2, "keepdim", False) if n.target is aten.mean.dim else n.kwargs.get("keepdim")
    return kept is True and isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1]


def _scale(mean: fx.Node | None) -> tuple[fx.Node, fx.Node, float | int] | None:
    """`rsqrt(mean + eps)` below a mean: the sum, the root and eps."""
    total = _only(mean)
    if total is None or total.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    eps, root = total.args[1], _only(total)
    if total.args[0] is not mean or not is_number(eps) or argument(total, 2, "alpha", 1) != 1:
        return None
    if root is None or root.target is not aten.rsqrt.default:
        return None
    assert isinstance(eps, (int, float))
    return total, root, eps


def _times(n: fx.Node, scale: fx.Node) -> fx.Node | None:
    """The only product of both."""
    found = [u for u in n.users if u.target is aten.mul.Tensor and set(u.args[:2]) == {n, scale}]
    return found[0] if len(found) == 1 else None


def _rms(square: fx.Node, v: fx.Node) -> Step | None:
    mean = _only(square)
    if mean is None or mean.target is not aten.mean.dim or mean.kwargs.get("dtype") is not None:
        return None
    found = _scale(mean) if _over_columns(mean, v) else None
    if found is None:
        return None
    total, root, eps = found
    normed = _times(v, root)
    if normed is None:
        return None
    return Step(f"rms {eps!r}", normed, (), frozenset({square, mean, total, root, normed}), (root,))


def _standardize(both: fx.Node, v: fx.Node) -> Step | None:
    if both.args[0] is not v or both.kwargs.get("correction") != 0 or not _over_columns(both, v):
        return None
    items = {item.args[1]: item for item in both.users}
    found = _scale(items.get(0))
    mean = items.get(1)
    if found is None or mean is None:
        return None
    total, root, eps = found
    centred = [u for u in mean.users if u.target is aten.sub.Tensor and u.args == (v, mean)]
    if len(centred) != 1 or argument(centred[0], 2, "alpha", 1) != 1:
        return None
    normed = _only(centred[0])
    if normed is None or normed is not _times(centred[0], root):
        return None
    inner = frozenset({both, items[0], mean, total, root, centred[0], normed})
    return Step(f"standardize {eps!r}", normed, (), inner, (mean, root))
