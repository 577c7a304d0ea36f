"""Dropless expert ops by torch's grouped_mm and NCCL, without offsets on the host.

The references of the ops read the offsets on the host. That waits for the GPU, and cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse.lowering import torch_internals
from autofuse.lowering.reference.expert_rows import combine_rows, dispatch_rows
from autofuse.lowering.reference.experts import gated

from .kernels import Rows
from .ways import DroplessProblem


def can_group(problem: DroplessProblem) -> bool:
    """Whether grouped_mm takes it as it is, on a Hopper GPU: of float16 it reads the offsets on the host."""
    return (
        torch_internals.has_grouped_mm()
        and problem.dtype is torch.bfloat16
        and problem.aligned
        and problem.k % 8 == 0
        and problem.columns % 8 == 0
    )


def combine_unfused(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    group_name: str,
) -> Tensor:
    """As `dropless_combine`, but every product is rounded."""
    assert rows.offsets is not None
    p = grouped_product(x[0], w[0], bias, rows.offsets)
    for xi, wi in zip(x[1:], w[1:], strict=True):
        p += grouped_product(xi, wi, None, rows.offsets)
    if rows.positions is not None:  # a permutation: nothing is added up
        p = torch.empty_like(p).index_copy_(0, rows.positions, p)
    return combine_rows(p, None, rows.received, rows.sent, 1, 1, group_name)


def dispatch_unfused(
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    rows: Rows,
    keep: bool,
    gate: str,
    group_name: str,
) -> list[Tensor]:
    """As `dropless_dispatch`; gate: that of the op."""
    assert rows.offsets is not None
    exchanged = dispatch_rows(x, rows.positions, rows.received, rows.sent, 1, 1, group_name)
    outputs = [grouped_product(exchanged, wi, b, rows.offsets) for wi, b in zip(w, bias, strict=True)]
    return gated(outputs, gate) + [exchanged] * keep


def grouped_product(x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """`[rows, N]`: rows up to `offsets[e]` (int32) times `w[e]`, plus `bias[e]`; 0 behind the last expert."""
    if not x.shape[0]:
        return x.new_empty(0, w.shape[2])
    rows = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    out = torch_internals.grouped_mm(x, w, offsets)
    if bias is not None:
        expert = torch.bucketize(rows, offsets, right=True).clamp_(max=w.shape[0] - 1)
        out += bias[expert]
    return out.masked_fill_((rows >= offsets[-1])[:, None], 0)
