"""The closed forms of `native_kernels/cuda/include/ragged_order.cuh`, run by the host's compiler."""

import ctypes
import random
import subprocess
from collections import Counter
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest

from autofuse.native_kernels.cuda.host.compiler import INCLUDE

SOURCE = """
#include "ragged_order.cuh"
extern "C" {
int high(int rows, int across, int height) { return high_of(rows, across, height); }
void ragged(int* out, int t, int m, int n, const int* starts, const int* highs, int count, int cols,
            int across, int along, int height) {
    Tile tile = ragged_tile_at(t, m, n, starts, highs, count, cols, across, along, height);
    out[0] = tile.owner, out[1] = tile.row, out[2] = tile.col;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("order") / "order.so"
    source: Path = built.with_suffix(".cpp")
    source.write_text(SOURCE)
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{INCLUDE}", str(source), "-o", str(built)], check=True
    )
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("height", [32, 128])
@pytest.mark.parametrize("across", [1, 2, 4])
@pytest.mark.parametrize("along", [1, 2])
@pytest.mark.parametrize("experts", [1, 2, 9, 64])
def test_every_row_of_every_expert_once(
    library: ctypes.CDLL, experts: int, along: int, across: int, height: int
) -> None:
    draw = random.Random(experts)
    loads = [[0] * experts, [1] * experts, [0] * (experts - 1) + [700], [700] + [0] * (experts - 1)]
    loads += [[draw.choice((0, 0, 1, 127, 128, 129, 300, 5000)) for _ in range(experts)] for _ in range(8)]
    for rows, none in product(loads, (0, 5)):
        check(library, [*rows, none], draw.choice((1, 3, 4)), across, along, height)


def check(library: ctypes.CDLL, rows: list[int], cols: int, across: int, along: int, height: int) -> None:
    """`rows` of each expert, and of none."""
    starts = [0, *accumulate(rows)]
    highs = [0, *accumulate(library.high(n, across, height) for n in rows)]
    numbers = [(ctypes.c_int * len(of))(*of) for of in (starts, highs)]
    wide, out = -(-cols // along), (ctypes.c_int * 3)()
    computed: Counter[tuple[int, int, int]] = Counter()
    visited = []
    for t in range(highs[-1] * wide):
        whose = set()
        for m, n in product(range(across), range(along)):
            library.ragged(out, t, m, n, *numbers, len(rows), cols, across, along, height)
            expert, first, col = out
            whose.add(expert)
            assert starts[expert] <= first
            if col < cols and first < starts[expert + 1]:
                computed[expert, first, col] += 1
        assert len(whose) == 1, "blocks that share a weight work on one expert"
        visited += whose
    assert visited == sorted(visited)
    every = [
        (e, row, col)
        for e, (start, stop) in enumerate(pairwise(starts))
        for row in range(start, stop, height)
        for col in range(cols)
    ]
    assert computed == Counter(every)
