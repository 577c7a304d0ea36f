"""Whether a legal site is worth fusing: compute alone and collective alone against both at once.

A roofline for the compute, `max(flops / rate, bytes / bandwidth)`; alpha-beta for the collective,
`alpha + bytes / bandwidth`. Sizes that depend on data are unknown here: such sites are fused, as every
rank must decide alike and the fused ops gain most where latency counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import sympy

from .anchors import Anchor
from .layout import Size
from .match import Match
from .report import Prediction


@dataclass(frozen=True)
class Machine:
    """One device. Times in microseconds, rates a microsecond, of a rank that has a core for itself."""

    flops: dict[int, float]
    """Matmul rate by bytes an element."""
    memory: float
    """Bytes that a matmul or a pooling reads from memory."""
    call: tuple[float, float]
    """Overhead of a fused call: signals and waits; with a core for every rank, and with fewer."""
    exchange: float
    """Bytes that move through shared memory, every one written once and read once."""
    collective_call: dict[str, tuple[float, float]]
    """Latency of an unfused collective, likewise."""
    collective: float
    """Bytes that an unfused collective moves."""


# From `docs/benchmarks`: two cores of an x86-64 server with AVX-512, gloo over loopback, 2 and 4 ranks.
CPU = Machine(
    flops={4: 95e3, 2: 200e3},
    memory=11e3,
    call=(80.0, 1200.0),
    exchange=5e3,
    collective_call={
        "all_reduce": (1300.0, 6000.0),
        "reduce_scatter": (1300.0, 6000.0),
        "all_gather": (850.0, 3800.0),
        "all_to_all": (700.0, 1700.0),
    },
    collective=1.2e3,
)


def estimate(anchor: Anchor, match: Match, world: int, hints: dict[sympy.Symbol, int]) -> Prediction:
    """Predicted times of the site on the CPU."""
    sent = anchor.nbytes
    sizes = [[_number(s, hints) for s in m] for m in match.work.matmuls]
    read = _number(match.work.bytes_read, hints)
    kept = _number(match.work.bytes_kept, hints)
    if sent is None or read is None or kept is None or any(s is None for m in sizes for s in m):
        return Prediction(None, None, "", "", "not known", "cpu")
    # The number of cores, not the affinity of this process: all ranks must decide alike.
    cores = os.cpu_count() or 1
    crowded, share = int(world > cores), max(1.0, world / cores)
    itemsize = anchor.node.meta["val"].element_size()
    rate = CPU.flops.get(itemsize, CPU.flops[4])
    compute = read / CPU.memory
    for m, k, n in sizes:
        weight = k * n * itemsize  # type: ignore[operator]
        compute += max(2 * m * k * n / rate, weight / CPU.memory)  # type: ignore[operator]
    moved = sent * (world if anchor.kind == "all_gather" else 1)
    collective = CPU.collective_call[anchor.kind][crowded] + moved / CPU.collective
    exchange = CPU.call[crowded] + (moved + kept) / CPU.exchange
    fused, unfused = round(share * compute + exchange, 1), round(share * compute + collective, 1)
    wins = "always" if fused < unfused else "never"
    return Prediction(fused, unfused, str(fused), str(unfused), wins, "cpu")


def _number(size: Size, hints: dict[sympy.Symbol, int]) -> float | None:
    if not isinstance(size, sympy.Expr):
        return float(size)
    known = size.xreplace(hints)
    return float(known) if known.is_number else None
