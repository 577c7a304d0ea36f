"""Widths of tiles of a matmul: the last wave of tiles is fuller with some than with others."""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.native_kernels.gpu.memory import cdiv


def columns_each(width: int, rows: int, columns: Sequence[int], programs: int) -> int:
    """Columns that a program multiplies one after another: its waves of tiles times their width.

    rows: of tiles; columns: of each weight; programs: that run at once.
    """
    return cdiv(rows * sum(cdiv(n, width) for n in columns), programs) * width


def fullest(widths: Sequence[int], rows: int, columns: Sequence[int], programs: int) -> int:
    """The width with which programs multiply the fewest columns; the first one of several."""
    return min(widths, key=lambda width: columns_each(width, rows, columns, programs))
