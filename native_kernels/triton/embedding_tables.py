"""What `embedding_exchange` must know of tables and bags, as int64 words in device memory, and how words get there.

    a source of rows   where they begin, columns, elements between two bags, 0             WORDS_SOURCE
    a table            address, rows, indices, their number, offsets, weights per sample,
                       elements between rows << 32 | columns, dtype << 32 | where its rows begin
                                                                                            WORDS_TABLE
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS_SOURCE, WORDS_TABLE = 4, 8

DTYPE_BITS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 4}
"""Of tables: the kernel is compiled for those that occur."""


@dataclass(frozen=True)
class Places:
    """Where rows lie in the output, in elements; the same order on all ranks.

    b: bags of a rank; starts, stride: where this rank's tables begin, and the next bag; sources: of every rank
    the first element, columns and elements between two bags; groups, group_stride: runs of all bags that
    a source has, one behind the other (layout "stbd": its tables).
    """

    b: int
    starts: tuple[int, ...]
    stride: int
    sources: tuple[tuple[int, int, int], ...]
    groups: int = 1
    group_stride: int = 0


@dataclass(frozen=True)
class Tables:
    """Tables and bags of one call. Lists have an entry a table; samples may be empty.

    weights[t]: [V, D], columns one behind the other; indices, offsets: contiguous, all int32 or all int64;
    samples[t]: weights per index, of the table's dtype. last: offsets have an entry behind the last bag. mode:
    0 sum, 1 mean, 2 max; padding < 0: none.
    """

    weights: Sequence[Tensor]
    indices: Sequence[Tensor]
    offsets: Sequence[Tensor]
    samples: Sequence[Tensor]
    mode: int = 0
    last: bool = False
    padding: int = -1

    @property
    def dims(self) -> list[int]:
        return [w.shape[1] for w in self.weights]

    def kinds(self) -> int:
        """The bits of all dtypes."""
        found = 0
        for w in self.weights:
            found |= DTYPE_BITS[w.dtype]
        return found

    def aligned(self) -> int:
        """Elements that may be read at once: all rows begin at multiples of them, and have so many columns."""
        found = 8
        for w in self.weights:
            found = math.gcd(found, w.data_ptr() // w.element_size(), w.shape[1], w.stride(0))
        return found

    def words(self, places: Places) -> list[int]:
        """As the kernel reads them."""
        found: list[int] = []
        for source in places.sources:
            found += (*source, 0)
        weighted = bool(self.samples)
        for t, (w, indices, offsets) in enumerate(zip(self.weights, self.indices, self.offsets, strict=True)):
            found += (
                w.data_ptr(),
                w.shape[0],
                indices.data_ptr(),
                indices.shape[0],
                offsets.data_ptr(),
                self.samples[t].data_ptr() if weighted else 0,
                w.stride(0) << 32 | w.shape[1],
                DTYPE_BITS[w.dtype] << 32 | places.starts[t],
            )
        return found


def words_needed(tables: int, world: int) -> int:
    return world * WORDS_SOURCE + tables * WORDS_TABLE


def place_aligned(places: Places, dims: Sequence[int], at: int) -> int:
    """Elements that may be written, and copied, at once, where the output is element `at` of memory."""
    found = math.gcd(8, at, places.stride, places.group_stride, *places.starts, *dims)
    for source in places.sources:
        found = math.gcd(found, *source)
    return found
