"""How many timings are made of several ways, in which order, and which ways are timed again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

MOST_CALLS = 10
CALLS_US = 5000.0
"""A graph has no more calls than these, and than last so long."""
COLD_BYTES = 192 << 20
"""What is read rotates among copies of more than this together: it comes from memory, not from the L2."""

NEAR = 1.12
FINALISTS = 4
"""So close to the fastest, and so many, are timed again before one is chosen."""


@dataclass(frozen=True)
class Timing:
    """One way to run a call. Of the slowest rank; None, and why, for what could not be run."""

    us: float | None = None
    eager: bool = False
    """It could not be captured as a CUDA graph."""
    skew_us: float = 0.0
    """Between the slowest rank and the fastest."""
    error: float | None = None
    """|result - exact| / |exact| (Frobenius), the largest of all ranks; exact is computed in fp64."""
    failed: str = ""


@dataclass(frozen=True)
class Effort:
    """How much is timed; equal on all ranks."""

    rounds: int = 7
    """Every round has one sample of everything; the median counts."""
    sample_us: float = 10000.0
    """Short samples flatter what draws much power: GPUs throttle within milliseconds."""


QUICK = Effort(rounds=5, sample_us=3500.0)


def calls_for(roughly_us: float) -> int:
    """Calls in a graph: at least two, in which a call meets the one before it."""
    return max(2, min(MOST_CALLS, round(CALLS_US / roughly_us)))


def matmul_us(m: int, k: int, n: int) -> float:
    """What `[m, k] @ [k, n]` of 16-bit floats takes at least: 700 TFLOP/s, 4 TB/s. For `calls_for`."""
    return max(2 * m * k * n / 700e6, k * n * 2 / 4e6)


def copies_of(nbytes: int) -> int:
    """How many copies of so many bytes it takes for none to be in the L2 when its turn comes again."""
    return max(1, -(-COLD_BYTES // nbytes))


def in_turn(keys: Sequence[Key], number: int) -> list[Key]:
    """The order of a round. In as many rounds as there are keys (twice as many if that is odd) every key is
    behind every other equally often: a GPU at its power limit is slower behind a sample that drew much power.
    E. J. Williams, "Experimental designs balanced for the estimation of residual effects", 1949."""
    count = len(keys)
    zigzag = [(i + 1) // 2 if i % 2 else count - i // 2 for i in range(count)]  # 0, 1, count - 1, 2, ...
    turned = [keys[(place + number) % count] for place in zigzag]
    return turned[::-1] if count % 2 and number % 2 else turned


def captured(timings: Mapping[Key, Timing]) -> dict[Key, float]:
    """Microseconds of those that ran, and can run in a CUDA graph."""
    return {key: t.us for key, t in timings.items() if t.us is not None and not t.eager}


def fastest(timings: Mapping[Key, Timing]) -> list[Key]:
    """Those of `captured` that may be the fastest, the one that seems so first."""
    times = captured(timings)
    near = [key for key in times if times[key] <= NEAR * min(times.values())]
    return sorted(near, key=lambda key: times[key])[:FINALISTS]
