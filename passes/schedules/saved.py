"""What a forward graph saves for its backward."""

from __future__ import annotations

from torch import fx

from autofuse.lowering.torch_internals import saved_for_backward, seen_size
from autofuse.passes.graph.follow import tensor


def saved_bytes(forward: fx.Graph) -> int | None:
    """Bytes of the tensors that it computes and saves, inputs aside, at the sizes that it was traced with.

    None if that is not known.
    """
    saved = saved_for_backward(forward)
    if saved is None:
        return None
    total = 0
    for node in saved:
        val = tensor(node)
        if val is None:
            continue  # a size
        numel = seen_size(val.numel())
        if numel is None:
            return None
        total += numel * val.itemsize
    return total
