"""Descriptions of machines: a GPU, its memory and the network between GPUs. Data only.

Units: microseconds, bytes, bytes per microsecond (1 GB/s is 1000 bytes per microsecond), operations per
microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

KIB, MIB = 1024, 1024 * 1024


class Arbitration(str, Enum):
    """Which of the two streams of requests, compute and communication, a memory serves next."""

    ROUND_ROBIN = "round robin"
    COMPUTE_FIRST = "compute first"


@dataclass(frozen=True)
class MemoryKind:
    """A memory behind one queue. Requests are cut into bursts, the grain of the arbitration."""

    rate: float
    """Bytes per microsecond that it sustains."""
    queue: float = 64 * KIB
    """Bytes of requests that wait behind the arbiter."""
    burst: float = 16 * KIB
    arbitration: Arbitration = Arbitration.ROUND_ROBIN
    threshold: float = float("inf")
    """Compute first: communication enters the queue only while it holds less than this."""
    starvation: float = 2.0
    """Compute first: microseconds after which a waiting request of communication goes first."""
    blocking: float = 0.0
    """Part of the time it serves communication in which matmuls on the same GPU stand still."""
    near_memory: bool = False
    """Whether the memory adds what is stored to what it holds. If not, an update reads and writes."""
    update_cost: float = 2.0
    """Time of a near-memory update over that of a write."""


class Shape(str, Enum):
    """The form of a network."""

    FULL = "full"
    RING = "ring"
    TORUS = "torus"
    HOSTS = "hosts"


@dataclass(frozen=True)
class Network:
    """Links between GPUs. `rate` and `latency` are of one link in one direction.

    FULL: every GPU has one port out and one in, and every port reaches all. RING: a link to each neighbour.
    TORUS: links to four neighbours, `width` GPUs in a row; rows first, then columns. HOSTS: `width` GPUs in a
    host, connected as FULL; every GPU reaches other hosts through a share of its host's NICs, with
    `nic_rate` a GPU and `nic_latency`.
    """

    rate: float
    latency: float
    shape: Shape = Shape.FULL
    width: int = 0
    nic_rate: float = 0.0
    nic_latency: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A GPU and its network."""

    name: str
    processors: int
    """Number of SMs or CUs, each of which runs one program."""
    operations: float
    """Operations per microsecond of all processors together, as a matmul sustains them."""
    memory: MemoryKind
    network: Network
    cache: float = 0.0
    """Bytes of the last-level cache."""
    cache_rate: float = float("inf")
    """Bytes per microsecond that the cache takes from all processors."""
    read_latency: float = 0.0
    """Microseconds until the first operands of a tile arrive."""
    move_rate: float = float("inf")
    """Bytes per microsecond that one processor moves, adds up or copies."""
    buffers: int = 0
    """Tiles on their way to peers that a program need not wait for."""
    tracker: bool = False
    """Whether hardware counts updates and triggers copy engines (T3)."""
    helpers: bool = True
    """Whether sends, sums of partial tiles and copies run beside the programs: by copy engines, or by threads
    that helpers of a kernel are."""
    launch: float = 0.0
    """Microseconds from the call to the first tile."""
    signal: float = 0.0
    """Microseconds of a signal, beside the latency of its links."""
    groups: int = 8
    """Number of reads that the operands of a tile are fetched by: the grain of reads."""
    pieces: int = 4
    """Number of stores of a tile, one of each wavefront: the grain of stores, and what a tracker tracks."""
