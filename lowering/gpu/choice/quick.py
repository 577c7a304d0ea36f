"""How calls of an op find what an earlier one has prepared, past the dispatcher (`lowering/direct.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Quick(NamedTuple):
    """Of one op.

    kind: of the positional arguments of a call all that decides how it runs; None if it is never prepared.
    made(workspace, arguments): what has been prepared for calls like this one, not captured; None if nothing.
    again(made, arguments): runs the call; None where that has to go the long way.
    """

    kind: Callable[[tuple[Any, ...]], Hashable]
    made: Callable[[Any, Any], Any]
    again: Callable[[Any, tuple[Any, ...]], Any]
