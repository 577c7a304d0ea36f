"""How a call of an op finds a call that was prepared earlier, past the dispatcher (`lowering/direct.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

ALIGNED_ELEMENTS = 8
"""Elements of 16 bytes: what begins elsewhere is no operand of TMA, so that its way may be another one."""


class Quick(NamedTuple):
    """Of one op.

    kind: of the positional arguments of a call all that decides how it runs; None if it is never prepared.
    made(workspace, arguments): what has been prepared for calls like this one, not captured; None if nothing.
    again(made, arguments): runs the call; None where that has to go the long way.
    """

    kind: Callable[[tuple[Any, ...]], Hashable]
    made: Callable[[Any, Any], Any]
    again: Callable[[Any, tuple[Any, ...]], Any]


def sizes_of(
    x: Sequence[Tensor], w: Sequence[Tensor], more: Sequence[Tensor], any_rows: bool = False
) -> tuple[Hashable, ...] | None:
    """Of operands of matmuls; None unless all but w are as kernels take them: none is copied first. more:
    biases, and operands of tails.

    any_rows: calls whose x differ in their number of rows alone are alike.
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
