"""The closed forms of `cuda/include/order.cuh`, run by the host's compiler, for every small shape."""

import ctypes
import subprocess
from itertools import product
from pathlib import Path

import pytest

from autofuse.native_kernels.cuda.host.compiler import INCLUDE

from . import test_order

WORLDS = (1, 2, 3, 4, 8)
ORDERS = {"direct": 0, "ring": 1, "oblivious": 2}
SOURCE = """
#include "order.cuh"
extern "C" {
void tile(int* out, int t, int m, int n, int rank, int world, int rows, int cols, int visit, int across,
          int along, int order) {
    Tile tile = tile_at(t, m, n, rank, world, rows, cols, visit, across, along, order);
    out[0] = tile.owner, out[1] = tile.row, out[2] = tile.col;
}
int number(int row, int col, int rows, int cols) { return chunk_number_of(row, col, rows, cols); }
void gathered(int* out, int t, int m, int n, int rank, int world, int rows, int cols, int slice_rows,
              int across, int along, int within) {
    Tile tile = gathered_tile_at(t, m, n, rank, world, rows, cols, slice_rows, across, along, within);
    out[0] = tile.owner, out[1] = tile.row, out[2] = tile.col;
}
}
"""

Tile = tuple[int, int, int]
plain = test_order.plain


class Order:
    """`order.cuh`, callable."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.number = library.number

    def __call__(self, function: str, *args: int) -> Tile:
        out = (ctypes.c_int * 3)()
        getattr(self._library, function)(out, *args)
        return out[0], out[1], out[2]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    built = tmp_path_factory.mktemp("order") / "order.so"
    source: Path = built.with_suffix(".cpp")
    source.write_text(SOURCE)
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{INCLUDE}", str(source), "-o", str(built)], check=True
    )
    return Order(ctypes.CDLL(str(built)))


@pytest.mark.parametrize("named", ORDERS)
@pytest.mark.parametrize("world", WORLDS)
def test_single_blocks_go_as_triton_programs(order: Order, world: int, named: str) -> None:
    for rank, rows, cols, visit in product(range(world), (1, 2, 17), (1, 3), (1, 2, 64)):
        for t in range(world * rows * cols):
            got = order("tile", t, 0, 0, rank, world, rows, cols, visit, 1, 1, ORDERS[named])
            assert got == test_order.gemm.tile_at(t, rank, world, rows, cols, visit, ORDERS[named])


@pytest.mark.parametrize("named", ORDERS)
@pytest.mark.parametrize(
    ("world", "across", "along"), [(2, 2, 1), (4, 2, 1), (4, 4, 2), (8, 2, 4), (3, 1, 2)]
)
def test_clusters_compute_every_tile_once(
    order: Order, world: int, across: int, along: int, named: str
) -> None:
    """Blocks of a cluster that share a block of the weight work at one place, for as many owners."""
    for rank, rows, cols, visit in product(range(world), (1, 2, 17), (1, 3, 4), (1, 3, 64)):
        seen = []
        for t in range(world // across * rows * -(-cols // along)):
            tiles = {
                (m, n): order("tile", t, m, n, rank, world, rows, cols, visit, across, along, ORDERS[named])
                for m, n in product(range(across), range(along))
            }
            for (m, n), (owner, row, col) in tiles.items():
                assert (row, col) == (tiles[0, n][1], tiles[0, 0][2] + n)
                assert (owner, row) == tiles[m, 0][:2]
            seen += tiles.values()
        whole = -(-cols // along) * along  # the last cluster may reach beyond
        assert sorted(seen) == [*product(range(world), range(rows), range(whole))]


@pytest.mark.parametrize("named", ORDERS)
@pytest.mark.parametrize("across", [1, 2, 4])
def test_tiles_of_a_chunk_are_numbered_as_they_are_computed(order: Order, across: int, named: str) -> None:
    """So that each slice of a chunk is complete before the next."""
    for rank, rows, cols, visit in product(range(4), (1, 2, 17), (1, 3), (1, 2, 64)):
        numbers: dict[int, list[int]] = {}
        for t, m in product(range(4 // across * rows * cols), range(across)):
            owner, row, col = order("tile", t, m, 0, rank, 4, rows, cols, visit, across, 1, ORDERS[named])
            numbers.setdefault(owner, []).append(order.number(row, col, rows, cols))
        assert numbers == {owner: [*range(rows * cols)] for owner in range(4)}


@pytest.mark.parametrize(
    ("world", "across", "along", "within"),
    [
        (1, 2, 1, 1),
        (2, 1, 1, 0),
        (2, 2, 1, 0),
        (3, 1, 2, 0),
        (4, 2, 1, 1),
        (4, 4, 2, 0),
        (8, 2, 4, 1),
        (8, 2, 1, 0),
    ],
)
def test_gathered_tiles_come_as_parts_arrive(
    order: Order, world: int, across: int, along: int, within: int
) -> None:
    for rank, rows, cols, slice_rows in product(range(world), (1, 2, 4, 18), (1, 3, 4), (1, 2, 4, 18)):
        high = -(-rows // across) if within else rows
        groups = world if within else world // across
        seen: list[Tile] = []
        starts: list[tuple[int, int]] = []
        for t in range(groups * high * -(-cols // along)):
            for m, n in product(range(across), range(along)):
                source, row, col = order(
                    "gathered", t, m, n, rank, world, rows, cols, slice_rows, across, along, within
                )
                seen.append((source, row, col))
                if m == n == 0:
                    step = -(-slice_rows // across) * across if within else slice_rows
                    group = (rank - source) % world // (1 if within else across)
                    starts.append((row // step, group) if group else (-1, 0))
        tall = high * across if within else rows
        whole = -(-cols // along) * along
        assert sorted(seen) == [*product(range(world), range(tall), range(whole))]
        assert starts == sorted(starts)  # own part, then slice by slice, the nearest source first
