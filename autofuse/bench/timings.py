"""A measured time of one way to run something, and what is derived from several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE = "bfloat16"
"""Of all that is measured on GPUs."""
BYTES = 2
"""Of one number."""
FLAG_US = 1.3
"""A flag from one GPU to another."""


@dataclass(frozen=True)
class Timing:
    """One way to run a cell. Of the slowest rank; None, and why, for what could not be run."""

    us: float | None = None
    eager: bool = False
    """It could not be captured as a CUDA graph."""
    skew_us: float = 0.0
    """Between the slowest rank and the fastest."""
    error: float | None = None
    """|result - exact| / |exact| (Frobenius), the largest of all ranks; exact is computed in fp64."""
    failed: str = ""


def least(timings: Mapping[str, Timing]) -> float | None:
    """The time of the fastest; None if there is none."""
    return min((t.us for t in timings.values() if t.us is not None), default=None)


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b; None if either is."""
    return None if a is None or b is None else a / b


def from_json(timings: Mapping[str, Any]) -> dict[str, Timing]:
    """Timings by name, as `asdict` wrote them."""
    return {name: Timing(**timing) for name, timing in timings.items()}
