"""The places of pooled rows and of their gradients, in every layout of the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autofuse.lowering.reference import embedding_layout
from autofuse.native_kernels.triton.embedding_tables import Places


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
    """The places of the gradients for each rank in a gradient of `layout`, and those of this rank's tables in
    `[B, C]`."""
    starts, stride = embedding_layout.place("sbc", 0, b, [columns[rank]], dims)
    return replace(places_of(layout, rank, b, columns, dims), starts=tuple(starts), stride=stride)
