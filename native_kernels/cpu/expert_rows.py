"""Finds where rows of experts lie in the parts of an exchanged buffer, and scatters rows. On one thread."""

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import function

_OUTSIDE, _REPEATED, _DISTINCT = range(3)

# sort(positions, number, ends of parts, parts, rows, places, bounds) -> one of the above
_sort = function("af_sort_rows", c_int, [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p])
# runs(positions or None, ends of parts, ends of experts, experts, limit, runs) -> number of runs, or -1
_runs = function("af_find_runs", c_int64, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p])
_scatter_rows = function("af_scatter_rows", None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64])

_WORDS = 5  # of a run


def sort_rows(positions: Tensor, ends: Sequence[int]) -> tuple[bool, Tensor, Tensor, list[int]]:
    """Whether all positions differ; the rows sorted stably by part; the position of each in its part; where
    the rows of each part start in these two, with the end. Part p ends at position `ends[p]`.

    positions: int64 `[rows]`, contiguous. Raises IndexError for one that is not in `[0, ends[-1])`.
    """
    rows, places = torch.empty_like(positions), torch.empty_like(positions)
    bounds = (c_int64 * (len(ends) + 1))()
    found = _sort(
        positions.data_ptr(), positions.shape[0], (c_int64 * len(ends))(*ends), len(ends),
        rows.data_ptr(), places.data_ptr(), bounds,
    )  # fmt: skip
    if found == _OUTSIDE:
        raise IndexError(f"a position is not in [0, {ends[-1]})")
    return found == _DISTINCT, rows, places, list(bounds)


def find_runs(
    positions: Tensor | None, ends: Sequence[int], expert_ends: Sequence[int], limit: int
) -> list[list[int]] | None:
    """Runs of rows of one expert that follow each other in one part, as `[part, expert, row of the expert,
    length, position in the part]`, in the order of rows. None if they are more than `limit`.

    Row i lies at `positions[i]`, absent: i; positions are as `sort_rows` takes them.
    """
    found = (c_int64 * (_WORDS * limit))()
    count = _runs(
        None if positions is None else positions.data_ptr(), (c_int64 * len(ends))(*ends),
        (c_int64 * len(expert_ends))(*expert_ends), len(expert_ends), limit, found,
    )  # fmt: skip
    return None if count < 0 else [found[i : i + _WORDS] for i in range(0, _WORDS * count, _WORDS)]


def scatter_rows(to: Tensor, positions: Tensor, source: Tensor, rows: Tensor) -> None:
    """`to[positions[i]] = source[rows[i]]`; int64 indices, contiguous matrices of one dtype and width."""
    nbytes = source.shape[1] * source.dtype.itemsize
    _scatter_rows(
        to.data_ptr(), positions.data_ptr(), source.data_ptr(), rows.data_ptr(), rows.shape[0], nbytes
    )
