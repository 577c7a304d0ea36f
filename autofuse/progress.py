"""How long work tells how far it is. The commands show it as a bar; elsewhere nobody listens."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""`progress(label, done, total)`: `done` of `total` pieces are done; None if nobody knows how many."""


def silent(label: str, done: int, total: int | None) -> None:
    """For when nobody looks."""
