"""The closed forms of `native_kernels/cuda/include/expert_order.cuh`, run by the host's compiler.

What the kernels do with them is done here with names of rows instead of their values, on all ranks.
"""

import ctypes
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autofuse.native_kernels.cuda.host.compiler import INCLUDE
from autofuse.native_kernels.cuda.host.experts import MOST_WEIGHTS, Cut, tile_cols
from autofuse.native_kernels.cuda.kernels.expert_dispatch import DispatchConfig, slices_of

BM, PART = 128, 32
ORDERS = {"direct": 0, "ring": 1, "oblivious": 2}
SOURCE = """
#include "expert_order.cuh"
extern "C" {
void rows(int* out, Runs* r, int row, int owner, int world, int spanning) {
    Rows rows = rows_of(*r, row, owner, world, spanning);
    out[0] = rows.expert, out[1] = rows.first, out[2] = rows.count;
}
void run(int* out, Runs* r, int expert, int row, int world) {
    Run run = run_at(*r, expert, row, world);
    out[0] = run.owner, out[1] = run.at, out[2] = run.left;
}
void part_row(int* out, Runs* r, int row, int spanning) { out[0] = part_row_at(*r, row, spanning); }
void exchanged_row(int* out, Runs* r, int source, int row, int world) {
    out[0] = exchanged_row_at(*r, source, row, world);
}
void has_rows(int* out, Runs* r, int owner, int first, int count, int world) {
    out[0] = has_rows_for(*r, owner, first, count, world);
}
void combined(int* out, Runs* r, int t, int m, int n, int rank, int world, int rows, int cols, int visit,
              int across, int along, int order, int spanning) {
    Tile tile = combined_tile_at(t, m, n, rank, world, rows, cols, visit, across, along, order, r->group,
                                 spanning);
    out[0] = tile.owner, out[1] = tile.row, out[2] = tile.col;
}
void arriving(int* out, Runs* r, int t, int rank, int world, int sources, int rows, int cols, int visit,
              int along, int order) {
    Tile tile = arriving_tile_at(t, rank, world, sources, rows, cols, visit, along, order, r->group);
    out[0] = tile.owner, out[1] = tile.row, out[2] = tile.col;
}
void dispatched(int* out, Runs* r, int t, int m, int n, int rank, int world, int rows, int cols,
                int slice_rows, int across, int along, int within, int spanning) {
    Tile tile = dispatched_tile_at(t, m, n, rank, world, rows, cols, slice_rows, across, along, within,
                                   r->group, spanning);
    out[0] = tile.owner, out[1] = tile.row, out[2] = tile.col;
}
void column(int* out, Runs* r, int col, int cols, int weights) {
    Column at = column_at(col, cols, weights);
    out[0] = at.weight, out[1] = at.col, out[2] = MOST_WEIGHTS;
}
}
"""

Three = tuple[int, int, int]


class Order:
    """`expert_order.cuh`, callable, for one cut."""

    def __init__(self, library: ctypes.CDLL, cut: Cut) -> None:
        self._library, self._runs = library, ctypes.byref(cut.runs)

    def __call__(self, function: str, *args: int) -> Three:
        out = (ctypes.c_int * 3)()
        getattr(self._library, function)(out, self._runs, *args)
        return out[0], out[1], out[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("order") / "order.so"
    source: Path = built.with_suffix(".cpp")
    source.write_text(SOURCE)
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{INCLUDE}", str(source), "-o", str(built)], check=True
    )
    return ctypes.CDLL(str(built))


@dataclass(frozen=True)
class Shape:
    """`[experts, (outer, world, run)]` rows, in `cols` columns of tiles."""

    world: int
    experts: int
    outer: int
    run: int
    cols: int

    @property
    def rows(self) -> int:
        return self.outer * self.world * self.run

    def cut(self, across: int) -> Cut:
        return Cut.of(self.experts, self.rows, self.cols * 64, self.outer, self.world, 64, across)


LARGE = Shape(4, 2, 1, 1024, 3)
SHAPES = [
    Shape(2, 3, 1, 128, 3),
    Shape(2, 1, 2, 300, 1),
    Shape(4, 2, 1, 160, 2),
    LARGE,
    Shape(3, 5, 2, 129, 2),
    Shape(2, 3, 1, 4, 2),
    Shape(4, 5, 1, 32, 3),
    Shape(4, 3, 1, 100, 2),
    Shape(8, 2, 3, 21, 1),
    Shape(8, 3, 1, 1, 4),
]


def clusters(world: int) -> Iterator[tuple[int, int]]:
    yield from ((across, along) for across, along in ((1, 1), (2, 1), (1, 2), (4, 1)) if world % across == 0)


def _tiers(*parameters: Iterable[object]) -> list[Any]:
    """Every shape with every parameter; of the large one only the first in the fast tier."""
    found: list[Any] = []
    for shape in SHAPES:
        for i, rest in enumerate(product(*parameters)):
            slow = shape == LARGE and i > 0
            found.append(pytest.param(shape, *rest, marks=pytest.mark.full if slow else []))
    return found


@pytest.mark.parametrize(("shape", "named"), _tiers(ORDERS))
def test_a_combine_delivers_every_row_once(library: ctypes.CDLL, shape: Shape, named: str) -> None:
    for (across, along), visit in product(clusters(shape.world), (0, 1)):
        combine(library, shape, ORDERS[named], across, along, visit)


def combine(library: ctypes.CDLL, shape: Shape, order: int, across: int, along: int, visit: int) -> None:
    world, cut = shape.world, shape.cut(across)
    at, spanning = Order(library, cut), int(cut.spanning)
    wide = -(-shape.cols // along)
    visit = 1 if spanning else visit or cut.per * wide
    outputs: list[dict[Three, Three]] = [{} for _ in range(world)]  # (source, row, col): (expert, row, col)
    inboxes: list[dict[Three, Three]] = [{} for _ in range(world)]
    signalled: list[Counter[Three]] = [Counter() for _ in range(world)]
    for rank in range(world):
        computed: Counter[Three] = Counter()
        for t in range((1 if spanning else world) * cut.rows // across * wide):
            experts = set()
            for m, n in product(range(across), range(along)):
                owner, row, col = at(
                    "combined",
                    t,
                    m,
                    n,
                    rank,
                    world,
                    cut.rows,
                    cut.cols,
                    visit,
                    across,
                    along,
                    order,
                    spanning,
                )
                expert, first, count = at("rows", row, owner, world, spanning)
                experts.add(expert)
                if col >= cut.cols:
                    continue
                r, sent = 0, set()
                while r < count:
                    dest, there, left = at("run", expert, first + r, world)
                    assert spanning or dest == owner
                    for i in range(min(left, count - r)):
                        computed[expert, first + r + i, col] += 1
                        direct = dest == rank and not spanning
                        (outputs if direct else inboxes)[dest][rank, there + i, col] = (
                            expert,
                            first + r + i,
                            col,
                        )
                    sent.add(dest)
                    r += min(left, count - r)
                for dest in sent - (set() if spanning else {rank}):
                    signalled[dest][rank, row, col] += 1
            assert len(experts) == 1, "blocks that share a weight work on one expert"
        every = product(range(shape.experts), range(shape.rows), range(cut.cols))
        assert computed == Counter(every)
    sources = world if spanning else world - 1
    for rank in range(world):
        assert set(signalled[rank].values()) == {1}
        waited = set()
        for t in range(sources * cut.rows * wide * along):
            source, row, col = at(
                "arriving", t, rank, world, sources, cut.rows, cut.cols, visit, along, order
            )
            if col >= cut.cols:
                continue
            expert, first, count = at("rows", row, rank, world, spanning)
            for low in range(0, cut.height, PART):
                high = min(low + PART, count)
                if low >= high or (spanning and not at("has_rows", rank, first + low, high - low, world)[0]):
                    continue
                assert (source, row, col) in signalled[rank]
                waited.add((source, row, col))
                for i in range(low, high):
                    dest, there, _ = at("run", expert, first + i, world)
                    if dest == rank:
                        outputs[rank][source, there, col] = inboxes[rank][source, there, col]
        assert waited == set(signalled[rank])
        expected = {
            (source, (e * shape.outer + o) * shape.run + i, col): (e, (o * world + rank) * shape.run + i, col)
            for source, e, o, i, col in product(
                range(world), range(shape.experts), range(shape.outer), range(shape.run), range(cut.cols)
            )
        }
        assert outputs[rank] == expected


@pytest.mark.parametrize(("shape", "slices", "weights"), _tiers([3, 1, 100], [1, MOST_WEIGHTS]))
def test_a_dispatch_waits_for_what_it_multiplies(
    library: ctypes.CDLL, shape: Shape, slices: int, weights: int
) -> None:
    for (across, along), within in product(clusters(shape.world), (False, True)):
        if shape.run < BM or not within or -(-shape.run // BM) % across == 0:
            dispatch(library, shape, slices, across, along, within, weights)


def dispatch(
    library: ctypes.CDLL, shape: Shape, slices: int, across: int, along: int, within: bool, weights: int
) -> None:
    world = shape.world
    config = DispatchConfig(64, across, along, within, slices=slices)
    cut, slice_rows = slices_of(shape.experts, shape.rows, shape.cols * 64, shape.outer, world, config)
    at, spanning = Order(library, cut), int(cut.spanning)
    count = -(-cut.rows // slice_rows)
    assert count <= 254
    # The slice that brings a row of X, by source.
    comes: dict[int, Three] = {}
    for source, s in product(range(world), range(count)):
        first = at("part_row", s * slice_rows, spanning)[0]
        last = cut.part_rows if s == count - 1 else at("part_row", (s + 1) * slice_rows, spanning)[0]
        assert first < last
        for row in range(first, last):
            place = at("exchanged_row", source, row, world)[0]
            assert place not in comes
            comes[place] = source, s, row
    for e, o, source, i in product(range(shape.experts), range(shape.outer), range(world), range(shape.run)):
        place = ((e * shape.outer + o) * world + source) * shape.run + i
        assert comes[place][::2] == (source, (e * shape.outer + o) * shape.run + i)
    within = within or cut.spanning
    cols = tile_cols(shape.cols * 64, config, weights)
    owners = 1 if spanning else world
    groups, high = (owners, cut.rows // across) if within else (world // across, cut.rows)
    for rank in range(world):
        computed: Counter[Three] = Counter()
        for t in range(groups * high * -(-cols // along)):
            experts, whose = set(), set()
            for m, n in product(range(across), range(along)):
                source, row, col = at(
                    "dispatched", t, m, n, rank, world, cut.rows, cols, slice_rows, across, along,
                    int(within), spanning,
                )  # fmt: skip
                weight, col, _ = at("column", col, cols, weights)
                whose.add(weight)
                expert, i = divmod(row, cut.per)
                experts.add(expert)
                low, most = i % cut.stretch * cut.height, shape.rows if spanning else cut.run
                run = expert * shape.outer + i // cut.stretch
                start = expert * shape.rows if spanning else (run * world + source) * cut.run
                for r in range(low, min(low + cut.height, most)):
                    computed[start + r, weight, col] += col < cut.cols
                    of, s, _ = comes[start + r]
                    assert spanning or of == source
                    assert s <= row // slice_rows
            assert len(experts) == len(whose) == 1, "blocks that share x work on one weight"
        every = product(range(shape.experts * shape.rows), range(weights), range(cut.cols))
        assert +computed == Counter(every)


def test_how_many_weights_a_kernel_multiplies_at_most(library: ctypes.CDLL) -> None:
    assert Order(library, SHAPES[0].cut(1))("column", 0, 1, 1)[2] == MOST_WEIGHTS
