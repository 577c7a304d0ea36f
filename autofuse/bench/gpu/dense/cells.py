"""The dense cells: an op at the sizes of a layer, what was measured of it, and what follows from that.

With W ranks, M tokens and a weight [K, N] that the ranks share out:

    matmul_all_reduce, matmul_reduce_scatter     x [M, K / W] @ w [K / W, N]
    all_gather_matmul                            gathered x [M / W, N] @ w [N, K / W]
    matmul_all_gather                            x [M, K] @ w [K, N / W], gathered by columns: logits

    limit      max(compute alone, bytes that a rank sends / link rate) + a flag (two of an all_reduce)
    sent       (W - 1) / W of the [M, N] that is gathered or scattered, twice that of an all_reduce
               (of a gather, what a rank receives)

Compute alone is the faster of cuBLAS and our own GEMM; a perfect fusion takes as long as the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from autofuse.bench.gpu.ratios import from_json, limit_us, ratio
from autofuse.bench.gpu.rows import Measured
from autofuse.lowering.gpu.choice.timing import Timing, matmul_us

SHAPES = {  # N, K over all ranks
    "llama70b.o_proj": (8192, 8192),
    "llama70b.down_proj": (8192, 28672),
    "llama405b.down_proj": (16384, 53248),
    "llama8b.lm_head": (128256, 4096),
    "llama70b.lm_head": (128256, 8192),
}
"""Others are written `K,N`."""
HEADS = ("llama8b.lm_head", "llama70b.lm_head")
"""Shapes of matmul_all_gather: N is the vocabulary. The others are of layers inside of a model."""
MOST_HEAD_TOKENS = 2048
"""More logits than these nobody asks for at once."""
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
QUICK_TOKENS = (8, 128, 2048)
QUICK_SHAPES = tuple(shape for shape in SHAPES if shape != "llama70b.lm_head")
SWEEP_SHAPES, SWEEP_TOKENS = ("llama70b.o_proj",), (2048,)
"""Sizes at which orders and numbers of programs are compared. Each number of programs compiles its own
kernel."""
OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")
LAYER_OPS = OPS[:3]
WEIGHTS = (OPS[:2], OPS[2:3], OPS[3:])
"""Ops that multiply by the same weights."""


def extents(shape: str) -> tuple[int, int]:
    """N and K over all ranks of a shape: a name in `SHAPES`, or `K,N`."""
    if shape in SHAPES:
        return SHAPES[shape]
    k, n = shape.split(",")
    return int(n), int(k)


def ops_of(shape: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The ops that are measured at a shape: those that are asked for, else those that have it in a model."""
    return asked or (OPS[3:] if shape in HEADS else LAYER_OPS)


@dataclass(frozen=True)
class Cell:
    """An op at one size. `m, k, n` are the sizes of the matmul on every rank."""

    op: str
    shape: str
    tokens: int
    world: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} tokens={self.tokens}"

    @property
    def gathers(self) -> bool:
        """The rows of x are gathered before the matmul."""
        return self.op == "all_gather_matmul"

    @property
    def publishes(self) -> bool:
        """The columns of the product are gathered."""
        return self.op == "matmul_all_gather"

    @property
    def m(self) -> int:
        return self.tokens

    @property
    def k(self) -> int:
        n, k = extents(self.shape)
        return n if self.gathers else k if self.publishes else k // self.world

    @property
    def n(self) -> int:
        n, k = extents(self.shape)
        return k // self.world if self.gathers else n // self.world if self.publishes else n

    @property
    def exchanged(self) -> int:
        """Elements of the matrix that is gathered, scattered or reduced."""
        return self.tokens * extents(self.shape)[0]

    @property
    def possible(self) -> bool:
        """Whether the rows divide into equal parts, and are no more than are in use."""
        if self.publishes:
            return self.tokens <= MOST_HEAD_TOKENS
        return self.op == "matmul_all_reduce" or self.tokens % self.world == 0

    def limit(self, compute_us: float, link_gb_per_s: float) -> float:
        """Microseconds of a perfect fusion."""
        exchanges = 2 if self.op == "matmul_all_reduce" else 1
        return limit_us(compute_us, self.exchanged, self.world, link_gb_per_s, exchanges)

    @property
    def roughly_us(self) -> float:
        return matmul_us(self.m, self.k, self.n)


@dataclass(frozen=True, kw_only=True)
class Row(Measured):
    """All that was measured of a cell. Compute is the matmul: `cublas`, and our own kernels on a group of
    one rank, by name."""

    cell: Cell
    link_gb_per_s: float
    predicted_fused_us: float | None = None
    predicted_apart_us: float | None = None

    derived: ClassVar[tuple[str, ...]] = (*Measured.derived, "predicted_us", "factor")

    @property
    def limit_us(self) -> float | None:
        return None if self.compute_us is None else self.cell.limit(self.compute_us, self.link_gb_per_s)

    @property
    def predicted_us(self) -> float | None:
        """For the way that was chosen."""
        return self.predicted_apart_us if self.way.startswith("cublas") else self.predicted_fused_us

    @property
    def factor(self) -> float | None:
        """Measured by predicted time."""
        return ratio(self.ours.us, self.predicted_us)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote; derived values are computed again."""
        return cls(cell=Cell(**data["cell"]), **cls.fields_of(data))


@dataclass(frozen=True)
class Sweep:
    """One fused way of a cell in several settings: orders, or numbers of programs."""

    cell: Cell
    way: str
    settings: Mapping[str, Timing]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sweep:
        return cls(Cell(**data["cell"]), data["way"], from_json(data["settings"]))


def cells(world: int, shape: str, tokens: tuple[int, ...], ops: tuple[str, ...]) -> list[Cell]:
    """The cells of a shape and these ops, the largest number of tokens first, so that memory grows once."""
    found = [Cell(op, shape, count, world) for count in sorted(tokens, reverse=True) for op in ops]
    return [cell for cell in found if cell.possible]


def check(shape: str, world: int, ops: tuple[str, ...] = ()) -> None:
    """ValueError for a shape that does not divide by the number of ranks."""
    n, k = extents(shape)
    for op in ops_of(shape, ops):
        name, length = ("N", n) if op == "matmul_all_gather" else ("K", k)
        if length % world:
            raise ValueError(
                f"{shape}: {world} ranks cannot share out {name} = {length}; "
                "start a number of ranks that divides it"
            )
