"""What the benchmark of optimizers measures and finds, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OURS = "autofuse"
WRITTEN = "AdamW in tensor ops"
"""Rule of a compiled step in which every rank updates all of its parameters and states."""
ALONE = "without an exchange"
"""Of a training step: no peer, but what no exchange can be faster than."""
STATES = 2
"""Of AdamW and LAMB, in float32."""


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
    training: bool = False
    """Whole training steps instead."""
    written: bool = False
    """Compiled steps in tensor ops instead."""


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
    limit_us: float | None = None
    """That links and memory take at least; on GPUs."""

    def limit(self, link_gb_per_s: float, memory_gb_per_s: float) -> float:
        """The longer of two times: every link moves gradients to their owners and parameters back, and memory
        moves the gradients and states that are read, and the states and parameters that are written."""
        value, state = (4 if self.dtype == "float32" else 2), 2 * STATES * 4
        owners = 1 if self.rule == WRITTEN else self.world  # that share out the update
        sent = self.elements * 2 * value * (self.world - 1) / self.world
        touched = self.elements * (2 * value + (state + value) / owners)
        return max(sent / link_gb_per_s, touched / memory_gb_per_s) / 1e3

    @property
    def best(self) -> tuple[str, float]:
        """The fastest of torch's, and how many times as long as ours it takes."""
        name = min((n for n in self.us if n != ALONE and not n.startswith(OURS)), key=lambda n: self.us[n])
        return name, self.us[name] / self.us[OURS]


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    peers = list(dict.fromkeys(name for row in rows for name in row.us))
    lines = [
        "| ranks | rule | dtype | tensors | "
        + " | ".join(f"{p} us" for p in peers)
        + " | best other / ours | limit / ours |"
    ]
    lines.append("|---" * (len(peers) + 6) + "|")
    for row in rows:
        of_peers = [f"{row.us[p]:,.0f}" if p in row.us else "" for p in peers]
        name, ratio = row.best
        tensors = ", ".join([row.name, *["captured"] * row.captured, *["clipped"] * row.clipped])
        share = "" if row.limit_us is None else f"{row.limit_us / row.us[OURS]:.2f}"
        cells = [str(row.world), row.rule, row.dtype, tensors, *of_peers, f"{ratio:.2f} ({name})", share]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
