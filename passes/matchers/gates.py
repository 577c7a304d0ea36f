"""A gate behind two products, as gated experts have it.

silu(x @ w) * (x @ v)       silu(y) = y / (1 + exp(-y)), in float32 between casts, as Inductor decomposes it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from autofuse.lowering.reference.experts import KEPT
from autofuse.passes.graph.follow import Shapes, argument, aten, dtype_of, is_cast, tensor
from autofuse.passes.graph.layout import same_shape

SILU = "silu"


class Gate(NamedTuple):
    """`result` is the activation `name` of products[0], times products[1]. kept: something else reads a
    product, too."""

    name: str
    products: tuple[fx.Node, fx.Node]
    result: fx.Node
    kept: bool

    @property
    def spelled(self) -> str:
        """As the op takes it."""
        return self.name + KEPT if self.kept else self.name

    @property
    def outputs(self) -> list[fx.Node]:
        return [self.result, *self.products] if self.kept else [self.result]


def gate_of(products: Sequence[fx.Node], shapes: Shapes) -> Gate | None:
    """The gate behind two matmuls on a GPU. The kernels apply it to their tiles; on a CPU, Inductor's one
    loop is faster."""
    if len(products) != 2 or not _one_kernel(products[0], products[1], shapes):
        return None
    for gated, other in (products, products[::-1]):
        found = _silu_behind(gated)
        if found is None or len(found.result.users) != 1:
            continue
        inner = found.result
        (result,) = inner.users
        is_product = result.target is aten.mul.Tensor and set(result.args) == {inner, other}
        if is_product and dtype_of(result) == dtype_of(gated):
            kept = set(gated.users) != {found.reader} or set(other.users) != {result}
            return Gate(SILU, (gated, other), result, kept)
    return None


def _one_kernel(a: fx.Node, b: fx.Node, shapes: Shapes) -> bool:
    """Whether one kernel multiplies by both weights: they are as wide, and laid out alike."""
    first, second = tensor(a.args[1]), tensor(b.args[1])
    if first is None or second is None or first.device.type != "cuda":
        return False
    alike = dtype_of(a) == dtype_of(b) and same_shape(shapes.of(a), shapes.of(b))
    return alike and tuple(first.stride()) == tuple(second.stride())


class _Silu(NamedTuple):
    """silu(y) in the dtype of y; reader: the node of it that reads y."""

    reader: fx.Node
    result: fx.Node


def _silu_behind(y: fx.Node) -> _Silu | None:
    """silu(y), if nothing else reads what lies between."""
    for user in y.users:
        if user.target is aten.silu.default:
            return _Silu(user, user)
        if is_cast(user) and dtype_of(user) == torch.float32:
            found = _ratio(user)
            if found is not None and len(found.users) == 1:
                (back,) = found.users
                if is_cast(back) and dtype_of(back) == dtype_of(y):
                    return _Silu(user, back)
    return None


def _ratio(y: fx.Node) -> fx.Node | None:
    """y / (1 + exp(-y)), if nothing else reads y or what lies between."""
    users = list(y.users)
    ratio = next((u for u in users if u.target is aten.div.Tensor and u.args[0] is y), None)
    if ratio is None or len(users) != 2 or argument(ratio, 2, "rounding_mode", None) is not None:
        return None
    added = ratio.args[1]
    if not isinstance(added, fx.Node) or len(added.users) != 1 or argument(added, 2, "alpha", 1) != 1:
        return None
    if added.target not in (aten.add.Tensor, aten.add.Scalar) or added.args[1] != 1:
        return None
    power = added.args[0]
    if not isinstance(power, fx.Node) or power.target is not aten.exp.default or len(power.users) != 1:
        return None
    minus = power.args[0]
    if not isinstance(minus, fx.Node) or minus.target is not aten.neg.default or len(minus.users) != 1:
        return None
    return ratio if minus.args[0] is y else None
