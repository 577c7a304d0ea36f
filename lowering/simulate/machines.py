"""Machines of published simulations, and ours."""

from __future__ import annotations

import math

from .machine import MIB, Machine, MemoryKind, Network, Shape

# T3 (Pati et al., ASPLOS 2024, table 1): 80 CUs of 1.4 GHz, L2 of 16 MB in 64 banks, 1 TB/s, ring.
#
# Fitted, each to one published number (docs/simulate.md): the rate of the matmul to the mean gain of an
# ideal overlap; the part of 1 TB/s that memory sustains to the time that near-memory sums save at TP 8; what
# a CU moves to the time of an all_reduce on 8 of 80 CUs.
T3_MATMUL, T3_MEMORY, T3_MOVES = 0.75, 0.5, 11.2e3
_PEAK = 80 * 1.4e3 * 1024
"""Operations per microsecond: 512 multiply-adds a CU and cycle."""
T3_QUEUE = 64
"""Requests in the queue of a memory channel: the thresholds 5, 10 and 30 count them."""

T3 = Machine(
    name="T3",
    processors=80,
    operations=_PEAK * T3_MATMUL,
    memory=MemoryKind(rate=1e6 * T3_MEMORY, near_memory=True),
    network=Network(75e3, 0.5, Shape.RING),
    cache=16 * MIB,
    cache_rate=64 * 32 * 1.4e3,
    read_latency=0.6,
    move_rate=T3_MOVES,
)

# H200, measured: matmuls at 720 TFLOP/s; memory that matmuls read at 4.5 TB/s; 340 GB/s from SMs and 356 from
# copy engines to peers; a signal takes 1.3 us (the benchmark's limits).
H200 = Machine(
    name="H200",
    processors=132,
    operations=735e6,
    memory=MemoryKind(rate=4.5e6, queue=2 * MIB, burst=256 * 1024),
    network=Network(340e3, 0.7),
    cache=50 * MIB,
    cache_rate=5.5e6,
    read_latency=0.7,
    move_rate=60e3,
    launch=2.2,
    signal=1.3,
    buffers=1,
    groups=2,
    pieces=1,
)

KERNELS = 1.07
"""Time of fused kernels over the simulated time, on H200: their own matmuls are slower than cuBLAS, and their
stores to peers take issue slots. Fitted, not modelled."""
EXPERTS_US = 18.0
"""What the calls of experts on H200 take beside: the exchange of counts. Fitted, not modelled."""

INDEX_US, GRADIENTS_US = 1.6e-4, 90.0
"""Microseconds of sorting an index, and of the calls that sort, where gradients of bags are added up on H200.
Fitted, not modelled."""

NCCL = {
    ("all_reduce", 2): (11.8, 200e3),
    ("all_reduce", 4): (13.6, 174e3),
    ("all_reduce", 8): (21.1, 185e3),
    ("reduce_scatter", 2): (10.1, 289e3),
    ("reduce_scatter", 4): (10.8, 280e3),
    ("reduce_scatter", 8): (14.6, 362e3),
    ("all_gather", 2): (13.5, 303e3),
    ("all_gather", 4): (14.1, 282e3),
    ("all_gather", 8): (19.1, 373e3),
    ("all_to_all", 2): (28.8, 414e3),
    ("all_to_all", 4): (28.3, 340e3),
}
"""(microseconds to start, bytes of the larger side a microsecond) of NCCL on H200 behind a matmul. Fitted to
the benchmark's cells of two shapes of Llama 70B and, of the all_to_all with its copies, of Mixtral."""


def nccl_us(collective: str, world: int, nbytes: float, network: Network) -> float:
    """Microseconds of NCCL for `nbytes` of the larger side on one rank.

    Beyond the measured numbers of ranks, the start grows by its last step for every doubling, and the rate of
    a port stays. Between hosts, rings use the NICs of all GPUs of a host, an all_to_all that of each GPU.
    """
    known = sorted(ranks for name, ranks in NCCL if name == collective)
    near = min(known, key=lambda ranks: abs(math.log2(ranks / world)))
    start, rate = NCCL[collective, near]
    if world > known[-1]:
        step = max(0.0, start - NCCL[collective, known[-2]][0])
        start += step * math.log2(world / known[-1])
    port = rate * _crossed(collective, near) * network.rate / H200.network.rate
    if network.shape is Shape.HOSTS and world > network.width:
        shared = 1 if collective == "all_to_all" else network.width
        port = min(port, network.nic_rate * shared)
        start += 2 * network.nic_latency
    return start + nbytes * _crossed(collective, world) / port


def _crossed(collective: str, world: int) -> float:
    """Bytes that cross a port, over the bytes of the larger side."""
    return (2 if collective == "all_reduce" else 1) * (world - 1) / world
