"""The places of the chunks and tiles of a dense plan, in matrices and in the buffers of the workspace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.lowering.plan import Action, Signal, Span, Tile, Wait

_ALIGN = 64  # a cache line


@dataclass(frozen=True, slots=True)
class Run:
    """Positions of one dim of a matrix: `count` stretches of `length` from `start` on, `stride` apart."""

    start: int
    length: int
    count: int = 1
    stride: int = 0

    def _view(self, t: Tensor, dim: int) -> Tensor:
        """The positions with `dim` split into (count, length); a view."""
        span = t.narrow(dim, self.start, (self.count - 1) * self.stride + self.length)
        return span.unfold(dim, self.length, self.stride).movedim(-1, dim + 1)

    def read(self, t: Tensor, dim: int) -> Tensor:
        """The positions along `dim` of `t`: a view of one stretch, a copy of several."""
        if self.count > 1:
            return self._view(t, dim).flatten(dim, dim + 1)
        return t if self.length == t.shape[dim] else t.narrow(dim, self.start, self.length)

    def read_operand(self, t: Tensor, dim: int) -> Tensor:
        """The part of an operand that broadcasts against the positions along `dim` of a matrix."""
        at = t.dim() - 2 + dim
        return t if at < 0 or t.shape[at] == 1 else self.read(t, at)

    def write(self, t: Tensor, dim: int, value: Tensor) -> None:
        """Stores `value` at the positions along `dim` of `t`."""
        if self.count > 1:
            self._view(t, dim).copy_(value.unflatten(dim, (self.count, self.length)))
        else:
            self.read(t, dim).copy_(value)


@dataclass(frozen=True, slots=True)
class Cut:
    """One dim of a matrix cut into a chunk per rank.

    `outer == 1`: chunk c is `[starts[c], starts[c + 1])`, ragged if need be. Otherwise the dim is
    `(outer, world, inner)` and the chunk is digit c of the middle, read as `(outer, inner)`.
    """

    outer: int
    world: int
    starts: tuple[int, ...]

    @classmethod
    def even(cls, length: int, world: int, outer: int = 1) -> "Cut":
        """Chunks whose lengths differ by at most one; all equal if `outer > 1` (which must divide)."""
        return cls(outer, world, tuple(length * c // world for c in range(world + 1)))

    @property
    def inner(self) -> int:
        return (self.starts[1] - self.starts[0]) // self.outer

    def length(self, chunk: int) -> int:
        return self.starts[chunk + 1] - self.starts[chunk]

    def run(self, chunk: int, span: Span) -> Run:
        """Where positions `span` of `chunk` lie; a span crosses stretches only as a multiple of them."""
        if self.outer == 1:
            return Run(self.starts[chunk] + span.start, len(span))
        inner, stride = self.inner, self.inner * self.world
        start = span.start // inner * stride + chunk * inner + span.start % inner
        if len(span) <= inner:
            return Run(start, len(span))
        return Run(start, inner, len(span) // inner, stride)

    def block(self, tiles: int) -> int:
        """A block length that cuts a chunk into about `tiles` tiles of whole stretches."""
        longest = max(self.length(c) for c in range(self.world))
        if self.outer == 1:
            return max(1, -(-longest // tiles))
        return max(1, self.inner * -(-self.outer // tiles))


def with_tiles(actions: Sequence[Action]) -> Iterator[tuple[Action, int]]:
    """Every action with the index of its tile; for a wait, of the first tile that it waits for."""
    index = -1
    pairs: list[tuple[Action, int]] = []
    for action in reversed(actions):
        if not isinstance(action, (Signal, Wait)):
            index = action.tile.index
        pairs.append((action, index))
    return reversed(pairs)


class Buffer:
    """Offsets of tiles in a workspace buffer: `sources` slots, in each the tiles of the largest chunk.

    Tiles lie one after another, each contiguous, so that a tile is one block of memory on every rank.
    """

    def __init__(self, base: int, sources: int, chunks: list[tuple[Tile, ...]], dtype: torch.dtype) -> None:
        self.base, self.dtype = base, dtype
        self._offsets: list[list[int]] = []
        self.slot = 0
        for tiles in chunks:
            at, offsets = 0, []
            for tile in tiles:
                offsets.append(at)
                at += -(-tile.size * dtype.itemsize // _ALIGN) * _ALIGN
            self._offsets.append(offsets)
            self.slot = max(self.slot, at)
        self.end = base + sources * self.slot

    def offset(self, tile: Tile, source: int) -> int:
        return self.base + source * self.slot + self._offsets[tile.chunk][tile.index]
