"""The product that a rank brings to a reduction. A kernel of ours computes it, or torch does."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import DTYPES
from autofuse.lowering.gpu.operands import aligned
from autofuse.lowering.ops.matmul_all_reduce import BIASED as ONE_WITH_BIAS
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce, is_gpu_tail
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.product import (
    contract,
    dtype_of,
    epilogue,
    keeps_contraction,
    parse,
    without_keep,
)
from autofuse.native_kernels.gpu.state import MOST_TERMS

from .tails import behind, tail_of

MULTIPLIED, BIASED, SCALED, MADE = "mm", "biased", "scaled", "made"
"""Kinds of products. Kernels compute a sum of matmuls (`MULTIPLIED`), one matmul plus a row (`BIASED`), and
one matmul times a number (`SCALED`). All others, and products that the op also returns, are `MADE`: torch
computes them, and kernels exchange them."""


class Factors(NamedTuple):
    """A product as `reference/product.py` has it: `text`, of x, w and operands.

    x: contiguous if it is float8 or if a kernel of ours reads it. torch takes any other layout.
    """

    x: Sequence[Tensor]
    w: Sequence[Tensor]
    operands: Sequence[Tensor] = ()
    text: str = "mm"
    kind: str = MULTIPLIED

    @classmethod
    def of(cls, args: MatmulAllReduce | MatmulReduceScatter, x: Sequence[Tensor]) -> Factors:
        """The factors of a call, with `x` in place of `args.x`."""
        return cls(x, args.w, args.operands, args.product, kind_of(args))

    @property
    def bias(self) -> Tensor | None:
        """The row [N] that a kernel adds to the product; None for other kinds."""
        return aligned(self.operands[0].reshape(-1)) if self.kind == BIASED else None

    @property
    def scale(self) -> float | None:
        """The number by which a kernel multiplies the product; None for other kinds."""
        if self.kind != SCALED:
            return None
        (stage,) = parse(self.text).stages
        number = float(stage.number or 0)
        return 1 / number if stage.name == "div" else number

    @property
    def dtype(self) -> torch.dtype:
        """Of the product."""
        return dtype_of(self.text, self.w[0].dtype, self.operands)

    def computed(self) -> tuple[Factors, Tensor]:
        """Lets torch compute the product. Returns factors for a kernel that only exchanges it, whose x is the
        product and whose w is empty, and the tensor that `keep_product` returns."""
        if not (self.w and keeps_contraction(self.text)):
            product = self.product()
            return Factors([product], []), product
        total = self._contracted()
        return Factors([self._staged(total, None)], []), total

    def product(self, out: Tensor | None = None) -> Tensor:
        """The product, computed by torch, contiguous. The sum of several matmuls is rounded after each of
        them."""
        x, w = self.x, self.w
        if not w:
            return x[0] if out is None else out.copy_(x[0])
        if self.kind in (SCALED, MADE):
            return self._staged(self._contracted(), out)
        if self.kind == BIASED:
            total = torch.addmm(self.operands[0], x[0], w[0], out=out)
        else:
            total = torch.mm(x[0], w[0], out=out)
        for xi, wi in zip(x[1:], w[1:], strict=True):
            total.addmm_(xi, wi)
        return total

    def _contracted(self) -> Tensor:
        """The product before its stages, contiguous."""
        return contract(parse(self.text), self.x, self.w, self.operands).contiguous()

    def _staged(self, value: Tensor, out: Tensor | None) -> Tensor:
        """The product, given its contraction. One kernel applies all stages if GPU kernels have them."""
        _, _, stages = without_keep(self.text).partition(";")
        if not stages or not is_gpu_tail(stages, self.operands):
            found = epilogue(value, self.operands, self.text)
            return found.contiguous() if out is None else out.copy_(found)
        operands = [t.contiguous() for t in self.operands]
        tail = tail_of(stages, value.dtype, value.shape[0], operands)
        return behind(value, operands, tail, out)[0]


def kind_of(args: MatmulAllReduce | MatmulReduceScatter) -> str:
    """The kind of the product of a call. `passes` also calls this, with sizes that are expressions."""
    if args.keep_product or len(args.x) > MOST_TERMS or args.x[0].dtype not in DTYPES:
        return MADE
    if args.product == "mm":
        return MULTIPLIED
    if _is_scaled(args.product):
        return SCALED
    if args.product != ONE_WITH_BIAS:
        return MADE
    bias = args.operands[0]
    is_row = prod(bias.shape) == prod(bias.shape[-1:]) == args.w[0].shape[-1]
    return BIASED if is_row and bias.dtype == args.x[0].dtype else MADE


def _is_scaled(text: str) -> bool:
    product = parse(text)
    stage = product.stages[0] if product.contraction == "mm" and len(product.stages) == 1 else None
    return stage is not None and bool(stage.number) and stage.name in ("mul", "div")
