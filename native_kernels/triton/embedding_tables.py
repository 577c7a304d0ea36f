"""Descriptors of tables and bags for `embedding_exchange` and `embedding_backward`, and their configurations.

Number of int64 words, in device memory, of each descriptor, and their content:
WORDS_SOURCE   a source of rows: where they begin, columns, elements between two bags, 0
WORDS_TABLE    a table: address, rows, indices, number of indices, offsets, weights per sample,
               elements between rows << 32 | columns, dtype << 32 | where its rows begin
WORDS_WORK     the work before a table, and of all tables: entries, keys, blocks of strips, chunks
WORDS_UPDATE   the update of a table, if there is one: addresses of state and rates
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from autofuse.native_kernels.gpu.memory import LONGEST_ROW, Need, cdiv

WORDS_SOURCE, WORDS_TABLE, WORDS_WORK, WORDS_UPDATE = 4, 8, 4, 2

MOST_BAGS = 32
"""Most bags of an item; the bags of a slice are a multiple, since ranks have items of different sizes."""

DTYPE_BITS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 4}
"""Of tables: the kernel is compiled for those that occur."""


@dataclass(frozen=True)
class Places:
    """Where rows lie in the output, in elements; the same order on all ranks.

    b: bags of a rank; starts, stride: where this rank's tables begin, and elements between two bags; sources:
    of every rank the first element, columns and elements between two bags; groups: runs of bags of a source
    (layout "stbd": one a table); group_stride: elements between two runs.
    """

    b: int
    starts: tuple[int, ...]
    stride: int
    sources: tuple[tuple[int, int, int], ...]
    groups: int = 1
    group_stride: int = 0


@dataclass(frozen=True)
class Tables:
    """Tables and bags of one call. Lists have an entry for each table; samples may be empty.

    weights[t]: [V, D], columns one behind the other; indices, offsets: contiguous, all int32 or all int64;
    samples[t]: weights per index, of the table's dtype. last: offsets have an entry behind the last bag.
    mode: 0 sum, 1 mean, 2 max; padding < 0: none. rates[t]: fp32 [2], lr and eps, of tables that the backward
    updates; states[t]: fp32 [V], by rowwise Adagrad.
    """

    weights: Sequence[Tensor]
    indices: Sequence[Tensor]
    offsets: Sequence[Tensor]
    samples: Sequence[Tensor]
    mode: int = 0
    last: bool = False
    padding: int = -1
    states: Sequence[Tensor] = ()
    rates: Sequence[Tensor] = ()

    @property
    def update(self) -> int:
        """The rule that the backward applies to sums: 0 stores them, 1 SGD, 2 rowwise Adagrad."""
        return 1 + bool(self.states) if self.rates else 0

    @cached_property
    def dims(self) -> list[int]:
        return [w.size(1) for w in self.weights]

    def kinds(self) -> int:
        """The bits of all dtypes."""
        found = 0
        for w in self.weights:
            found |= DTYPE_BITS[w.dtype]
        return found

    def aligned(self) -> int:
        """Elements that may be read at once: rows begin and end at multiples of them."""
        return math.gcd(
            8, *self.dims, *(n for w in self.weights for n in (w.data_ptr() // w.element_size(), w.stride(0)))
        )

    def words(self, places: Places) -> list[int]:
        """The descriptors as the kernel reads them."""
        found: list[int] = []
        for source in places.sources:
            found += (*source, 0)
        samples = [s.data_ptr() for s in self.samples] or [0] * len(self.weights)
        lists = self.weights, self.indices, self.offsets, samples, self.dims, places.starts
        for w, indices, offsets, sample, dim, start in zip(*lists, strict=True):
            found += (
                w.data_ptr(),
                w.size(0),
                indices.data_ptr(),
                indices.numel(),
                offsets.data_ptr(),
                sample,
                w.stride(0) << 32 | dim,
                DTYPE_BITS[w.dtype] << 32 | start,
            )
        return found


def place_aligned(places: Places, dims: Sequence[int], at: int) -> int:
    """Elements that may be written and copied at once, if the output begins at element `at` of memory."""
    found = math.gcd(8, at, places.stride, places.group_stride, *places.starts, *dims)
    for source in places.sources:
        found = math.gcd(found, *source)
    return found


class Tiles:
    """The base of configurations whose programs share a multiprocessor."""

    tile: int
    warps: int
    per_sm: int

    @property
    def registers(self) -> int:
        """Registers of a thread, so that all programs of a multiprocessor run at once."""
        return min(255, 65536 // (32 * self.warps * self.per_sm) // 8 * 8)

    def columns(self, dims: Sequence[int]) -> int:
        """Columns of a tile: those of the widest table, if they fit."""
        return min(self.tile, whole(dims))


def whole(dims: Sequence[int]) -> int:
    """The columns of the widest table, rounded up to a power of two."""
    return 1 << (max(1, *dims) - 1).bit_length()


@dataclass(frozen=True)
class BagsConfig(Tiles):
    """The configuration of `embedding_exchange`.

    tile: elements that a program pools at once, a power of two; unroll: rows of a bag that it reads at once;
    per_sm: programs of a multiprocessor; slice_kib: KiB of rows that one signal covers, about; copying:
    programs of a multiprocessor that only copy what arrives, 0 if all copy at the end; mixed: bags for all
    ranks in turn, this rank included.
    """

    tile: int = 1024
    unroll: int = 4
    warps: int = 4
    per_sm: int = 8
    slice_kib: int = 512
    copying: int = 0
    mixed: bool = False

    def slice_bags(self, places: Places, itemsize: int) -> int:
        """Bags of a slice, the same on all ranks, whatever the dims of their own tables."""
        row = max(1, *(cols * places.groups for _, cols, _ in places.sources)) * itemsize
        return max(1, self.slice_kib * 1024 // (row * MOST_BAGS)) * MOST_BAGS


def exchange_needs(places: Places, itemsize: int, world: int, config: BagsConfig) -> Need:
    """The memory that a call of `embedding_exchange` needs."""
    elements = sum(places.b * cols * places.groups for _, cols, _ in places.sources)
    slices = cdiv(places.b, config.slice_bags(places, itemsize))
    return Need(
        inbox=2 * (elements * itemsize + LONGEST_ROW), signals=2 * 4 * world * slices, done=world * slices
    )


@dataclass(frozen=True)
class BackwardConfig(Tiles):
    """The configuration of `embedding_backward`.

    tile: elements that a program adds up at once, a power of two; strip: entries that it adds one after
    another, a multiple of 4; per_sm: programs of a multiprocessor; adding: programs that add, 0 for all.
    """

    tile: int = 1024
    strip: int = 64
    warps: int = 4
    per_sm: int = 4
    adding: int = 0

    @property
    def chunk(self) -> int:
        """Elements that a program sets to 0, or copies, at once."""
        return 8 * self.tile

    def width(self, tables: Tables) -> int:
        """Columns of a tile. Adagrad needs whole rows, however wide: registers are then spilled."""
        return self.columns(tables.dims) if not tables.states else whole(tables.dims)

    def strips(self, tables: Tables) -> int:
        """Of a block, which a program walks along at once; half as many for Adagrad: it takes registers."""
        return max(1, self.tile // self.width(tables) // (2 if tables.states else 1))

    def blocks(self, tables: Tables) -> list[int]:
        """Of each table."""
        return [cdiv(i.shape[0], self.strip * self.strips(tables)) for i in tables.indices]

    def chunks(self, tables: Tables) -> list[int]:
        """Of the gradient of each table."""
        return [cdiv(w.numel(), self.chunk) for w in tables.weights]


def backward_words(tables: Tables, places: Places, config: BackwardConfig) -> list[int]:
    """The descriptors as the kernel reads them. tables: the gradients, or the tables to update; places:
    of their columns in G, and of each rank's part in the gradient of the output."""
    entries = [i.shape[0] for i in tables.indices]
    keys = [w.shape[0] + 1 for w in tables.weights]
    counts = (entries, keys, config.blocks(tables), config.chunks(tables))
    before = [accumulate(count, initial=0) for count in counts]
    work = (word for table in zip(*before, strict=True) for word in table)
    states = [s.data_ptr() for s in tables.states] or [0] * len(tables.rates)
    rules = zip(states, (r.data_ptr() for r in tables.rates), strict=True)
    return [*tables.words(places), *work, *(word for rule in rules for word in rule)]


def backward_needs(b: int, columns: Sequence[int], itemsize: int) -> Need:
    """The memory that a call of `embedding_backward` needs."""
    world = len(columns)
    nbytes = world * b * max(1, *columns) * itemsize
    return Need(inbox=2 * (nbytes + LONGEST_ROW), signals=2 * 4 * world, done=world)
