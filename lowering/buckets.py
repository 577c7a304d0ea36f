"""How the elements of many tensors are shared out: buckets, owners, pieces, tiles, segments.

The elements of all tensors are counted one tensor after another. Each tensor is cut into *buckets* of at most
1024 elements. Rank r owns the run of buckets `[starts[r], starts[r + 1])`, of nearly equally many elements. A
*piece* is as much of every owner's run as one call exchanges; chunk c of its plan is the part of owner c. A
*segment* is the part of a tile that lies in one tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

BUCKET = 1024


class Segment(NamedTuple):
    """Elements `[start, start + length)` of a tensor. They begin at element `at` of the range that was asked
    for."""

    tensor: int
    start: int
    length: int
    at: int


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets of tensors with `numels` elements, shared out to `world` owners. bucket: most elements of
    one.

    Only `buckets_of` makes it, so tables are compared by identity: there may be thousands of tensors.
    """

    numels: tuple[int, ...]
    world: int
    bucket: int = BUCKET

    def __reduce__(self) -> tuple[Any, ...]:
        return buckets_of, (self.numels, self.world, self.bucket)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins; the last entry is the number of all elements."""
        return [0, *accumulate(self.numels)]

    @cached_property
    def starts(self) -> list[int]:
        """Where the run of each owner begins; the last entry is the number of all elements."""
        total = self.offsets[-1]
        return [self._whole(total * r // self.world) for r in range(self.world)] + [total]

    def _whole(self, position: int) -> int:
        """The end of the bucket that `position` lies in, or `position` if a bucket begins there."""
        if position >= self.offsets[-1]:
            return self.offsets[-1]
        tensor = bisect_right(self.offsets, position) - 1
        first, end = self.offsets[tensor : tensor + 2]
        return min(end, first + -(-(position - first) // self.bucket) * self.bucket)

    def owned(self, rank: int) -> int:
        """Number of elements that `rank` owns."""
        return self.starts[rank + 1] - self.starts[rank]

    def part(self, rank: int, tensor: int) -> tuple[int, int]:
        """The elements `[start, stop)` of a tensor that `rank` owns; `(0, 0)` if there are none."""
        first, end = self.offsets[tensor : tensor + 2]
        start, stop = max(first, self.starts[rank]), min(end, self.starts[rank + 1])
        return (start - first, stop - first) if start < stop else (0, 0)

    def pieces(self, most: int) -> list[tuple[int, ...]]:
        """Pieces of at most `most` elements an owner: the number of elements of each owner. At least one."""
        longest = max(self.owned(r) for r in range(self.world))
        return [
            tuple(min(max(0, self.owned(r) - at), most) for r in range(self.world))
            for at in range(0, max(1, longest), most)
        ]

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """The segments of elements `[start, stop)`, counted over all tensors."""
        tensor = max(0, bisect_right(self.offsets, start) - 1)
        at = start
        while at < stop:
            first, end = self.offsets[tensor : tensor + 2]
            count = min(end, stop) - at
            if count > 0:
                yield Segment(tensor, at - first, count, at - start)
                at += count
            tensor += 1


@lru_cache(maxsize=256)
def buckets_of(numels: tuple[int, ...], world: int, bucket: int = BUCKET) -> Buckets:
    """The table, which is made once. With buckets of one element, each owner of a tensor of `world * n`
    elements has `n` of them."""
    return Buckets(numels, world, bucket)
