"""Slices: items that one signal covers. Programs count the items that they have stored, and the program that
counts the last item of a slice signals.

count_item       an item for one rank, which is signalled
count_for_all    an item for all ranks
clear            set counters to 0 at the end of a call

A rank has a counter of its own for each slice, behind `done`. A rank that is signalled has one for each slice
of each source.
"""

import triton
import triton.language as tl

from .comm import count_and_signal


@triton.jit
def count_item(done, signals, slot, items, slice_items, slices, rank, first_signal, W: tl.constexpr):
    """Count an item of slice `slot % slices` for rank `(rank + 1 + slot // slices) % W`.

    items: of all slices for one rank; slice_items: of a slice, fewer in the last one; first_signal: the
    number of the first counter at a peer, which has `slices` counters for each source.
    """
    piece, to = slot % slices, (rank + 1 + slot // slices) % W
    count = tl.minimum(slice_items, items - piece * slice_items)
    count_and_signal(done + slot, count, signals + to, 1, first_signal + rank * slices + piece, -1)


@triton.jit
def count_for_all(done, signals, item, items, slice_items, skip, first_signal, W: tl.constexpr):
    """Count an item that is stored in the memory of all ranks. skip: a rank that is not signalled, or -1;
    first_signal: the number of the counter at a peer for slice 0 of this rank."""
    piece = item // slice_items
    count = tl.minimum(slice_items, items - piece * slice_items)
    count_and_signal(done + piece, count, signals, W, first_signal + piece, skip)


@triton.jit
def clear(counters, count, BLOCK: tl.constexpr):
    for at in range(0, count, BLOCK):
        o = at + tl.arange(0, BLOCK)
        tl.store(counters + o, 0, mask=o < count)
