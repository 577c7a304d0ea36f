"""One training pass of DLRM on 128 nodes in a 2D torus, with pooled embeddings and their all_to_all apart and
fused: which assumptions give the 21 % that the paper on fused embeddings reports.

The paper (Punniyamurthy et al.) gives the torus's 200 Gb/s and 700 ns, embeddings of 92 elements, 70 rows
a bag, and 43 MLP layers of 682 on average. Batch, tables, the sides of the torus and all times of kernels
are not given. Here a pass is

    2 (pooling + all_to_all) + 3 x 43 x 2 x 682^2 x batch / matmul rate + what is exposed of the all_reduce

since the backward exchanges and adds up as many bytes as the forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from autofuse.lowering import ops  # noqa: F401  (registers the ops that plans name)
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.simulate.executor import simulate
from autofuse.lowering.simulate.machine import Machine, MemoryKind, Network, Shape
from autofuse.lowering.simulate.work import Bags, Nothing

from .tables import columns

NODES, DIM, POOLING, LAYERS, SIZE, ITEMSIZE = 128, 92, 70, 43, 682, 4
PUBLISHED = 21.0
_LINK = 25e3
_SIMULATED = 64, 4

MI210 = Machine(
    name="MI210",
    processors=104,
    operations=90e6,
    memory=MemoryKind(rate=1.1e6, queue=2**21, burst=2**17),
    network=Network(_LINK, 0.7, Shape.TORUS, 16),
    launch=5.0,
    groups=1,
    pieces=1,
)
"""A node: 70 % of 1.6 TB/s, half of the 181 TFLOP/s of its matrix units, 5 us to launch: all assumed."""


@dataclass(frozen=True)
class Exchange:
    """Microseconds of pooling and all_to_all for `bags` bags a node and destination."""

    pooling: float
    all_to_all: float
    fused: float

    @property
    def saved(self) -> float:
        return self.pooling + self.all_to_all - self.fused


@dataclass(frozen=True)
class Pass:
    """A pass with one set of assumptions."""

    batch: int
    """Samples of one node."""
    tables: int
    exchange: Exchange
    mlp: float
    all_reduce: float

    @property
    def whole(self) -> float:
        return 2 * (self.exchange.pooling + self.exchange.all_to_all) + self.mlp + self.all_reduce

    @property
    def less(self) -> float:
        """Percent of the time that fusion saves."""
        return 200 * self.exchange.saved / self.whole


def exchange(batch: int, tables: int, machine: Machine = MI210) -> Exchange:
    """The same plan three times: without links, without compute, and with both."""
    chunk, block = (batch, tables * DIM), (max(1, batch // 2), tables * DIM)
    shape = PlanShape("embedding_bag_all_to_all", "direct", NODES, ((chunk,) * NODES,), block)
    local = replace(machine, network=Network(1e12, 0.0))
    pooled = simulate(shape, local, Bags(POOLING, ITEMSIZE)).us
    moved = simulate(shape, machine, Nothing(ITEMSIZE)).us
    return Exchange(pooled, moved, simulate(shape, machine, Bags(POOLING, ITEMSIZE)).us)


@cache
def _on_torus(width: int) -> Exchange:
    return exchange(*_SIMULATED, replace(MI210, network=replace(MI210.network, width=width)))


def one_pass(batch: int, tables: int, width: int = 16, rate: float = 90e6, hidden: bool = True) -> Pass:
    """`width`: of the torus; `rate`: of the MLP's matmuls; `hidden`: its all_reduce lies under its backward.

    The exchange is simulated at one size and scaled by its bytes; latencies make a small one 10 % longer.
    """
    one, factor = _on_torus(width), batch * tables / math.prod(_SIMULATED)
    scaled = Exchange(one.pooling * factor, one.all_to_all * factor, one.fused * factor)
    weights = LAYERS * SIZE * SIZE
    mlp = 3 * 2.0 * weights * batch / rate
    reduce = 0.0 if hidden else 2.0 * weights * ITEMSIZE * (NODES - 1) / NODES / (4 * _LINK)
    return Pass(batch, tables, scaled, mlp, reduce)


def region(batches: Sequence[int], tables: Sequence[int], width: int, rate: float, hidden: bool) -> str:
    """Percent of time saved, by samples a node and tables a node. Within 2 points of the paper's: marked."""
    rows = [["samples a node \\ tables a node", *map(str, tables)]]
    for batch in batches:
        row = [str(batch)]
        for count in tables:
            less = one_pass(batch, count, width, rate, hidden).less
            row.append(f"{less:.0f}{'*' if abs(less - PUBLISHED) <= 2 else ''}")
        rows.append(row)
    return columns(rows)


def report(quick: bool = False) -> str:
    """All tables."""
    batches = (32, 256) if quick else (16, 64, 256, 1024)
    tables = (1, 4) if quick else (1, 2, 4, 8, 16, 32)
    parts = [
        f"percent of a DLRM pass that fused embeddings save on {NODES} nodes; published: {PUBLISHED:g}; "
        "*: within 2 points"
    ]
    choices = (
        (16, 90e6, True, "torus 8 x 16, MLP at 90 TFLOP/s, its all_reduce hidden"),
        (16, 90e6, False, "the same, all_reduce exposed"),
        (16, 22e6, True, "MLP at 22 TFLOP/s (float32)"),
        (32, 90e6, True, "torus 4 x 32, MLP at 90 TFLOP/s"),
    )
    for width, rate, hidden, title in choices[:1] if quick else choices:
        parts.append(f"{title}\n{region(batches, tables, width, rate, hidden)}")
    one = _on_torus(16)
    parts.append(
        f"64 samples, 4 tables a node: pooling {one.pooling:.0f} us, all_to_all {one.all_to_all:.0f} us, "
        f"fused {one.fused:.0f} us"
    )
    return "\n\n".join(parts)
