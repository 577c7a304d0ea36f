"""Weights rows and adds them up token by token, on one thread."""

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import TypeAlias

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import DTYPES, function

_add_rows = function("af_add_rows", c_int, [c_void_p])

Scale: TypeAlias = tuple[Tensor, torch.dtype]
"""A factor for each row, `[n, 1]`, and the dtype to which products with it are rounded."""


def add_rows(
    out: Tensor,
    rows: Tensor,
    index: Tensor | None,
    before: Scale | None,
    behind: Scale | None,
    k: int,
    fold: bool,
) -> None:
    """`out[t] = sum over j < k of before[r] * rows[r] * behind[i]`, where `r = index[i]`.

    `i` is entry `t * k + j`, with `fold` `j * T + t`; without an index `r = i`. `out: [T, N]` and
    `rows: [R, N]` have adjacent columns; `index: [T * k, 1]`, int64. Adds in float32. Raises IndexError for a
    row that is none.
    """
    _run(out, rows, index, before, behind, int(fold), k)


def put_rows(out: Tensor, rows: Tensor, index: Tensor, before: Scale | None) -> None:
    """`out[index[r]] += before[r] * rows[r]`, row by row; out is float32, `index: [R, 1]`. Else as above."""
    _run(out, rows, index, before, None, 0, 0)


def _run(
    out: Tensor,
    rows: Tensor,
    index: Tensor | None,
    before: Scale | None,
    behind: Scale | None,
    fold: int,
    k: int,
) -> None:
    words = [
        *(out.data_ptr(), out.stride(0), DTYPES[out.dtype]),
        *(rows.data_ptr(), rows.stride(0), DTYPES[rows.dtype]),
        *((0, 0) if index is None else (index.data_ptr(), index.stride(0))),
        *_scale(before, rows.shape[0]),
        *_scale(behind, out.shape[0] * k),
        *(fold, *out.shape, k, rows.shape[0]),
    ]
    if not _add_rows((c_int64 * len(words))(*words)):
        few, many = (rows, "rows") if k else (out, "tokens")
        raise IndexError(f"an index names none of {few.shape[0]} {many}")


def _scale(scale: Scale | None, count: int) -> Sequence[int]:
    if scale is None:
        return (0, 0, 0, 0)
    factors, rounded = scale
    stride = factors.stride(0) if factors.shape[0] == count else 0
    return (factors.data_ptr(), stride, DTYPES[factors.dtype], DTYPES[rounded])
