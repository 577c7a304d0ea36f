"""What the benchmark of optimizers measures and finds, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OURS = "autofuse"


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks."""

    rows: tuple[str, ...]
    dtypes: tuple[str, ...]
    lamb: bool
    seconds: float
    """That are spent on a row, about."""
    threads: int = 1
    captured: bool = False
    """Whether steps are replayed from CUDA graphs."""
    clipped: bool = False
    """Whether gradients are clipped by their global norm."""


@dataclass(frozen=True)
class Row:
    """Microseconds of a step of every peer: medians of the slowest rank."""

    name: str
    rule: str
    dtype: str
    world: int
    elements: int
    us: dict[str, float]
    captured: bool = False
    clipped: bool = False

    @property
    def best(self) -> tuple[str, float]:
        """The fastest of torch's, and how many times as long as ours it takes."""
        name = min((n for n in self.us if not n.startswith(OURS)), key=lambda n: self.us[n])
        return name, self.us[name] / self.us[OURS]


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    peers = list(dict.fromkeys(name for row in rows for name in row.us))
    lines = [
        "| ranks | rule | dtype | tensors | "
        + " | ".join(f"{p} us" for p in peers)
        + " | best other / ours |"
    ]
    lines.append("|---" * (len(peers) + 5) + "|")
    for row in rows:
        of_peers = [f"{row.us[p]:,.0f}" if p in row.us else "" for p in peers]
        name, ratio = row.best
        tensors = ", ".join([row.name, *["captured"] * row.captured, *["clipped"] * row.clipped])
        cells = [str(row.world), row.rule, row.dtype, tensors, *of_peers, f"{ratio:.2f} ({name})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
