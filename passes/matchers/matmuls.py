"""Reads the arguments of matmul nodes."""

from __future__ import annotations

import torch
from torch import fx

from autofuse.passes.graph.follow import argument, aten, expression, tensor

MATMULS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
"""The nodes that `linear_operands` reads."""
_OF_HUGGING_FACE = "transformers::grouped_mm_fallback"
"""The op that Hugging Face calls instead of `_grouped_mm` in compiled code, unless in bfloat16."""


def linear_operands(n: fx.Node, vector_bias: bool = True) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """`(x, w, bias)` of `mm`, `bmm`, or of an unscaled `addmm` or `baddbmm`; None for other nodes.

    The bias of a baddbmm is one vector for each expert. The bias of an addmm is a vector, or has any shape if
    not `vector_bias`.
    """
    bias: fx.Node | None = None
    if n.target in (aten.mm.default, aten.bmm.default):
        x, w = n.args[:2]
    elif n.target in (aten.addmm.default, aten.baddbmm.default):
        bias, x, w = n.args[:3]
        val, out = tensor(bias), tensor(n)
        if is_scaled(n) or val is None or out is None:
            return None
        if out.dim() == 3 and tuple(val.shape[:2]) != (out.shape[0], 1):
            return None
        if out.dim() == 2 and vector_bias and val.dim() != 1:
            return None
    else:
        return None
    return x, w, bias


def is_scaled(n: fx.Node) -> bool:
    """Whether a matmul multiplies its bias or its product by a number other than 1."""
    return not argument(n, 3, "beta", 1) == argument(n, 4, "alpha", 1) == 1


def is_grouped(target: object) -> bool:
    """Whether what a node calls is a grouped matmul: that of torch, or of Hugging Face."""
    if target is aten._grouped_mm.default:
        return True
    return isinstance(target, torch._ops.OpOverload) and target.name() == _OF_HUGGING_FACE


def grouped_offsets(n: fx.Node) -> fx.Node | None:
    """The offsets of a grouped matmul of `[rows, K]` with weights `[E, K, N]` and no bias; else None."""
    x, w = tensor(n.args[0]), tensor(n.args[1])
    offsets = argument(n, 2, "offs")
    plain = argument(n, 3, "bias") is None and argument(n, 4, "out_dtype") is None
    if (
        x is None
        or w is None
        or x.dim() != 2
        or w.dim() != 3
        or not plain
        or not isinstance(offsets, fx.Node)
    ):
        return None
    return offsets


def one_weight(w: fx.Node) -> fx.Node | None:
    """The one matrix, `[K, N]` or `[1, K, N]`, that a batch of weights `[E, K, N]` repeats; None if they
    differ.

    `matmul` of a non-contiguous `[E, M, K]` with a matrix expands the matrix to such a batch.
    """
    source = w.args[0] if w.target is aten.expand.default else w
    val = tensor(source)
    single = val is not None and (val.dim() == 2 or expression(val.shape[0]) == 1)
    return source if single and isinstance(source, fx.Node) else None
