"""Operands as kernels take them."""

from torch import Tensor

ALIGNED = 16
"""Bytes: kernels load and store so much at once."""


def aligned(t: Tensor) -> Tensor:
    """The tensor, or a copy without a gradient if it has gaps or begins at no multiple of `ALIGNED` bytes."""
    if not t.is_contiguous():
        t = t.detach().contiguous()
    return t if t.data_ptr() % ALIGNED == 0 else t.detach().clone()
