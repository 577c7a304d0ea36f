"""The matmul of the fused ops on the CPU: torch's, or the library's own where that is faster."""

import torch
from torch import Tensor

from autofuse.native_kernels.cpu.linear import linear, linear_is_faster


def multiply(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """`out = x @ w (+ bias)`, `x: [M, K]`, `w: [K, N]`, of one dtype; `bias` broadcasts against `[M, N]`."""
    if bias is not None:
        torch.addmm(bias, x, w, out=out)
    elif linear_is_faster(out, x, w):
        linear(out, x, w)
    else:
        torch.mm(x, w, out=out)
