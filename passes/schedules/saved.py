"""What a forward graph saves for its backward."""

from __future__ import annotations

import math

from torch import fx

from autofuse.lowering.torch_internals import saved_for_backward
from autofuse.passes.graph.follow import tensor

from .slices import static_shape


def saved_bytes(forward: fx.Graph) -> int | None:
    """Bytes of the tensors that it computes and saves, inputs aside; None if that is not known."""
    saved = saved_for_backward(forward)
    if saved is None:
        return None
    total = 0
    for node in saved:
        val, shape = tensor(node), static_shape(node)
        if val is None:
            continue  # a size
        if shape is None:
            return None
        total += math.prod(shape) * val.itemsize
    return total
