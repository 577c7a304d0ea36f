"""What is derived from measured times, and what all that is measured on GPUs has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofuse.lowering.gpu.choice.timing import Timing

DTYPE = "bfloat16"
"""The dtype of all operands on GPUs."""
BYTES = 2
"""Bytes of one number."""
FLAG_US = 1.3
"""A flag from one GPU to another."""


def limit_us(compute_us: float, elements: int, world: int, link_gb_per_s: float, exchanges: int) -> float:
    """Microseconds of a perfect fusion of compute and exchanges of `elements` numbers. In each exchange, a
    rank sends all but its own part."""
    sent = exchanges * (world - 1) / world * elements * BYTES
    return max(compute_us, sent / link_gb_per_s / 1e3) + exchanges * FLAG_US


def least(timings: Mapping[str, Timing]) -> float | None:
    """The time of the fastest; None if there is none."""
    return min((t.us for t in timings.values() if t.us is not None), default=None)


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b; None if either is."""
    return None if a is None or b is None else a / b


def from_json(timings: Mapping[str, Any]) -> dict[str, Timing]:
    """Timings by name, as `asdict` wrote them."""
    return {name: Timing(**timing) for name, timing in timings.items()}
