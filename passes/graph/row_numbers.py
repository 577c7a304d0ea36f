"""Numbers of rows: `aten.index` and `aten.index_put` count negative ones from the end, fused ops do not."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import fx

from .emit import Emitter
from .follow import aten, dtype_of, is_view, prims
from .layout import Size
from .permutation import is_permutation

FROM_EITHER_END = (aten.index.Tensor, aten.index_put.default)
"""Ops whose indices may be negative. Those of `index_select`, `index_add`, `gather` and `scatter` may not."""

_ORDERING = (aten.sort.default, aten.sort.stable, aten.topk.default)
_ORDERS = (
    aten.argsort.default, aten.argsort.stable, aten.nonzero.default, aten.repeat_interleave.Tensor,
    aten.arange.default,
)  # fmt: skip
_CONSTANTS = (aten.full.default, aten.zeros.default, aten.ones.default)
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_OF_ONE = (
    *_CASTS, aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.cumsum.default,
    aten.sum.default, aten.sum.dim_IntList, aten.clone.default, aten.repeat_interleave.self_Tensor,
)  # fmt: skip
"""Ops whose results are not negative if their first argument is not."""
_OF_BOTH = (
    aten.add.Tensor, aten.mul.Tensor, aten.floor_divide.default, aten.div.Tensor_mode,
    aten.remainder.Scalar, aten.remainder.Tensor, aten.maximum.default, aten.minimum.default,
)  # fmt: skip
"""Ops whose results are not negative if their first two arguments are not."""


def from_start(emitter: Emitter, index: fx.Node, rows: Size) -> fx.Node:
    """`index` into `rows` rows, with negative numbers replaced; `index` itself if the graph shows that it
    has none."""
    if is_permutation(index) or not _may_be_negative(index):
        return index
    negative = emitter.call(aten.lt.Scalar, index, 0)
    counted = emitter.call(aten.add.Tensor, index, emitter.size(rows))
    return emitter.call(aten.where.self, negative, counted, index)


def _may_be_negative(index: fx.Node) -> bool:
    """Whether the ops that make the index leave it open that it holds a negative number."""

    @cache  # a node may be read by many
    def node_may(node: fx.Node) -> bool:
        target, args = node.target, node.args
        source = args[0] if args else None
        if dtype_of(node) == torch.bool or target is aten.sym_size.int or target in _ORDERS:
            return False
        if target is operator.getitem and isinstance(source, fx.Node) and source.target in _ORDERING:
            return args[1] != 1
        if target is prims.iota.default:
            return may(node.kwargs.get("start")) or may(node.kwargs.get("step"))
        if target is aten.where.self:
            return may(args[1:])
        if target in _CONSTANTS:
            return target is aten.full.default and may(args[1])
        if target in _OF_BOTH:
            return node.kwargs.get("alpha", 1) != 1 or may(args[:2])
        return may(source) if target in _OF_ONE or is_view(node) else True

    def may(given: object) -> bool:
        if isinstance(given, (int, float)):
            return given < 0
        if isinstance(given, (list, tuple)):
            return any(map(may, given))
        return not isinstance(given, fx.Node) or node_may(given)

    return node_may(index)
