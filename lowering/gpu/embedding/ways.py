"""All ways to run embedding_bag_all_to_all and its backward, with updates of tables or without, on GPUs.

They have names, equal on all ranks and in every table.

Whether one can run depends on nothing but what is equal on all ranks, not on their own tables, dims
or indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch

from autofuse.lowering.gpu.dense.ways import MOST_BYTES, settings_of
from autofuse.lowering.reference import embedding_layout
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.embedding_tables import (
    DTYPE_BITS,
    BackwardConfig,
    BagsConfig,
    Places,
    backward_needs,
    exchange_needs,
)

OP = "embedding_bag_all_to_all"
BACKWARD = "all_to_all_embedding_bag_backward"
UPDATE = "all_to_all_embedding_bag_update"

TORCH_NCCL = "torch+nccl"
"""What the op replaces: kernels for every table, a collective and a copy."""

MERGED_NCCL = "merged+nccl"
"""All tables in one kernel, and the collective with a copy."""

ExchangeConfig: TypeAlias = BagsConfig | BackwardConfig


@dataclass(frozen=True)
class ExchangeProblem:
    """A call: `b` bags a rank, `columns[r]` of rank r. dtype: of the exchange; programs: multiprocessors."""

    b: int
    columns: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    programs: int = 132
    op: str = OP

    k = 1  # so that a table of dense points has room for it: m bags in all, n columns a rank

    @property
    def world(self) -> int:
        return len(self.columns)

    @property
    def m(self) -> int:
        return self.b * self.world

    @property
    def n(self) -> int:
        return max(1, *self.columns)


@lru_cache(maxsize=1024)
def exchange_ways(problem: ExchangeProblem) -> Mapping[str, ExchangeConfig | None]:
    """Names of all ways that can run, with the configurations of the kernel."""
    found: dict[str, ExchangeConfig | None] = {TORCH_NCCL: None}
    backward = problem.op != OP
    columns = problem.world * problem.n if backward else sum(problem.columns)
    nbytes = problem.b * columns * problem.dtype.itemsize
    if (
        problem.dtype in DTYPE_BITS
        and problem.b * sum(problem.columns) > 0
        and 2 * nbytes < MOST_BYTES
        and problem.world <= 8
    ):
        if backward:
            found[MERGED_NCCL] = BackwardConfig()
            found |= {settings_of("strips", config): config for config in _backward_configs()}
        else:
            found[MERGED_NCCL] = BagsConfig()
            found |= {settings_of("bags", config): config for config in _configs()}
    return found


def _configs() -> Iterator[BagsConfig]:
    """Differ in how many rows are on their way in a multiprocessor, and to how many threads."""
    yield BagsConfig()
    yield BagsConfig(tile=256, unroll=8, warps=1, per_sm=32)
    yield BagsConfig(tile=2048, unroll=2, per_sm=6)
    yield BagsConfig(slice_kib=2048)
    # Where the link is what is slow, what needs none goes on beside it.
    yield BagsConfig(tile=2048, unroll=2, per_sm=6, mixed=True)
    yield BagsConfig(tile=2048, unroll=2, per_sm=6, copying=1, mixed=True)


def _backward_configs() -> Iterator[BackwardConfig]:
    """Differ in how many rows are on their way, and how many of one index are added one after another."""
    yield BackwardConfig()
    yield BackwardConfig(strip=16)
    yield BackwardConfig(tile=512, warps=2, per_sm=8)
    yield BackwardConfig(tile=512, strip=16, warps=2, per_sm=8)
    yield BackwardConfig(tile=2048, strip=32, warps=8, per_sm=2)


def exchange_needs_of(config: ExchangeConfig, problem: ExchangeProblem) -> Need:
    """The memory that a fused way uses."""
    if isinstance(config, BackwardConfig):
        return backward_needs(problem.b, problem.columns, problem.dtype.itemsize)
    # Of dims only their sum matters, and it is the same on all ranks where the layout has more than columns.
    places = places_of("bsc", 0, problem.b, problem.columns, [problem.columns[0]])
    return exchange_needs(places, problem.dtype.itemsize, problem.world, config)


def places_of(layout: str, rank: int, b: int, columns: Sequence[int], dims: Sequence[int]) -> Places:
    """Where the rows of all ranks lie in an output of `layout`; `dims` are those of this rank's tables."""
    starts, stride = embedding_layout.place(layout, rank, b, columns, dims)
    stacked = layout == "stbd"
    sources = []
    for source, cols in enumerate(columns):
        # A source has one run of columns, or tables of one dim, whatever the dims of this rank.
        firsts, step = embedding_layout.place(layout, source, b, columns, dims[:1])
        sources.append((firsts[0], dims[0] if stacked else cols, step))
    groups, group_stride = (len(dims), b * dims[0]) if stacked else (1, 0)
    return Places(b, tuple(starts), stride, tuple(sources), groups, group_stride)


def send_places(rank: int, b: int, columns: Sequence[int], dims: Sequence[int]) -> Places:
    """Where this rank's rows lie in the part of a send buffer `[W, b, C]` that goes to one rank."""
    starts, _ = embedding_layout.place("sbc", 0, b, [columns[rank]], dims)
    return Places(b, tuple(starts), columns[rank], ((0, columns[rank], columns[rank]),) * len(columns))


def backward_places(layout: str, rank: int, b: int, columns: Sequence[int], dims: Sequence[int]) -> Places:
    """Where what goes to each rank lies in a gradient of `layout`, and this rank's tables in `[B, C]`."""
    starts, stride = embedding_layout.place("sbc", 0, b, [columns[rank]], dims)
    return replace(places_of(layout, rank, b, columns, dims), starts=tuple(starts), stride=stride)
