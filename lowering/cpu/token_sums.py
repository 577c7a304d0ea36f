"""The sum over the rows of a token, as one loop over its rows in the place of a torch op for each stage."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autofuse.lowering.reference.grouped import ROW_STAGES
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.token_sums import Scale, add_rows, can_add_rows, put_rows

if TYPE_CHECKING:
    from autofuse.lowering.reference.product import Stage


def add_up(out: Tensor, rows: Tensor, operands: Sequence[Tensor], stages: Sequence["Stage"]) -> int:
    """Stores in `out` what the first stages make of rows of experts. Returns their number, 0 if they are not

        mul %i; take %j; mul %k; sum 2 or fold 2; to bfloat16      of which each but the sum may be missing,
        mul %i; to bfloat16; index_add %j %k                       and products may be rounded

    or if the stages behind them cannot be applied to `out`.
    """
    before: Scale | None = None
    behind: Scale | None = None
    index: Tensor | None = None
    base: Tensor | None = None
    dtype, count, summed, k, fold = rows.dtype, rows.shape[0], False, 1, False
    done = 0
    for stage in stages:
        if stage.name == "mul" and stage.operand is not None and not summed and behind is None:
            factors = operands[stage.operand]
            if factors.dim() != 2 or factors.shape[1] != 1 or factors.shape[0] not in (1, count):
                return 0
            dtype = torch.promote_types(dtype, factors.dtype)
            if before is None and index is None:
                before = (factors, dtype)
            else:
                behind = (factors, dtype)
        elif stage.name == "take" and index is None and behind is None and not summed:
            assert stage.mask is not None
            index = operands[stage.mask]
            count = index.shape[0]
        elif stage.name in ("sum", "fold") and not summed:
            summed, k, fold = True, int(stage.number or 0), stage.name == "fold"
        elif stage.name == "index_add" and not summed and index is None and behind is None:
            assert stage.operand is not None
            assert stage.mask is not None
            base, index, summed = operands[stage.operand], operands[stage.mask], True
        elif stage.dtype is not None and dtype == torch.float32 and (summed or before or behind):
            dtype = stage.dtype
            if not summed and behind is not None:
                behind = (behind[0], dtype)
            elif not summed and before is not None:
                before = (before[0], dtype)
        elif summed and all(s.dtype is None and s.name not in ROW_STAGES for s in stages[done:]):
            break
        else:
            return 0
        done += 1
    of_out = dtype == out.dtype and out.stride(1) == 1 == rows.stride(1)
    factor_dtypes = [scale[0].dtype for scale in (before, behind) if scale is not None]
    known = all(d in DTYPES for d in (rows.dtype, out.dtype, dtype, *factor_dtypes))
    if not summed or not of_out or not known or not can_add_rows():
        return 0
    if base is None:
        add_rows(out, rows, index, before, behind, k, fold)
    else:
        assert index is not None
        sums = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        sums.copy_(base)
        put_rows(sums, rows, index, before)
        if sums is not out:
            out.copy_(sums)
    return done
