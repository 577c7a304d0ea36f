"""Gradients of embedding tables in a graph, which are computed from gradients of pooled rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autofuse.passes.graph.follow import argument, aten, dtype_of, expression, is_cast, tensor, value
from autofuse.passes.graph.layout import Size, same_size

from .bags import MEAN, MOST_STEPS, SUM, is_of_rows, without_samples
from .embedding_columns import has_last_offset

_SUMS = aten._unsafe_masked_index_put_accumulate.default
_BEFORE_SUMS = (aten.unsqueeze.default, aten.expand.default, aten.div.Scalar, aten.mul.Tensor)


@dataclass(frozen=True)
class TableGradient:
    """`node: [rows, D]` is the gradient of a table from `grad: [B, D]`. The other attributes are as of a
    `Bag`."""

    node: fx.Node
    grad: fx.Node
    indices: fx.Node
    offsets: fx.Node | None
    rows: int | fx.Node
    mode: int
    padding_idx: int
    per_sample_weights: fx.Node | None = None
    include_last_offset: bool = False
    sparse: bool = False
    by_frequency: bool = False
    length: Size = 0


def read_gradient(n: fx.Node) -> TableGradient | None:
    """None if `n` is something else."""
    if n.target is aten._embedding_bag_backward.default:
        grad, indices, offsets = n.args[:3]
        return TableGradient(
            n,
            grad,
            indices,
            offsets,
            rows=n.args[6],
            mode=argument(n, 8, "mode"),
            padding_idx=argument(n, 11, "padding_idx", -1),
            per_sample_weights=argument(n, 10, "per_sample_weights"),
            include_last_offset=has_last_offset(n.args[0], n.args[2]),
            sparse=bool(argument(n, 9, "sparse")),
            by_frequency=bool(argument(n, 7, "scale_grad_by_freq")),
        )
    return _of_rows(n)


def gradient_from(n: fx.Node, grad: fx.Node) -> fx.Node | None:
    """The node that computes the gradient of a table from `grad`, which `n` reads. If the program does more
    with `grad` than a fused op does, `n`."""
    return _gradient_from(n, grad) or (n if _reaches_table(n) else None)


def _reaches_table(n: fx.Node, left: int = MOST_STEPS) -> bool:
    if n.target in (_SUMS, aten._embedding_bag_backward.default):
        return True
    return left > 0 and is_of_rows(n) and any(_reaches_table(user, left - 1) for user in n.users)


def _gradient_from(n: fx.Node, grad: fx.Node) -> fx.Node | None:
    while (n.target in _BEFORE_SUMS or is_cast(n)) and len(n.users) == 1:
        (n,) = n.users
    if n.target is _SUMS and len(n.users) == 1:
        (user,) = n.users
        n = user if is_cast(user) and dtype_of(user) == dtype_of(grad) else n
    found = read_gradient(n)
    if grad.target is aten.unsqueeze.default:
        (grad, *_) = grad.args
    return n if found is not None and found.grad is grad else None


def _of_rows(n: fx.Node) -> TableGradient | None:
    """That of the rows and sums of rows that `read_pooled` reads, as Inductor decomposes it: gradients are
    added up where the index is one of a row, and not the padding. Those of 16 bits are added up in float32,
    and rounded once."""
    sums = n.args[0] if is_cast(n) else n
    if not isinstance(sums, fx.Node) or sums.target is not _SUMS:
        return None
    zeros, mask, where, grad = sums.args
    rounded = is_cast(grad)
    if rounded:
        grad = grad.args[0]
    if zeros.target is not aten.full.default or zeros.args[1] != 0 or len(where) != 1:
        return None
    (indices,), mode, length, samples = where, SUM, 1, None
    rows, shape = zeros.args[0][0], tensor(indices).shape  # type: ignore[union-attr]
    padding = _padding(mask, indices, rows)
    if padding is None or len(shape) not in (1, 2):
        return None
    if len(shape) == 2:
        length = expression(shape[1])
        if grad.target is aten.div.Scalar and _is_size(grad.args[1], length):
            mode, grad = MEAN, grad.args[0]
        else:
            grad, samples = without_samples(grad)
        if grad.target is not aten.expand.default or grad.args[0].target is not aten.unsqueeze.default:
            return None
        grad, dim = grad.args[0].args
        if dim != 1:
            return None
    if mode == MEAN and padding >= 0:  # a bag does not count it
        return None
    if dtype_of(n) != dtype_of(grad) or (rounded and (mode == MEAN or samples is not None)):
        return None
    return TableGradient(n, grad, indices, None, rows, mode, padding, samples, length=length)


def _is_size(given: object, size: Size) -> bool:
    return isinstance(value(given), int | torch.SymInt) and same_size(expression(given), size)


def _padding(mask: fx.Node, indices: fx.Node, rows: int) -> int | None:
    """The index that `mask: [.., 1]` leaves out beside those that are no row; negative if there is none. None
    for another mask."""
    if mask.target is not aten.unsqueeze.default or mask.args[1] != -1:
        return None
    terms = {(term.target, *term.args) for term in _terms(mask.args[0])}
    rest = terms - {(aten.ge.Scalar, indices, 0), (aten.lt.Scalar, indices, rows)}
    if len(terms) - len(rest) != 2 or len(rest) > 1:
        return None
    for target, *read in rest:
        return read[1] if target is aten.ne.Scalar and read[0] is indices else None
    return -1


def _terms(n: Any) -> Iterator[fx.Node]:
    if n.target is aten.bitwise_and.Tensor:
        for each in n.args:
            yield from _terms(each)
    else:
        yield n
