"""Widths of the tiles of a matmul. The width decides how full the last wave of tiles is."""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.native_kernels.gpu.memory import cdiv

CLUSTER_WIDTHS = 256, 128, 192
"""Columns of tiles of reductions that run in any number of waves, the preferred width first."""
GATHER_WIDTHS = *CLUSTER_WIDTHS, 224, 160
"""Columns of tiles of gathers. A gather may store the last box of a tile over half of the box before it."""


def tiles_across(width: int, columns: Sequence[int]) -> int:
    """How many tiles of this width lie in a row of the products with all weights, of so many columns each."""
    return sum(cdiv(n, width) for n in columns)


def columns_each(width: int, rows: int, columns: Sequence[int], programs: int) -> int:
    """Columns that a program multiplies one after another: its waves of tiles times their width.

    rows: the number of rows of tiles; columns: those of each weight; programs: how many run at once.
    """
    return cdiv(rows * tiles_across(width, columns), programs) * width


def fullest(widths: Sequence[int], rows: int, columns: Sequence[int], programs: int) -> int:
    """The width with which programs multiply the fewest columns; the first one of several."""
    return min(widths, key=lambda width: columns_each(width, rows, columns, programs))
