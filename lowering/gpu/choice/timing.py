"""How many timings are made of several ways, in which order, and which ways are timed again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

MOST_CALLS = 10
CALLS_US = 5000.0
"""A graph has at most `MOST_CALLS` calls, and about as many as last `CALLS_US`."""
COLD_BYTES = 192 << 20
"""Calls read copies of their operands by turns. The copies together are larger than this, so that each call
reads from memory and not from the L2."""

NEAR = 1.12
FINALISTS = 4
"""Variants within a factor of `NEAR` of the fastest are timed again before one is chosen, at most
`FINALISTS` of them."""


@dataclass(frozen=True)
class Timing:
    """The time of one variant on the slowest rank. A variant that failed has the time None and a reason."""

    us: float | None = None
    eager: bool = False
    """Whether its calls were not captured as a CUDA graph."""
    skew_us: float = 0.0
    """The time between the slowest rank and the fastest."""
    error: float | None = None
    """|result - exact| / |exact| (Frobenius), the largest of all ranks; exact is computed in fp64."""
    failed: str = ""


@dataclass(frozen=True)
class Effort:
    """How much is timed; equal on all ranks."""

    rounds: int = 7
    """Every round has one sample of each variant; the median of the rounds counts."""
    sample_us: float = 10000.0
    """Duration of a sample. GPUs throttle within milliseconds, so shorter samples would favour variants that
    draw much power."""


QUICK = Effort(rounds=5, sample_us=3500.0)


def calls_for(roughly_us: float) -> int:
    """Calls in a graph: at least two, so that calls run back to back."""
    return max(2, min(MOST_CALLS, round(CALLS_US / roughly_us)))


def matmul_us(m: int, k: int, n: int) -> float:
    """Lower bound of the time of `[m, k] @ [k, n]` of 16-bit floats at 700 TFLOP/s and 4 TB/s; for
    `calls_for`."""
    return max(2 * m * k * n / 700e6, k * n * 2 / 4e6)


def copies_of(nbytes: int) -> int:
    """How many copies of `nbytes` each are needed, so that no copy is in the L2 when its turn comes again."""
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
    """Microseconds of the variants that were timed in a CUDA graph."""
    return {key: t.us for key, t in timings.items() if t.us is not None and not t.eager}


def fastest(timings: Mapping[Key, Timing]) -> list[Key]:
    """The variants among `captured` that may be the fastest, in the order of their times."""
    times = captured(timings)
    near = [key for key in times if times[key] <= NEAR * min(times.values())]
    return sorted(near, key=lambda key: times[key])[:FINALISTS]
