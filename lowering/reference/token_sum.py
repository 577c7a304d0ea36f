"""The first stages of a `grouped` product, read as one sum over the rows of each token.

mul %i; take %j; mul %k; sum 2 or fold 2; to bfloat16      of which each but the sum may be missing,
mul %i; to bfloat16; index_add %j %k                       and products may be rounded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autofuse.native_kernels.cpu.token_sums import Scale

from .grouped import ROW_STAGES

if TYPE_CHECKING:
    from .product import Stage

ROUNDED = (torch.bfloat16, torch.float16)
"""Dtypes to which float32 values may be cast on the way: loops over rows round to no others."""


@dataclass(frozen=True)
class TokenSum:
    """`out[t] = base[t] + sum over the entries i of t of before[r] * rows[r] * behind[i]`, `r = index[i]`.

    Without a base each token has `k` entries, `t * k + j`, with `fold` `j * T + t`, and without an index
    `r = i`. With a base `index[r]` is the token of row r. dtype: of the sums; stages: how many these are.
    """

    before: Scale | None
    behind: Scale | None
    index: Tensor | None
    base: Tensor | None
    k: int
    fold: bool
    dtype: torch.dtype
    stages: int

    def fits(self, rows: int) -> bool:
        """Whether there is one factor for all of so many rows, or one for each, as `[n, 1]`."""
        entries = rows if self.index is None or self.base is not None else self.index.shape[0]
        scales = ((self.before, rows), (self.behind, entries))
        return all(scale is None or scale[0].shape in ((1, 1), (count, 1)) for scale, count in scales)


def token_sum(dtype: torch.dtype, operands: Sequence[Tensor], stages: Sequence[Stage]) -> TokenSum | None:
    """How the stages add up rows of `dtype`; None if they are not of the forms above. Factors may have the
    shapes that they have in a graph, where their rows may lie in several dims."""
    before: Scale | None = None
    behind: Scale | None = None
    index: Tensor | None = None
    base: Tensor | None = None
    summed, k, fold, done = False, 1, False, 0
    for stage in stages:
        if stage.name == "mul" and stage.operand is not None and not summed and behind is None:
            factors = operands[stage.operand]
            if not factors.dim() or factors.shape[-1] != 1:
                return None
            dtype = torch.promote_types(dtype, factors.dtype)
            if before is None and index is None:
                before = (factors, dtype)
            else:
                behind = (factors, dtype)
        elif stage.name == "take" and index is None and behind is None and not summed:
            assert stage.mask is not None
            index = operands[stage.mask]
        elif stage.name in ("sum", "fold") and not summed:
            summed, k, fold = True, int(stage.number or 0), stage.name == "fold"
        elif stage.name == "index_add" and not summed and index is None and behind is None:
            assert stage.operand is not None
            assert stage.mask is not None
            base, index, summed = operands[stage.operand], operands[stage.mask], True
        elif stage.dtype in ROUNDED and dtype == torch.float32 and (summed or before or behind):
            dtype = stage.dtype
            if not summed and behind is not None:
                behind = (behind[0], dtype)
            elif not summed and before is not None:
                before = (before[0], dtype)
        elif summed and all(s.dtype is None and s.name not in ROW_STAGES for s in stages[done:]):
            break
        else:
            return None
        done += 1
    return TokenSum(before, behind, index, base, k, fold, dtype, done) if summed else None
