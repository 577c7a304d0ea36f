"""Operands as kernels take them."""

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes: kernels load and store so much at once."""


def as_read(t: Tensor) -> Tensor:
    """The tensor or, if it has gaps, one without memory that is laid out as its copy. Calls are known by this
    layout and ways chosen for it, whether or not the way that is chosen needs the copy."""
    return t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device="meta")


def aligned(t: Tensor) -> Tensor:
    """The tensor, or a copy without a gradient if it has gaps or begins at no multiple of `ALIGNED` bytes."""
    if not t.is_contiguous():
        t = t.detach().contiguous()
    return t if t.data_ptr() % ALIGNED == 0 else t.detach().clone()
