"""The sum over the rows of a token, as one loop over its rows in the place of a torch op for each stage."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autofuse.lowering.reference.token_sum import token_sum
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.token_sums import add_rows, put_rows

if TYPE_CHECKING:
    from autofuse.lowering.reference.product import Stage


def add_up(out: Tensor, rows: Tensor, operands: Sequence[Tensor], stages: Sequence["Stage"]) -> int:
    """Stores in `out` what the first stages make of rows of experts. Returns their number, 0 if they are no
    `token_sum`, or if the stages behind them cannot be applied to `out`."""
    found = token_sum(rows.dtype, operands, stages)
    if found is None or not found.fits(rows.shape[0]):
        return 0
    of_out = found.dtype == out.dtype and out.stride(1) == 1 == rows.stride(1)
    factor_dtypes = [scale[0].dtype for scale in (found.before, found.behind) if scale is not None]
    if not of_out or not all(d in DTYPES for d in (rows.dtype, out.dtype, *factor_dtypes)):
        return 0
    if found.base is None:
        add_rows(out, rows, found.index, found.before, found.behind, found.k, found.fold)
    else:
        assert found.index is not None
        sums = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        sums.copy_(found.base)
        put_rows(sums, rows, found.index, found.before)
        if sums is not out:
            out.copy_(sums)
    return found.stages
