"""Whether a legal site is worth fusing: compute alone and collective alone against both at once.

A roofline for the compute, `max(flops / rate, bytes / bandwidth)`; alpha-beta for the collective,
`alpha + bytes / bandwidth`. Sizes that depend on data are unknown here: such sites are fused, as every
rank must decide alike and the fused ops gain most where latency counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from .anchors import Anchor
from .layout import Size
from .match import Match


@dataclass(frozen=True)
class Machine:
    """Rates of one device. Times in microseconds, rates a microsecond, of one rank among `world`."""

    flops: dict[int, float]
    """Matmul rate by bytes an element."""
    memory: float
    """Bytes that a matmul or a pooling reads from memory."""
    call: float
    """Overhead of a fused call: signals and waits."""
    exchange: float
    """Bytes that move through shared memory, every one written once and read once."""
    collective_call: float
    """Latency of an unfused collective, grows with the number of ranks."""
    collective: float
    """Bytes that an unfused collective moves."""


# Measured on two cores of an x86-64 server with AVX-512 against gloo over loopback; see `autofuse.bench`.
CPU = Machine(
    flops={4: 95e3, 2: 200e3},
    memory=15e3,
    call=30.0,
    exchange=5e3,
    collective_call=150.0,
    collective=1e3,
)


@dataclass(frozen=True)
class Estimate:
    """Microseconds; None where sizes depend on data."""

    fused_us: float | None = None
    unfused_us: float | None = None

    @property
    def gains(self) -> bool:
        return self.fused_us is None or self.unfused_us is None or self.fused_us < self.unfused_us


def estimate(anchor: Anchor, match: Match, world: int, hints: dict[sympy.Symbol, int]) -> Estimate:
    """Predicted times of the site on the CPU."""
    sent = anchor.nbytes
    sizes = [[_number(s, hints) for s in m] for m in match.work.matmuls]
    read = _number(match.work.bytes_read, hints)
    kept = _number(match.work.bytes_kept, hints)
    if sent is None or read is None or kept is None or any(s is None for m in sizes for s in m):
        return Estimate()
    val = anchor.node.meta["val"]
    itemsize = val.element_size()
    rate = CPU.flops.get(itemsize, CPU.flops[4])
    compute = read / CPU.memory
    for m, k, n in sizes:
        weight = k * n * itemsize  # type: ignore[operator]
        compute += max(2 * m * k * n / rate, weight / CPU.memory)  # type: ignore[operator]
    moved = sent * (world if anchor.kind == "all_gather" else 1)
    rounds = 2 if anchor.kind == "all_reduce" else 1
    collective = CPU.collective_call * math.log2(max(world, 2)) * rounds + rounds * moved / CPU.collective
    exchange = CPU.call * rounds + (rounds * moved + kept) / CPU.exchange
    return Estimate(round(compute + exchange, 1), round(compute + collective, 1))


def _number(size: Size, hints: dict[sympy.Symbol, int]) -> float | None:
    if not isinstance(size, sympy.Expr):
        return float(size)
    known = size.xreplace(hints)
    return float(known) if known.is_number else None
