"""Widths of tiles: the fullest last wave, and which kernels have it among their configurations."""

import re

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given
from hypothesis import strategies as st

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.dense.ways import GATHER, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.dense.widths import columns_each, fullest

WIDTHS = 192, 160, 128, 96, 64


def names(op: str, m: int, k: int, n: int) -> set[str]:
    return set(ways_of(DenseProblem(op, m, k, n, 2, torch.bfloat16, programs=132)))


@given(st.integers(1, 64), st.lists(st.integers(8, 30000), min_size=1, max_size=3), st.integers(2, 148))
def test_the_fullest_width(rows: int, columns: list[int], programs: int) -> None:
    """No width leaves a program fewer columns, and all of them cover the whole result."""
    best = fullest(WIDTHS, rows, columns, programs)
    each = {width: columns_each(width, rows, columns, programs) for width in WIDTHS}
    assert each[best] == min(each.values())
    assert all(programs * found >= rows * sum(columns) for found in each.values())


def test_reductions_have_the_width_of_the_fullest_wave() -> None:
    """1024 x 5120 are two waves of 160 columns, three of 128; 256 x 4096 are one wave of 64."""
    assert {"words bn=160 once=1 across=2", "words bn=160 across=2"} <= names(REDUCE, 1024, 2560, 5120)
    assert "words bn=160 across=2" in names(SCATTER, 1024, 2560, 5120)
    # The rows of tiles are odd in number, so that blocks share no weight.
    assert "words bn=96" in names(SCATTER, 640, 264, 2056)
    assert not [name for name in names(SCATTER, 256, 2048, 4096) if re.search("bn=(96|160|192)", name)]
    assert "words bn=192" in names(SCATTER, 64, 1024, 18432)
    assert "clusters bn=192 stages=4" in names(SCATTER, 1024, 5376, 3072)


def test_gathers_have_the_width_of_the_fullest_wave() -> None:
    found = names(GATHER, 1024, 5120, 8960)
    assert {"clusters bn=192 stages=4 k_slices=8", "clusters bn=192 within=1 stages=4 copied=1"} <= found
    assert not any(re.search("bn=(160|192|224)", name) for name in names(GATHER, 1024, 4096, 2048))
    # 1024 x 2560 are one wave of 160 columns, 512 x 7168 one of 224.
    assert "clusters bn=160 stages=4 k_slices=8" in names(GATHER, 1024, 5120, 2560)
    assert "clusters bn=224 within=1 copied=1" in names(GATHER, 512, 4096, 7168)
