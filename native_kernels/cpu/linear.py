"""Products of a few rows with a transposed weight, as fast as the weight can be read; on one thread."""

from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import available, function

# linear(out, stride, x, stride, weight, stride, m, n, k)
_linear = function("af_linear", None, [c_void_p, c_int64] * 3 + [c_int64] * 3)
_is_fast = function("af_linear_is_fast", c_int, [])

# Measured against MKL: up to here it spends more on packing the weight than on multiplying.
FEW_ROWS, VERY_FEW_ROWS = 16, 4
LONG_ROWS = 1024


@cache
def _usable() -> bool:
    return available() and bool(_is_fast())


def linear_is_faster(out: Tensor, x: Tensor, w: Tensor) -> bool:
    """Whether `linear(out, x, w)` is possible and faster than `torch.mm`: float32, `w: [K, N]` the transpose
    of rows, few rows in `x: [M, K]`, one thread."""
    m, k = x.shape
    return (
        (m <= VERY_FEW_ROWS or (m <= FEW_ROWS and k >= LONG_ROWS))
        and x.dtype == w.dtype == out.dtype == torch.float32
        and w.stride(0) == x.stride(1) == out.stride(1) == 1
        and torch.get_num_threads() == 1
        and _usable()
    )


def linear(out: Tensor, x: Tensor, w: Tensor) -> None:
    """`out = x @ w` in float32; `out: [M, N]`, `x: [M, K]`, `w: [K, N]` with `w.stride(0) == 1` and adjacent
    columns in the other two. Sums are in float32, in sixteen lanes."""
    _linear(
        *(out.data_ptr(), out.stride(0)),
        *(x.data_ptr(), x.stride(0)),
        *(w.data_ptr(), w.stride(1)),
        *(x.shape[0], w.shape[1], x.shape[1]),
    )
