"""Plans of every op and order: proved, balanced, within the signal pad, and readable."""

import pickle
from collections import Counter

import pytest
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofuse.lowering.orders import PlanShape, make_plan
from autofuse.lowering.plan import (
    FAMILIES,
    SIGNAL_SLOTS,
    Compute,
    Copy,
    Family,
    Plan,
    Reduce,
    Send,
    Signal,
    Store,
    Wait,
    contention,
    cut,
    links,
)
from autofuse.lowering.verify import verify

Chunks = tuple[tuple[int, int], ...]

ORDERS = ("ring", "direct", "oblivious")
VARIANTS = [(op, order, False) for op in FAMILIES for order in ORDERS]
VARIANTS += [("matmul_all_reduce", "direct", True), ("matmul_all_reduce", "oblivious", True)]
EXCHANGES = [op for op, family in FAMILIES.items() if family in (Family.PRODUCE, Family.CONSUME)]


def plans_of(
    op: str, order: str, chunks: list[Chunks], block: tuple[int, int] = (2, 2), one_shot: bool = False
) -> list[Plan]:
    """The plans of all ranks; `chunks` has one entry a rank."""
    world = len(chunks)
    return [make_plan(op, order, world, rank, chunks[rank], block, one_shot) for rank in range(world)]


@st.composite
def problems(draw: st.DrawFn, op: str) -> tuple[list[Chunks], tuple[int, int]]:
    world = draw(st.integers(1, 16))
    longest = draw(st.sampled_from([1, 3, 7]))  # short chunks are often empty, long ones have many tiles
    extent = st.tuples(st.integers(0, longest), st.integers(0, longest))
    chunks = st.lists(extent, min_size=world, max_size=world).map(tuple)
    ranks = [draw(chunks) for _ in range(world)] if op in EXCHANGES else [draw(chunks)] * world
    return ranks, draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_every_plan_is_proved(op: str, order: str, one_shot: bool, data: st.DataObject) -> None:
    chunks, block = data.draw(problems(op))
    plans = plans_of(op, order, chunks, block, one_shot)
    verify(plans)
    assert all(plan.slots_per_source <= SIGNAL_SLOTS for plan in plans)


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
@pytest.mark.parametrize(
    "world", [*range(1, 10), *(pytest.param(w, marks=pytest.mark.full) for w in range(10, 16)), 16]
)
def test_every_world(op: str, order: str, one_shot: bool, world: int) -> None:
    verify(plans_of(op, order, [((3, 2),) * world] * world, one_shot=one_shot))


@given(
    extent=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    block=st.tuples(st.integers(1, 14), st.integers(1, 14)),
)
@settings(max_examples=100)
def test_tiles_cover_every_element_once(extent: tuple[int, int], block: tuple[int, int]) -> None:
    tiles = cut(0, extent, block)
    covered = Counter(
        (row, col)
        for tile in tiles
        for row in range(tile.rows.start, tile.rows.stop)
        for col in range(tile.cols.start, tile.cols.stop)
    )
    assert covered == Counter((row, col) for row in range(extent[0]) for col in range(extent[1]))
    assert [tile.index for tile in tiles] == list(range(len(tiles)))
    assert all(0 < len(tile.rows) <= block[0] and 0 < len(tile.cols) <= block[1] for tile in tiles)


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize("op", FAMILIES)
def test_contention(op: str, world: int) -> None:
    """Balanced orders have one peer at a rank at any step; in the control all peers meet."""
    chunks: list[Chunks] = [((2, 2),) * world] * world
    worst = {order: max(contention(plans_of(op, order, chunks))) for order in ORDERS}
    assert worst == {"ring": 1, "direct": 1, "oblivious": world - 1}


def test_contention_step_by_step() -> None:
    chunks: list[Chunks] = [((2, 2),) * 4] * 4
    # Three steps to the peers, own chunk, reduction, three copies (the own chunk's is the last step).
    assert contention(plans_of("matmul_all_reduce", "direct", chunks)) == [1, 1, 1, 0, 0, 1, 1, 1]
    assert contention(plans_of("matmul_all_reduce", "oblivious", chunks)) == [3, 3, 3, 3, 0, 3, 3, 3, 3]
    assert contention(plans_of("matmul_reduce_scatter", "ring", chunks)) == [1, 1, 1, 0]
    assert contention(plans_of("all_gather_matmul", "oblivious", chunks)) == [3, 3, 3, 3]
    # A step to compute, one for the next slice, of which there is none, three copies.
    assert contention(plans_of("matmul_all_gather", "direct", chunks)) == [0, 0, 1, 1, 1]
    assert contention(plans_of("matmul_all_gather", "ring", chunks)) == [1, 1, 1, 0]
    assert contention(plans_of("embedding_bag_all_to_all", "direct", chunks)) == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "op", ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather"]
)
def test_ring_talks_to_neighbours_only(op: str) -> None:
    for over in links(plans_of(op, "ring", [((2, 2),) * 5] * 5)):
        assert all(dest == (source + 1) % 5 for source, dest in over)


def test_links_count_elements() -> None:
    plans = plans_of("matmul_reduce_scatter", "direct", [((5, 3), (2, 3), (1, 1))] * 3)
    first, second = {(0, 1): 6, (1, 2): 1, (2, 0): 15}, {(0, 2): 1, (1, 0): 15, (2, 1): 6}
    assert [over for over in links(plans) if over] == [first, second]
    gather = links(plans_of("all_gather_matmul", "direct", [((5, 3), (2, 3), (1, 1))] * 3))
    assert gather[1] == {(1, 0): 6, (2, 1): 1, (0, 2): 15}


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
@pytest.mark.parametrize("world", [2, 16])
def test_many_tiles_fit_the_signal_pad(op: str, order: str, one_shot: bool, world: int) -> None:
    for rank in {0, world // 2, world - 1}:
        plan = make_plan(op, order, world, rank, ((40, 5),) * world, (1, 1), one_shot)
        assert len(plan.tiles()) == 200 * world
        assert plan.slots_per_source <= SIGNAL_SLOTS
        waits = {(a.source, a.slot) for a in plan.actions if isinstance(a, Wait)}
        assert all(slot < SIGNAL_SLOTS for _, slot in waits)


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_empty_chunks_still_signal(op: str, order: str, one_shot: bool) -> None:
    plans = plans_of(op, order, [((0, 4),) * 3] * 3, one_shot=one_shot)
    verify(plans)
    for plan in plans:
        assert any(isinstance(action, Signal) for action in plan.actions)
        assert any(isinstance(action, Wait) for action in plan.actions)


@pytest.mark.parametrize(("op", "order", "one_shot"), VARIANTS)
def test_a_world_of_one_uses_no_signal(op: str, order: str, one_shot: bool) -> None:
    plan = make_plan(op, order, 1, 0, ((3, 3),), (2, 2), one_shot)
    assert not any(isinstance(action, Signal | Wait | Copy) for action in plan.actions)
    assert plan.slots_per_source == 0


REDUCTIONS = ("matmul_all_reduce", "matmul_reduce_scatter")


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("order", ["direct", "oblivious"])
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_every_plan_in_turns_is_proved(op: str, order: str, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 9))
    extent = st.tuples(st.integers(0, 5), st.integers(0, 5))
    chunks = data.draw(st.lists(extent, min_size=world, max_size=world).map(tuple))
    shape = PlanShape(op, order, world, (chunks,), (1, 1), visit=data.draw(st.integers(1, 30)))
    verify(shape.plans())


@pytest.mark.parametrize("op", REDUCTIONS)
def test_turns_visit_every_chunk(op: str) -> None:
    """Two tiles a visit, then what is left of every chunk; own tiles are reduced before the last turn."""
    plan = make_plan(op, "direct", 3, 1, ((3, 1), (5, 1), (3, 1)), (1, 1), visit=2)
    computes = [str(action.tile) for action in plan.actions if isinstance(action, Compute)]
    assert computes == ["2.0", "2.1", "0.0", "0.1", "1.0", "1.1", "2.2", "0.2", "1.2", "1.3", "1.4"]
    kinds = [type(action) for action in plan.actions]
    assert kinds.index(Reduce) < len(kinds) - 1 - kinds[::-1].index(Compute)
    assert "2 a visit" in plan.agreement
    assert ", 2 a visit, rank 1 of 3" in str(plan)
    assert max(contention(PlanShape(op, "direct", 3, (((4, 1),) * 3,), (1, 1), visit=2).plans())) == 1


def test_direct_order_is_peers_first_own_last() -> None:
    plan = make_plan("matmul_reduce_scatter", "direct", 4, 2, ((2, 2),) * 4, (2, 2))
    computes = [action for action in plan.actions if isinstance(action, Compute)]
    assert [c.dest for c in computes] == [3, 0, 1, 2]
    assert [c.store for c in computes] == [Store.REMOTE] * 3 + [Store.LOCAL]
    assert sum(isinstance(action, Reduce) for action in plan.actions) == 1


def test_ring_order_is_own_chunk_last_with_updates() -> None:
    plan = make_plan("matmul_reduce_scatter", "ring", 4, 2, ((2, 2),) * 4, (2, 2))
    computes = [action for action in plan.actions if isinstance(action, Compute)]
    assert [(c.tile.chunk, c.dest) for c in computes] == [(1, 3), (0, 3), (3, 3), (2, 2)]
    assert {c.store for c in computes} == {Store.UPDATE}


def test_consumer_sends_peers_first_and_computes_in_the_sequence_of_arrival() -> None:
    plan = make_plan("all_to_all_expert_matmul", "direct", 4, 1, ((2, 2),) * 4, (2, 2))
    assert [a.dest for a in plan.actions if isinstance(a, Send)] == [2, 3, 0, 1]
    assert [a.tile.chunk for a in plan.actions if isinstance(a, Compute)] == [1, 0, 3, 2]


def test_plans_are_values() -> None:
    arguments = ("matmul_all_reduce", "direct", 4, 1, ((3, 3),) * 4, (2, 2))
    plan = make_plan(*arguments)
    assert make_plan(*arguments) is plan
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert hash(copy) == hash(plan)
    assert plan != make_plan("matmul_all_reduce", "ring", 4, 1, ((3, 3),) * 4, (2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("matmul", "direct", 2, 0, ((1, 1),) * 2, (1, 1)), "no plan for op 'matmul'"),
        (("matmul_all_reduce", "fast", 2, 0, ((1, 1),) * 2, (1, 1)), "unknown order 'fast'"),
        (("matmul_all_reduce", "direct", 2, 2, ((1, 1),) * 2, (1, 1)), "rank 2 is outside"),
        (("matmul_all_reduce", "direct", 2, 0, ((1, 1),), (1, 1)), "expected 2 chunks"),
        (("matmul_all_reduce", "direct", 1, 0, ((1, -1),), (1, 1)), "non-negative"),
        (("matmul_all_reduce", "direct", 1, 0, ((1, 1),), (0, 1)), "at least 1x1"),
        (("matmul_all_reduce", "ring", 2, 0, ((1, 1),) * 2, (1, 1), True), "one-shot"),
        (("all_gather_matmul", "direct", 2, 0, ((1, 1),) * 2, (1, 1), True), "one-shot"),
        (("matmul_all_reduce", "ring", 2, 0, ((1, 1),) * 2, (1, 1), False, 1), "in turn"),
        (("matmul_all_reduce", "direct", 2, 0, ((1, 1),) * 2, (1, 1), True, 1), "in turn"),
        (("matmul_all_reduce", "direct", 2, 0, ((1, 1),) * 2, (1, 1), False, -1), "in turn"),
        (("all_gather_matmul", "direct", 2, 0, ((1, 1),) * 2, (1, 1), False, 1), "in turn"),
        (("matmul_all_reduce", "direct", 1, 0, ((99, 1),), (1, 1), False, 3), "visit at least 4 tiles"),
        (("matmul_all_reduce", "ring", 34, 0, ((1, 1),) * 34, (1, 1)), "use order='direct'"),
    ],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments)


def test_printed_direct() -> None:
    plan = make_plan("matmul_all_reduce", "direct", 2, 0, ((64, 128), (32, 128)), (64, 64))
    assert_expected_inline(
        str(plan),
        """\
matmul_all_reduce: direct, rank 0 of 2, 4 tiles of at most 64x64
step  action   tile  rows  cols    link  how
0     compute  1.0   0:32  0:64    0->1  remote
0     signal                       0->1  slot 0
0     compute  1.1   0:32  64:128  0->1  remote
0     signal                       0->1  slot 1
1     compute  0.0   0:64  0:64          local
2     compute  0.1   0:64  64:128        local
2     wait                         1->0  slot 0
2     reduce   0.0   0:64  0:64
2     signal                       0->1  slot 2
3     wait                         1->0  slot 1
3     reduce   0.1   0:64  64:128
3     signal                       0->1  slot 3
3     wait                         1->0  slot 2
3     copy     1.0   0:32  0:64    1->0
4     wait                         1->0  slot 3
4     copy     1.1   0:32  64:128  1->0""",
    )


def test_printed_ring() -> None:
    plan = make_plan("all_gather_matmul", "ring", 3, 0, ((8, 4),) * 3, (8, 4))
    assert_expected_inline(
        str(plan),
        """\
all_gather_matmul: ring, rank 0 of 3, 3 tiles of at most 8x4
step  action   tile  rows  cols  link  how
0     send     0.0   0:8   0:4   0->1  remote
0     signal                     0->1  slot 0
0     compute  0.0   0:8   0:4         local
1     wait                       2->0  slot 0
1     send     2.0   0:8   0:4   0->1  remote
1     signal                     0->1  slot 1
1     compute  2.0   0:8   0:4         local
2     wait                       2->0  slot 1
2     compute  1.0   0:8   0:4         local""",
    )


def test_printed_one_shot() -> None:
    plan = make_plan("matmul_all_reduce", "direct", 3, 1, ((1, 4), (1, 4), (1, 0)), (1, 4), True)
    assert_expected_inline(
        str(plan),
        """\
matmul_all_reduce: direct, one shot, rank 1 of 3, 2 tiles of at most 1x4
step  action   tile  rows  cols  link        how
0     compute  0.0   0:1   0:4               local
0     signal                     1->2        slot 0
0     signal                     1->0        slot 0
1     compute  1.0   0:1   0:4               local
1     signal                     1->2        slot 1
1     signal                     1->0        slot 1
1     wait                       2->1        slot 0
1     wait                       0->1        slot 0
1     reduce   0.0   0:1   0:4   0->1, 2->1
2     wait                       2->1        slot 1
2     wait                       0->1        slot 1
2     reduce   1.0   0:1   0:4   0->1, 2->1""",
    )
