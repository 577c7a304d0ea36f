"""The engine: plans arrive where they should, however many ranks and however fine the grain."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.lowering import ops  # noqa: F401  (registers the ops)
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Compute, links
from autofuse.lowering.simulate.collectives import ring_all_gather, ring_reduce_scatter
from autofuse.lowering.simulate.events import Engine
from autofuse.lowering.simulate.executor import Result, simulate
from autofuse.lowering.simulate.machine import Arbitration, Machine, MemoryKind, Network, Shape
from autofuse.lowering.simulate.machines import T3
from autofuse.lowering.simulate.memory import COMMUNICATION, COMPUTE, Cache, Memory
from autofuse.lowering.simulate.network import route
from autofuse.lowering.simulate.problems import Problem, fused, plans
from autofuse.lowering.simulate.work import GatheredProduct, Nothing, Product, Work
from autofuse.simulate.t3 import SubLayer, compute_first, matmul_alone, overlapped, round_robin

NETWORKS = (
    Network(75e3, 0.5, Shape.FULL),
    Network(75e3, 0.5, Shape.RING),
    Network(75e3, 0.5, Shape.TORUS, 4),
    Network(300e3, 0.5, Shape.HOSTS, 4, 50e3, 3.0),
)
OPS: tuple[tuple[str, Work], ...] = (
    ("matmul_reduce_scatter", Product(512)),
    ("matmul_all_reduce", Product(512)),
    ("matmul_all_gather", Product(512)),
    ("all_gather_matmul", GatheredProduct(512)),
    ("expert_matmul_all_to_all", Product(512)),
)
SMALL = replace(T3, processors=6, operations=6e6)


def shape(op: str, order: str, world: int, chunk: tuple[int, int] = (128, 256)) -> PlanShape:
    return PlanShape(op, order, world, ((chunk,) * world,), (64, 128))


def numbers(result: Result) -> tuple[object, ...]:
    return result.us, result.events, sorted(result.traffic.items()), sorted(result.links.items())


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.shape.value)
def test_ranks_that_behave_alike_are_simulated_by_a_few(network: Network) -> None:
    """To the last microsecond, and to the last byte. Twice the same: nothing is random."""
    machine = replace(SMALL, network=network)
    tracking = replace(compute_first(10, machine), tracker=True)
    cases = [(op, order, machine, work) for op, work in OPS for order in ("ring", "direct")]
    cases += [("matmul_reduce_scatter", "ring", tracking, Product(512))]
    for op, order, on, work in cases:
        if op == "expert_matmul_all_to_all" and order == "ring":
            continue
        plans = shape(op, order, 8)
        few, all_ = simulate(plans, on, work), simulate(plans, on, work, everyone=True)
        assert numbers(few) == numbers(simulate(plans, on, work))
        assert all_.us == pytest.approx(few.us, rel=0.02), (op, order)
        times = 8 / few.ranks
        for name, nbytes in few.traffic.items():
            assert all_.traffic[name] == pytest.approx(nbytes * times, rel=0.05), (op, order, name)
        assert sum(all_.links.values()) == pytest.approx(sum(few.links.values()) * times), (op, order)


@settings(max_examples=25)
@given(
    st.sampled_from(OPS),
    st.sampled_from(["ring", "direct", "oblivious"]),
    st.sampled_from(NETWORKS),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=4, max_size=4),
    st.booleans(),
)
def test_bytes_over_links(
    op: tuple[str, Work], order: str, network: Network, chunks: list[tuple[int, int]], tracks: bool
) -> None:
    """What a simulation moves is what its plans move, over as many links as each route has; and all ends."""
    name, work = op
    machine = replace(SMALL, network=network, tracker=tracks)
    plans = PlanShape(name, order, 4, (tuple(chunks),), (64, 128))
    result = simulate(plans, machine, work, everyone=True)
    expected: dict[tuple[object, ...], float] = {}
    for over in links(plans.plans()):
        for (source, dest), elements in over.items():
            for link in route(network, 4, source, dest):
                expected[link] = expected.get(link, 0) + 2.0 * elements
    moved = {link: nbytes for link, nbytes in result.links.items() if nbytes}
    assert moved == pytest.approx({link: nbytes for link, nbytes in expected.items() if nbytes})
    slowest = max((nbytes / _rate(network, link) for link, nbytes in moved.items()), default=0.0)
    assert result.us >= slowest * (1 - 1e-9)


def _rate(network: Network, link: tuple[object, ...]) -> float:
    return network.nic_rate if str(link[0]).startswith("nic") else network.rate


def test_the_closed_form_of_a_ring() -> None:
    for world in (2, 8):
        chunk = (2048, 512)
        simulated = ring_all_gather(SMALL, world, chunk).us
        step = 2.0 * 2048 * 512 / SMALL.network.rate + SMALL.network.latency
        assert simulated == pytest.approx((world - 1) * step, rel=0.03)
    # Without a bound by the link or by programs, memory reads two copies a step and writes one.
    fast = replace(SMALL, processors=80, move_rate=1e6, network=replace(SMALL.network, rate=1e9, latency=0.0))
    traffic = 2.0 * 512 * 512 * (3 * 8 - 1)
    assert ring_reduce_scatter(fast, 8, (512, 512)).us == pytest.approx(traffic / 0.5e6, rel=0.05)


def test_the_grain_does_not_matter() -> None:
    case = SubLayer("T-NLG", "FC-2", 8, 4096, 2048, 4, 1)
    base = _gains(case, T3)
    for machine in (
        replace(T3, groups=4),
        replace(T3, groups=16),
        replace(T3, pieces=2),
        replace(T3, pieces=8),
        replace(T3, memory=replace(T3.memory, burst=8 * 1024)),
        replace(T3, memory=replace(T3.memory, burst=32 * 1024)),
    ):
        assert _gains(case, machine) == pytest.approx(base, rel=0.02)


def _gains(case: SubLayer, machine: Machine) -> list[float]:
    runs = (
        matmul_alone(case, machine),
        overlapped(case, round_robin(machine)),
        overlapped(case, compute_first(10, machine)),
    )
    return [run.us for run in runs]


def test_the_tracker_counts_bytes_as_the_paper_does() -> None:
    """Of N chunks, track and trigger reads N - 2 and writes 2 N - 2; apart it is 2 N - 1 and 2 N."""
    case = SubLayer("a", "OP", 8, 2048, 512, 1, 1)
    chunk = 2.0 * 256 * 512
    fused = overlapped(case, compute_first(10)).traffic
    assert fused["communication reads"] == 6 * chunk
    assert fused["communication writes"] + fused["compute writes"] == 14 * chunk
    apart, alone = ring_reduce_scatter(T3, 8, case.chunk).traffic, matmul_alone(case, T3).traffic
    assert apart["compute reads"] == 15 * chunk
    written = apart["compute writes"] + apart["communication writes"] + alone["compute writes"]
    assert written == pytest.approx(16 * chunk)


def test_the_arbiter() -> None:
    """Round robin gives each stream half; compute first starves communication up to the limit."""
    ends: dict[tuple[Arbitration, str], float] = {}

    def end(engine: Engine, arbitration: Arbitration, name: str) -> None:
        ends[arbitration, name] = engine.now

    for arbitration in Arbitration:
        engine = Engine()
        kind = MemoryKind(1000.0, queue=100, burst=100, arbitration=arbitration, starvation=1e9)
        memory = Memory(engine, kind)
        for stream, name in ((COMMUNICATION, "late"), (COMPUTE, "early")):
            memory.access(stream, name, 10_000, partial(end, engine, arbitration, name))
        assert engine.run() == pytest.approx(20.0)
    robin, first = Arbitration.ROUND_ROBIN, Arbitration.COMPUTE_FIRST
    assert ends[robin, "early"] == pytest.approx(20.0, abs=0.2)
    assert ends[first, "early"] == pytest.approx(10.0, abs=0.2)
    assert ends[first, "late"] == pytest.approx(20.0)


def test_random_replacement_in_the_mean() -> None:
    """An entry that fits is read once. Of a scan that does not, some stays; all that is written goes out."""
    cache = Cache(1000.0)
    assert [cache.read("a", 400.0)[0] for _ in range(3)] == [400.0, 0.0, 0.0]
    missing = [sum(cache.read(i, 100.0)[0] for i in range(20)) for _ in range(6)]
    assert 1000 < missing[-1] < 2000
    fine = Cache(1000.0)
    for _ in range(6):
        last = sum(fine.read(i, 10.0)[0] for i in range(200))
    assert last == pytest.approx(missing[-1], rel=0.05)
    assert sum(cache.write(50.0) for _ in range(100)) + cache.flush() == pytest.approx(5000.0)


def test_a_longer_way_takes_longer() -> None:
    """A direct exchange on a ring crosses the links of others; on a switch it does not."""
    times = [
        simulate(shape("all_gather_matmul", "direct", 8), replace(SMALL, network=network), Nothing()).us
        for network in NETWORKS[:2]
    ]
    assert times[1] > 1.3 * times[0]


@pytest.mark.parametrize("op", ["expert_matmul_all_to_all", "all_to_all_expert_matmul"])
def test_uneven_routing(op: str) -> None:
    """Every row is multiplied and sent once, every weight is read; even counts take as long as without."""
    counts = (((3, 700), (0, 5)), ((1300, 0), (40, 0)))
    problem = Problem(op, 2, 512, 256, 384, 2, counts=counts)
    ((shape, work, _),) = plans(problem, SMALL, "direct")
    for rank in range(2):
        tiles = [a.tile for a in shape.plan(rank).actions if isinstance(a, Compute)]
        tasks = [task for tile in tiles for task in work.tasks(shape.plan(rank), tile)]
        rows = sum(sum(source[rank]) for source in counts)
        assert sum(task.operations for task in tasks) == 2 * rows * 256 * 384
        weights = {
            n: size for task in tasks for n, size in task.reads if isinstance(n, tuple) and n[0] == "b"
        }
        used = sum(any(source[rank][e] for source in counts) for e in range(2))
        assert sum(weights.values()) == pytest.approx(used * 256 * 384 * 2)
    width = 384 if op == "expert_matmul_all_to_all" else 256
    carried = simulate(shape, SMALL, work).links
    assert sorted(carried.values()) == [5 * width * 2, 1300 * width * 2]
    same = replace(problem, counts=(((512, 512),) * 2,) * 2)
    even = fused(replace(problem, counts=None), SMALL)
    assert fused(same, SMALL) == pytest.approx(even, rel=0.1)
