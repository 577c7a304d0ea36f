"""Ways of embedding_bag_all_to_all on GPUs, where its rows go, and where descriptors of its tables lie."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice import choose as choices
from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, ways_of
from autofuse.lowering.gpu.choice.points import Point, read, write
from autofuse.lowering.gpu.embedding.again import Words
from autofuse.lowering.gpu.embedding.kernels import BAGS, MERGED_NCCL
from autofuse.lowering.gpu.embedding.places import backward_places, places_of
from autofuse.lowering.gpu.embedding.ways import BACKWARD, OP, TORCH_NCCL, ExchangeProblem
from autofuse.lowering.gpu.memory.descriptors import SLOTS, Descriptors
from autofuse.lowering.reference import embedding_layout
from autofuse.native_kernels.triton.embedding_tables import Tables, exchange_needs

BF16 = torch.bfloat16


def problem(b: int = 512, columns: int = 1024, world: int = 4, dtype: torch.dtype = BF16) -> ExchangeProblem:
    return ExchangeProblem(b, (columns,) * world, "bsc", dtype)


def choose(asked: ExchangeProblem, points: Sequence[Point]) -> str:
    return choices.choose(asked, choices.predictor_of(tuple(points))).way


def test_ways_of_the_backward() -> None:
    """They fit into a region; torch's own where what is received is too much."""
    even = replace(problem(70, 64), op=BACKWARD)
    assert choose(even, (Point.of(even, {"strips": 1.0, TORCH_NCCL: 2.0}),)) == "strips"
    assert choose(even, (Point.of(even, {"strips": 1e9, TORCH_NCCL: 1.0}),)) == TORCH_NCCL
    for name, way in ways_of(even).items():
        assert way.need.inbox <= MOST_BYTES, name
        assert (way.need.inbox > 0) == (way.fused and name != MERGED_NCCL), name
    uneven = ExchangeProblem(1 << 14, (1 << 13, 8, 8, 8, 8, 8, 8, 8), "bsc", BF16, op=BACKWARD)
    assert list(ways_of(uneven)) == [TORCH_NCCL]
    assert len(ways_of(replace(uneven, op=OP))) > 1


@pytest.mark.parametrize("layout", embedding_layout.LAYOUTS)
def test_places_of_the_backward(layout: str) -> None:
    """This rank's tables in [B, C], and in the gradient what goes to every rank, as the forward has it."""
    forward = places_of(layout, 1, 3, [16] * 3, [8, 8])
    places = backward_places(layout, 1, 3, [16] * 3, [8, 8])
    assert (places.starts, places.stride) == ((0, 8), 16)
    assert replace(places, starts=forward.starts, stride=forward.stride) == forward


def test_a_point_counts_for_its_op_and_the_ways_that_exist() -> None:
    alone = choose(problem(), ())
    gone = Point.of(problem(), {"bags of old": 1.0, MERGED_NCCL: 2.0})
    assert choose(problem(), (gone,)) == MERGED_NCCL
    dense = Point("matmul_all_reduce", 2048, 1, 1024, 4, ((MERGED_NCCL, 1.0),))
    assert choose(problem(), (dense,)) == alone != MERGED_NCCL


def test_a_table_keeps_both_ops_apart(tmp_path: Path) -> None:
    """They are measured at the same sizes; a new point replaces only that of its op."""
    forward, backward = problem(), replace(problem(), op=BACKWARD)
    path = tmp_path / "ways.json"
    write(path, [Point.of(forward, {"bags": 1.0}), Point.of(backward, {"strips": 2.0, TORCH_NCCL: 3.0})])
    write(path, [Point.of(backward, {"strips strip=16": 1.0, "strips": 2.0})])
    points = read(path)
    assert len(points) == 2
    assert choose(forward, points) == "bags"
    assert choose(backward, points) == "strips strip=16"


def test_what_no_kernel_runs_is_left_to_torch() -> None:
    for odd in (problem(dtype=torch.float64), problem(world=16), problem(1 << 20, 1 << 12)):
        assert list(ways_of(odd)) == [TORCH_NCCL]


@pytest.mark.parametrize("layout", embedding_layout.LAYOUTS)
def test_needs_depend_on_what_is_equal_on_all_ranks(layout: str) -> None:
    """Not on the dims of a rank's own tables, of which every rank computes places."""
    some = problem(70, 64)
    for name, way in ways_of(some).items():
        if way.fused:
            need = BAGS.needs(way.config, some)
            assert need.inbox <= MOST_BYTES, name
            for dims in ([64], [16] * 4) if "t" in layout else ([64], [16] * 4, [8, 40, 16]):
                places = places_of(layout, 1, 70, some.columns, dims)
                assert exchange_needs(places, 2, 4, way.config) == need, name


@pytest.mark.parametrize("layout", embedding_layout.LAYOUTS)
def test_places_are_those_of_the_layout(layout: str) -> None:
    """Of our own tables, and of what the others have stored."""
    b, dims, world = 3, [8, 8], 3
    columns = [16] * world
    shape = [int(n) for n in embedding_layout.shape(layout, b, columns, dims)]
    out = torch.arange(b * sum(columns)).view(shape)
    for rank in range(world):
        places = places_of(layout, rank, b, columns, dims)
        for source in range(world):
            first, cols, stride = places.sources[source]
            runs = [first + g * places.group_stride for g in range(places.groups)]
            got = torch.stack([torch.stack([run + i * stride + torch.arange(cols) for i in range(b)])
                               for run in runs], 1)  # fmt: skip
            assert torch.equal(
                got.flatten(), embedding_layout.part(out, layout, source, b, columns).flatten()
            )
        own = embedding_layout.part(out, layout, rank, b, columns).reshape(b, len(dims), 8)
        for t, start in enumerate(places.starts):
            rows = torch.stack([start + i * places.stride + torch.arange(8) for i in range(b)])
            assert torch.equal(own[:, t], rows)


def words(*values: int) -> bytes:
    return array("q", values).tobytes()


def descriptors_in(puts: list[tuple[int, ...]]) -> Descriptors:
    def put(to: Tensor, words: bytes) -> None:
        puts.append(tuple(array("q", words)))
        to[: len(puts[-1])] = torch.tensor(puts[-1])

    return Descriptors(put, lambda size: torch.zeros(size, dtype=torch.int64))


def test_descriptors_are_put_once() -> None:
    puts: list[tuple[int, ...]] = []
    descriptors = descriptors_in(puts)
    for _ in range(3):
        for call in ((1, 2, 3), (4, 5, 6)):
            assert descriptors.place(words(*call), False)[:3].tolist() == list(call)
    assert puts == [(1, 2, 3), (4, 5, 6)]
    assert descriptors.place(words(*range(9)), False)[:9].tolist() == list(range(9))  # it grows, and forgets
    assert descriptors.place(words(1, 2, 3), False)[:3].tolist() == [1, 2, 3]


def test_descriptors_of_captured_calls_stay() -> None:
    puts: list[tuple[int, ...]] = []
    descriptors = descriptors_in(puts)
    descriptors.place(words(0, 0), False)
    captured = descriptors.place(words(0, 0), True)
    for i in range(1, 3 * SLOTS):
        assert descriptors.place(words(0, i), False)[:2].tolist() == [0, i]
    assert captured[:2].tolist() == [0, 0]
    assert len(puts) == 3 * SLOTS


def test_a_captured_call_that_finds_no_descriptor_puts_it_in_the_graph() -> None:
    puts: list[tuple[int, ...]] = []
    descriptors = descriptors_in(puts)
    descriptors.place(words(0, 0), False)
    first, second = descriptors.place(words(1, 1), True), descriptors.place(words(1, 1), True)
    assert puts == [(0, 0), (1, 1), (1, 1)]
    assert first.data_ptr() == second.data_ptr()
    for i in range(2 * SLOTS):  # no other call gets that place
        assert descriptors.place(words(2, i), False).data_ptr() != first.data_ptr()


def test_when_graphs_hold_all_slots_descriptors_are_put_at_every_call() -> None:
    puts: list[tuple[int, ...]] = []
    descriptors = descriptors_in(puts)
    for i in range(SLOTS):
        descriptors.place(words(i, i), False)
        descriptors.place(words(i, i), True)
    for _ in range(2):
        assert descriptors.place(words(7, 77), False)[:2].tolist() == [7, 77]
    assert len(puts) == SLOTS + 2


def test_descriptors_of_a_call_like_one_before() -> None:
    """Other indices are put into those of before; anything else is found out."""
    weights = [torch.randn(10, 8), torch.randn(20, 8)]
    offsets = [torch.arange(4)] * 2

    def indices(*counts: int) -> list[Tensor]:
        return [torch.zeros(n, dtype=torch.int64) for n in counts]

    places = places_of("bsc", 0, 2, [16, 16], [8, 8])
    known = Words(Tables(weights, indices(5, 6), offsets, []), places)

    def check(weights: list[Tensor], given: list[Tensor], offsets: list[Tensor]) -> None:
        expected = Tables(weights, given, offsets, []).words(places)
        assert known.of(weights, given, offsets) == words(*expected)

    check(weights, indices(7, 0), offsets)
    check([w.view(w.shape) for w in weights], indices(1, 2), [o.view(-1) for o in offsets[:1]] * 2)
    check(weights, indices(3, 4), offsets)
    for others in (
        ([weights[0], weights[1][:10]], indices(5, 6), offsets),
        ([weights[0].clone(), weights[1]], indices(5, 6), offsets),
        (weights, indices(5, 6), [offsets[0], offsets[0].clone()]),
        (weights, indices(5, 6), [torch.arange(5)[:4]] * 2),
        (weights, [i.int() for i in indices(5, 6)], offsets),
        (weights, [torch.zeros(10, dtype=torch.int64)[::2], indices(6)[0]], offsets),
        (weights, indices(5), offsets),
    ):
        assert known.of(*others) is None
    weights[1].data = torch.randn(20, 8)
    assert known.of(weights, indices(5, 6), offsets) is None
