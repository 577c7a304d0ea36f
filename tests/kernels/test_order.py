"""The closed forms of `gemm`, which the kernels run, against the plans, for every small shape."""

from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import pytest

from autofuse.lowering.orders import make_plan
from autofuse.lowering.plan import Compute
from autofuse.native_kernels.triton import gemm

ORDERS = {"direct": gemm.DIRECT, "ring": gemm.RING, "oblivious": gemm.OBLIVIOUS}
WORLDS = (1, 2, 3, 4, 8)


class Numbers:
    """What the closed forms use of `triton.language`, on plain numbers."""

    minimum = staticmethod(min)


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """The closed forms as functions of numbers; each finds the others by their names."""
    functions = {f: getattr(gemm, f).fn for f in ("owner_at", "tile_at", "chunk_tile_at")}
    with patch.multiple(gemm, tl=Numbers, GROUP=gemm.GROUP.value, **functions):
        yield


def planned(op: str, order: str, world: int, rank: int, tiles: int, visit: int) -> list[tuple[int, int]]:
    """(owner, number of the tile in its chunk) in the sequence in which a plan computes."""
    plan = make_plan(op, order, world, rank, ((tiles, 1),) * world, (1, 1), visit=visit)
    return [(a.tile.chunk, a.tile.index) for a in plan.actions if isinstance(a, Compute)]


@pytest.mark.parametrize(("rows", "cols"), [*product((1, 2, 3, 15, 16, 17, 33, 48), (1, 2, 5, 16))])
def test_every_tile_of_a_chunk_once(rows: int, cols: int) -> None:
    """Down the columns of 16 rows at a time. So tiles are numbered here; a plan numbers them row by row."""
    tiles = [gemm.chunk_tile_at(t, rows, cols) for t in range(rows * cols)]
    assert sorted(tiles) == [*product(range(rows), range(cols))]
    assert tiles == sorted(tiles, key=lambda tile: (tile[0] // 16, tile[1], tile[0]))


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
@pytest.mark.parametrize("order", ["direct", "oblivious"])
@pytest.mark.parametrize("world", WORLDS)
def test_tiles_are_computed_as_planned(op: str, order: str, world: int) -> None:
    for rank, rows, cols, visit in product(range(world), (1, 2, 3, 17), (1, 2, 3), (1, 2, 3, 5, 64)):
        count = rows * cols
        if count > 20 * visit:  # more visits than the signal pad of a plan has slots for
            continue
        tiles = [
            gemm.tile_at(t, rank, world, rows, cols, visit, ORDERS[order].value) for t in range(world * count)
        ]
        expected = [
            (owner, *gemm.chunk_tile_at(number, rows, cols))
            for owner, number in planned(op, order, world, rank, count, visit)
        ]
        assert tiles == expected, (rank, rows, cols, visit)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", WORLDS)
def test_owners_are_visited_as_planned(order: str, world: int) -> None:
    for rank in range(world):
        owners = [gemm.owner_at(stage, rank, world, ORDERS[order].value) for stage in range(world)]
        assert owners == [owner for owner, _ in planned("matmul_reduce_scatter", order, world, rank, 1, 0)]


@pytest.mark.parametrize("world", WORLDS)
def test_ring_order_computes_every_tile_once(world: int) -> None:
    """The kernel visits the owners of a ring in turns too, which no plan does: nothing is forwarded here."""
    for rank, rows, cols, visit in product(range(world), (1, 3), (1, 2), (1, 2, 5)):
        tiles = [
            gemm.tile_at(t, rank, world, rows, cols, visit, gemm.RING.value)
            for t in range(world * rows * cols)
        ]
        assert sorted(tiles) == [*product(range(world), range(rows), range(cols))]
