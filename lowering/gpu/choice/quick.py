"""How a call of an op finds a call that was prepared earlier, past the dispatcher (`lowering/direct.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

ALIGNED_ELEMENTS = 8
"""Elements in 16 bytes. TMA loads no operand that begins elsewhere, so such a call may take another way."""


class Quick(NamedTuple):
    """Functions of one op that find and repeat a prepared call.

    kind(positional arguments): all of them that decides how the call runs; None if it is never prepared.
    made(workspace, arguments): what was prepared for calls like this one outside of captured graphs; None if
    nothing was.
    again(made, positional arguments): runs the call; None where the call has to go the long way.
    """

    kind: Callable[[tuple[Any, ...]], Hashable]
    made: Callable[[Any, Any], Any]
    again: Callable[[Any, tuple[Any, ...]], Any]


def sizes_of(
    x: Sequence[Tensor], w: Sequence[Tensor], more: Sequence[Tensor], any_rows: bool = False
) -> tuple[Hashable, ...] | None:
    """The sizes and layouts of the operands of matmuls. None if an operand other than `w` has a layout that
    kernels do not take, since it is copied first.

    more: biases, and operands of tails. any_rows: the sizes leave the number of rows of `x` out.
    """
    found: list[Hashable] = [x[0].device, x[0].dtype, len(x), len(more)]
    for t in x:
        if not t.is_contiguous():
            return None
        found += (t.shape[1:] if any_rows else t.shape, t.storage_offset() % ALIGNED_ELEMENTS)
    for t in w:
        found += (t.shape, t.stride(), t.storage_offset() % ALIGNED_ELEMENTS, t.dtype)
    for t in more:
        if not t.is_contiguous() or t.storage_offset() % ALIGNED_ELEMENTS:
            return None
        found += (t.shape, t.dtype)
    return tuple(found)
