"""How long work reports its progress. The commands show it as a bar; elsewhere it is ignored."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""`progress(label, done, total)`: `done` of `total` pieces are done; None if the number is unknown."""


def silent(label: str, done: int, total: int | None) -> None:
    """Ignores the progress."""
