"""All ways to run embedding_bag_all_to_all on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.lowering.ops import embedding_layout
from autofuse.native_kernels.triton.embedding_tables import Places


def places_of(layout: str, rank: int, b: int, columns: Sequence[int], dims: Sequence[int]) -> Places:
    """Where the rows of all ranks lie in an output of `layout`; `dims` are those of this rank's tables."""
    starts, stride = embedding_layout.place(layout, rank, b, columns, dims)
    stacked = layout == "stbd"
    tables, dim = len(dims), dims[0]
    sources = []
    for source, cols in enumerate(columns):
        # A rank's own dims are of no matter here: a source has one run of columns, or tables of one dim.
        firsts, step = embedding_layout.place(layout, source, b, columns, dims[:1])
        sources.append((firsts[0], dim if stacked else cols, step))
    return Places(
        b, tuple(starts), stride, tuple(sources), tables if stacked else 1, b * dim if stacked else 0
    )


def send_places(rank: int, b: int, columns: Sequence[int], dims: Sequence[int]) -> Places:
    """Where this rank's rows lie in the part of a send buffer `[W, b, C]` that goes to one rank."""
    starts, _ = embedding_layout.place("sbc", 0, b, [columns[rank]], dims)
    return Places(b, tuple(starts), columns[rank], ((0, columns[rank], columns[rank]),) * len(columns))
