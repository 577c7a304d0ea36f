"""The work of a way, as sizes, and formulas for the time that the work takes, with a few constants each.

A rate among the constants is a fraction of a peak that the GPU reports, so the constants serve other GPUs,
too. Times are in microseconds. Every constant is positive. `CONSTANTS` of a class has two numbers for each
constant: the value at which a fit begins, and the standard deviation of its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from .gpu import Gpu

Constants: TypeAlias = Mapping[str, float]
Start: TypeAlias = Mapping[str, tuple[float, float]]

SHARPNESS = 4
"""Exponent of the smooth maximum of times that pass together: where they are near each other, both count."""

LEAST = 64
"""Rows that tensor cores multiply at a time."""

CUBLAS = "cublas"
_CUBLAS_TILES = ((128, 256, 1.0), (128, 128, 0.92), (64, 256, 0.9), (64, 128, 0.8), (64, 64, 0.65))
"""Rows, columns, and the rate over that of the first."""
_IN_FOURS = 120 / 132
"""Part of the multiprocessors that clusters of 4 blocks run on: a GPC has no multiple of 4 of them."""
_LEAST_FULL = 0.5
"""Part of a wave's time that few tiles take, at least, in pieces of K."""


class Work(Protocol):
    """A part of what a way does; parts come one after another.

    model: the name of its constants; ways whose parts have one name share them.
    """

    CONSTANTS: ClassVar[Start]

    @property
    def model(self) -> str: ...

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        """Microseconds. constants: those of a model, or else those that a fit begins with."""


def _longest(*times: float) -> float:
    """A smooth maximum."""
    most = max(times)
    return most * sum((t / most) ** SHARPNESS for t in times) ** (1 / SHARPNESS) if most else 0.0


def _waves(tiles: float, programs: float, rounding: float) -> float:
    """Waves of tiles, at least one; how much of a last one that is not full counts is `rounding`, up to 1."""
    waves = max(1.0, tiles / programs)
    return waves + min(1.0, rounding) * (math.ceil(waves - 1e-9) - waves)


def _programs(gpu: Gpu, cluster: int) -> float:
    """How many blocks run at once, in clusters of so many."""
    return gpu.multiprocessors * (_IN_FOURS if cluster > 2 else 1)


_RATES: Start = {"flops": (0.65, 0.3), "load": (1.0, 0.7), "memory": (0.83, 0.2), "link": (0.65, 0.3)}
"""Constants of tiles and of the exchange beside them."""


@dataclass(frozen=True)
class _OfTiles:
    """Tiles of a matmul beside an exchange.

    tiles: pieces that programs take, one program a multiprocessor; flops, load: operations and loaded bytes
    of one; memory: bytes that the GPU reads and writes; sent: bytes to peers, or from them, the more of both.
    """

    model: str
    tiles: int
    flops: float
    load: float
    memory: float
    sent: float


@dataclass(frozen=True)
class Tiles(_OfTiles):
    """Tiles that wait for nothing, or whose waits are hidden behind other tiles.

    added: bytes read and written behind the exchange; hops: exchanges that follow one another; copies: of
    copy engines, each of which waits for a flag, copies and sets a flag, before the next one starts; cluster:
    programs that are placed together; slices: the number of slices in which the bytes are sent; a signal
    follows each slice.
    """

    added: float
    hops: int
    copies: int = 0
    cluster: int = 1
    slices: int = 1

    CONSTANTS: ClassVar[Start] = {
        "start_us": (4.0, 0.7),
        "hop_us": (1.5, 0.5),
        "copy_us": (8.0, 0.3),
        **_RATES,
        "exposed": (0.5, 1.0),
        "round": (1.0, 0.3),
        "added": (0.5, 1.0),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        waves = _waves(self.tiles, _programs(gpu, self.cluster), c["round"])
        computed = _longest(
            waves * self.flops / (gpu.flops * c["flops"]),
            waves * self.load / (gpu.loads * c["load"]),
            self.memory / (gpu.memory * c["memory"]),
        )
        exchanged = self.sent / (gpu.link * c["link"]) + self.copies * c["copy_us"]
        # Nothing can be hidden behind the first wave or slice, or beside the last one.
        exposed = min(1.0, c["exposed"]) * min(computed, exchanged) / max(waves, self.slices)
        added = self.added / (gpu.memory * c["added"])
        hops = self.hops + self.slices - 1
        return c["start_us"] + hops * c["hop_us"] + _longest(computed, exchanged) + exposed + added


@dataclass(frozen=True)
class Sliced(_OfTiles):
    """Tiles of rows that arrive meanwhile, in slices of K. Every tile waits for each slice.

    k_slices: with a signal each; cluster: programs that are placed together.

          slice 0  slice 1  slice 2  slice 3        arrive
                   |  multiplied by the first wave  |  second wave  |
    """

    k_slices: int
    cluster: int = 1

    CONSTANTS: ClassVar[Start] = {
        "start_us": (4.0, 0.7),
        "hop_us": (0.5, 0.5),
        **_RATES,
        "round": (1.0, 0.3),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        waves = _waves(self.tiles, _programs(gpu, self.cluster), c["round"])
        wave = _longest(self.flops / (gpu.flops * c["flops"]), self.load / (gpu.loads * c["load"]))
        exchanged = self.sent / (gpu.link * c["link"])
        first = _longest(wave + exchanged / self.k_slices, exchanged + wave / self.k_slices)
        computed = _longest(first + (waves - 1) * wave, self.memory / (gpu.memory * c["memory"]))
        return c["start_us"] + self.k_slices * c["hop_us"] + computed


@dataclass(frozen=True)
class Product:
    """`count` matmuls of cuBLAS in one call, `[m, k] @ [k, n]` each."""

    m: int
    k: int
    n: int
    count: int = 1
    model: str = CUBLAS

    CONSTANTS: ClassVar[Start] = {
        "start_us": (3.0, 0.7),
        "flops": (0.65, 0.3),
        "memory": (0.88, 0.2),
        "round": (0.7, 0.7),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        best = math.inf
        for rows, columns, rate in _CUBLAS_TILES:
            tiles = -(-self.m // rows) * -(-self.n // columns) * self.count
            waves = _waves(tiles, gpu.multiprocessors, c["round"])
            if tiles < gpu.multiprocessors:  # pieces of K fill the GPU, in part
                waves = max(tiles / gpu.multiprocessors, _LEAST_FULL)
            best = min(best, waves * 2 * rows * columns * self.k / (gpu.flops * c["flops"] * rate))
        read = self.count * (self.k * self.n + self.m * (self.k + self.n)) * 2
        return c["start_us"] + _longest(best, read / (gpu.memory * c["memory"]))


@dataclass(frozen=True)
class Collective:
    """A collective of NCCL, by its faster protocol. sent: bytes on the link of a rank; copied: beside it."""

    model: str
    sent: float
    world: int
    copied: float = 0.0

    CONSTANTS: ClassVar[Start] = {
        "short_us": (9.0, 0.5),
        "short_link": (0.25, 0.5),
        "long_us": (20.0, 0.5),
        "long_link": (0.66, 0.5),
        "doubling": (0.15, 0.5),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        ranks = 1 + c["doubling"] * math.log2(self.world / 2)
        short = c["short_us"] * ranks + self.sent / (gpu.link * c["short_link"])
        long = c["long_us"] * ranks + self.sent / (gpu.link * c["long_link"])
        return 1 / _longest(1 / short, 1 / long) + self.copied / (gpu.memory * COPY)


COPY = 0.7
"""Part of the memory's rate at which torch copies."""


@dataclass(frozen=True)
class Shots:
    """An all_reduce of torch's symmetric memory. sent: bytes on the link; copied: read and written behind."""

    model: str
    sent: float
    copied: float
    world: int

    CONSTANTS: ClassVar[Start] = {
        "start_us": (8.0, 0.7),
        "doubling": (0.15, 0.5),
        "link": (0.6, 0.5),
        "added": (0.5, 1.0),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        start = c["start_us"] * (1 + c["doubling"] * math.log2(self.world / 2))
        return start + self.sent / (gpu.link * c["link"]) + self.copied / (gpu.memory * c["added"])


@dataclass(frozen=True)
class Exchange:
    """An exchange in a kernel of ours, behind what makes the parts: matmuls of cuBLAS, pooling. sent: bytes
    on the link; copied: that the GPU reads and writes for it; hops: exchanges that follow one another."""

    model: str
    products: tuple[Work, ...]
    sent: float
    copied: float
    hops: int

    CONSTANTS: ClassVar[Start] = {
        "start_us": (40.0, 1.5),
        "hop_us": (3.0, 0.7),
        "link": (0.6, 0.5),
        "added": (0.5, 1.0),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        computed = sum(product.us(constants, gpu) for product in self.products)
        copied = self.copied / (gpu.memory * c["added"])
        return (
            computed + c["start_us"] + self.hops * c["hop_us"] + self.sent / (gpu.link * c["link"]) + copied
        )


@dataclass(frozen=True)
class Chunks:
    """torch's async tensor parallelism: a matmul for each rank's rows, and copies beside them."""

    model: str
    chunk: Product
    sent: float
    world: int

    CONSTANTS: ClassVar[Start] = {
        "start_us": (20.0, 0.7),
        "chunk_us": (10.0, 0.7),
        "rate": (0.9, 0.2),
        "link": (0.7, 0.3),
        "exposed": (0.5, 1.0),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        computed = self.world * self.chunk.us(constants, gpu) / c["rate"]
        exchanged = self.sent / (gpu.link * c["link"])
        exposed = min(1.0, c["exposed"]) * min(computed, exchanged) / self.world
        return c["start_us"] + self.world * c["chunk_us"] + _longest(computed, exchanged) + exposed


@dataclass(frozen=True)
class Rows:
    """Rows of embedding tables that are read, added up or written, and an exchange beside that.

    read: bytes of memory; sent: to peers; together: whether the exchange is beside the rest, or behind it;
    starts: how many kernels or collectives, at least, start one after another.
    """

    model: str
    read: float
    sent: float
    together: bool
    starts: int = 1

    CONSTANTS: ClassVar[Start] = {
        "start_us": (20.0, 1.0),
        "memory": (0.4, 1.0),
        "link": (0.6, 0.5),
    }

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        c = constants(self.model, self.CONSTANTS)
        read, sent = self.read / (gpu.memory * c["memory"]), self.sent / (gpu.link * c["link"])
        return c["start_us"] * self.starts + (_longest(read, sent) if self.together else read + sent)


@dataclass(frozen=True)
class Then:
    """Two works of a way, one after the other."""

    first: Work
    second: Work

    CONSTANTS: ClassVar[Start] = {}

    @property
    def model(self) -> str:
        return self.first.model

    def us(self, constants: Callable[[str, Start], Constants], gpu: Gpu) -> float:
        return self.first.us(constants, gpu) + self.second.us(constants, gpu)
