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
    """Count an item of slice number `slot`: step * slices + slice, for the rank behind step others. items:
    of all slices for a rank; first_signal: the counters of peers, those of this rank are the `rank`-th."""
    piece, to = slot % slices, (rank + 1 + slot // slices) % W
    count = tl.minimum(slice_items, items - piece * slice_items)
    count_and_signal(done + slot, count, signals + to, 1, first_signal + rank * slices + piece, -1)


@triton.jit
def count_for_all(done, signals, item, items, slice_items, skip, first_signal, W: tl.constexpr):
    """Count an item that is stored in the memory of all ranks. first_signal: the counter of slice 0 of this
    rank, which all have but `skip`."""
    piece = item // slice_items
    count = tl.minimum(slice_items, items - piece * slice_items)
    count_and_signal(done + piece, count, signals, W, first_signal + piece, skip)


@triton.jit
def clear(counters, count, BLOCK: tl.constexpr):
    for at in range(0, count, BLOCK):
        o = at + tl.arange(0, BLOCK)
        tl.store(counters + o, 0, mask=o < count)
