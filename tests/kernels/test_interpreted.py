"""Every kernel on ranks that interpret it, bitwise against sums in rank order.

The fast tier makes each call once on 2 ranks, and some on 3 or 4; the full tier makes all of them on 4, too.
The programs of a rank run by turns (`at_once`), and some of them, if a test says so, after all others.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofuse.lowering.gpu.memory.failures import lost_rank
from autofuse.native_kernels.gpu.state import CODES_PER_SITE, SLOW_SOURCE_BIT, Record
from autofuse.native_kernels.triton.gather_matmul import GATHERING, GatherConfig
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig
from autofuse.native_kernels.triton.matmul_gather import PublishConfig
from autofuse.native_kernels.triton.matmul_gather_packets import PublishPacketsConfig
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig
from autofuse.native_kernels.triton.matmul_reduce import REDUCING
from tests.kernels.calls import (
    FP16,
    PACKETS_CONFIG,
    REDUCE_CONFIG,
    SITE,
    Call,
    Gather,
    Packets,
    Publish,
    Reduce,
    at_random,
    give_up,
    recover,
    run_calls,
    stopped_in_vain,
)
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]

DIRECT, RING, OBLIVIOUS = range(3)

ROWS = REDUCE_CONFIG
COLS = replace(ROWS, by_rows=False)
MORE = replace(
    ROWS, bm=32, bn=32, bt=16, br=8, communicating=3, visit=2
)  # two tickets a tile, programs for them

REDUCE: list[Call] = [
    Reduce(64, 32, 32, config=ROWS),
    Reduce(61, 40, 24, order=RING, mean=True, dtype=FP16, transposed=False, config=ROWS),
    Reduce(3, 24, 40, order=OBLIVIOUS, config=ROWS),  # the last ranks have no row
    Reduce(20, 72, 32, mean=True, config=COLS),
    Reduce(33, 64, 16, order=RING, transposed=False, config=replace(COLS, visit=2)),
    Reduce(96, 40, 16, dtype=FP16, transposed=False, config=MORE),
    Reduce(32, 40, 24, transposed=False, more=(40, 16), config=ROWS),
    Reduce(20, 32, 16, more=(40,), config=COLS),
]
SCATTER: list[Call] = [
    Reduce(64, 32, 32, all_ranks=False, config=ROWS),
    Reduce(
        48, 40, 24, all_ranks=False, order=OBLIVIOUS, transposed=False, config=replace(ROWS, communicating=1)
    ),
    Reduce(96, 24, 16, all_ranks=False, outer=3, config=ROWS),
    Reduce(80, 40, 16, all_ranks=False, outer=2, transposed=False, config=replace(MORE, visit=3)),
    Reduce(24, 64, 32, all_ranks=False, order=RING, dtype=FP16, mean=True, config=COLS),
    Reduce(136, 40, 16, all_ranks=False, transposed=False, config=MORE),
    Reduce(64, 32, 40, all_ranks=False, more=(24,), config=ROWS),
    Reduce(64, 40, 24, all_ranks=False, outer=2, transposed=False, more=(16, 8, 40), config=MORE),
]
TWICE, ONCE = PACKETS_CONFIG, PacketsConfig(bn=32, bk=16, once=True)
PACKETS: list[Call] = [
    Packets(16, 48, 32, config=TWICE),
    Packets(7, 40, 24, config=TWICE, mean=True, dtype=FP16, transposed=False, programs=3),
    Packets(1, 24, 16, config=ONCE),
    Packets(5, 72, 40, config=ONCE, mean=True, dtype=FP16, transposed=False),
    Packets(16, 48, 16, config=TWICE, all_ranks=False),
    Packets(4, 40, 24, config=TWICE, all_ranks=False, dtype=FP16, transposed=False, programs=3),
    Packets(6, 40, 24, config=TWICE, more=(40, 8)),
    Packets(3, 48, 16, config=ONCE, transposed=False, more=(32,)),
]
MOVED = GatherConfig(bm=16, bn=16, bk=16, movers=2)
SHARED = replace(MOVED, movers=1, shared=True)
GATHER: list[Call] = [
    Gather(32, 32, 32, MOVED),
    Gather(23, 40, 40, MOVED, dtype=FP16, transposed=False, computing=3),
    Gather(50, 24, 48, replace(MOVED, slices=3), transposed=False),
    Gather(64, 24, 16, replace(MOVED, slices=2), outer=2),
    Gather(54, 24, 16, replace(MOVED, slices=2), outer=3, transposed=False),
    Gather(40, 40, 32, replace(SHARED, slices=2)),
    Gather(17, 24, 56, replace(MOVED, pieces=2, movers=1)),
    Gather(32, 16, 48, replace(SHARED, pieces=3, slices=2), dtype=FP16, transposed=False, computing=4),
    Gather(32, 40, 32, MOVED, biased=True),
    Gather(23, 40, 40, replace(MOVED, pieces=2, movers=1), biased=True),
    Gather(32, 40, 24, MOVED, transposed=False, more=(16, 24)),
    Gather(23, 16, 40, replace(SHARED, pieces=2, slices=2), biased=True, more=(40,)),
    Gather(54, 24, 16, replace(MOVED, slices=2), outer=3, biased=True, more=(8, 48, 16)),
]
FEW_CONFIG = FewConfig(bn=64, bk=64, pieces=1, movers=1)
FEW: list[Call] = [
    Gather(8, 128, 128, FEW_CONFIG),
    Gather(3, 72, 200, replace(FEW_CONFIG, pieces=3), transposed=False),
    Gather(1, 64, 128, replace(FEW_CONFIG, pieces=2), dtype=FP16),
    Gather(3, 72, 200, replace(FEW_CONFIG, pieces=3), biased=True),
]
PUBLISH_CONFIG = PublishConfig(bm=16, bn=16, bk=16, br=8)
PUBLISH: list[Call] = [
    Publish(32, 32, 32, PUBLISH_CONFIG),
    Publish(23, 40, 40, PUBLISH_CONFIG, dtype=FP16, transposed=False, biased=True),
    Publish(20, 24, 16, PUBLISH_CONFIG, dim=0),
    Publish(48, 24, 24, replace(PUBLISH_CONFIG, communicating=2), dim=0, outer=3, transposed=False),
    Publish(22, 72, 16, replace(PUBLISH_CONFIG, bm=32, bn=32), dim=0, outer=2, biased=True),
    Publish(50, 40, 16, replace(PUBLISH_CONFIG, communicating=3)),
]
PUBLISH_PACKETS_CONFIG = PublishPacketsConfig(bn=16, bk=16)
PUBLISH_PACKETS: list[Call] = [
    Publish(16, 48, 32, PUBLISH_PACKETS_CONFIG),
    Publish(7, 40, 24, PUBLISH_PACKETS_CONFIG, dtype=FP16, transposed=False, biased=True, programs=3),
    Publish(1, 72, 40, PUBLISH_PACKETS_CONFIG, dim=0),
    Publish(36, 24, 16, replace(PUBLISH_PACKETS_CONFIG, bn=32), dim=0, outer=4, transposed=False),
]
KINDS = {
    "all_reduce": REDUCE,
    "reduce_scatter": SCATTER,
    "packets": PACKETS,
    "gather": GATHER,
    "few": FEW,
    "publish": PUBLISH,
    "publish packets": PUBLISH_PACKETS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise(interpreters: Interpreters, kind: str) -> None:
    """Calls use the halves of the memory by turns."""
    interpreters(2).run(run_calls, KINDS[kind], timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_in_both_halves(interpreters: Interpreters, kind: str, world: int) -> None:
    """Every call in either half of the memory."""
    interpreters(world).run(run_calls, [call for call in KINDS[kind] for _ in range(2)], timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_on_four_ranks(interpreters: Interpreters, kind: str) -> None:
    interpreters(4).run(run_calls, KINDS[kind][1::3], timeout=120)


LATE = [(2, 1), *(pytest.param(2 + seed % 2 * 2, seed, marks=pytest.mark.full) for seed in range(2, 14))]


@pytest.mark.parametrize(("world", "seed"), LATE)
@pytest.mark.parametrize("kind", KINDS)
def test_late_programs(interpreters: Interpreters, kind: str, world: int, seed: int) -> None:
    """Some programs of every rank are placed when the others of all ranks have ended: these wait for nothing
    that only those would do. Of four programs one to four stay where a peer is missing."""
    calls: list[Call] = []
    for call in KINDS[kind][1::3] if world > 2 else KINDS[kind][:: 1 + (seed == 1)]:
        if isinstance(call, Packets | Publish):
            calls.append(replace(call, programs=4))
        else:
            calls.append(replace(call, computing=3))
    interpreters(world).run(run_calls, calls, 0, 1 + seed % 4, seed, timeout=120)


ORDERS = [
    *((DIRECT, True), (RING, False), (OBLIVIOUS, True)),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in ((DIRECT, False), (RING, True), (OBLIVIOUS, False))
    ),
]


@pytest.mark.parametrize(("order", "by_rows"), ORDERS)
def test_visits(interpreters: Interpreters, order: int, by_rows: bool) -> None:
    """Any number of tiles a visit, also more than a chunk has; programs that only communicate, or none."""
    calls: list[Call] = [
        Reduce(
            80, 80, 16, all_ranks=visit != 2, order=order,
            config=replace(ROWS, by_rows=by_rows, visit=visit, communicating=visit // 2),
        )
        for visit in (1, 2, 4, 16)
    ]  # fmt: skip
    interpreters(2).run(run_calls, calls)


@pytest.mark.parametrize(
    ("world", "count"),
    [(2, 24), (3, 24), *(pytest.param(world, 200, marks=pytest.mark.full) for world in (2, 4))],
)
def test_back_to_back(interpreters: Interpreters, world: int, count: int) -> None:
    """Calls of all kernels, large and small at random, on one memory."""
    calls: list[Call] = [
        *(Reduce(m, 16, 16, config=ROWS) for m in (16, 80)),
        *(Reduce(m * world, 16, 16, all_ranks=False, config=ROWS) for m in (16, 48)),
        *(Reduce(m, 16 * world, 16, all_ranks=False, config=COLS) for m in (16, 48)),
        *(Packets(m, 16, 16, config=config, programs=1) for m in (1, 9) for config in (TWICE, ONCE)),
        *(Gather(chunk, 16, chunk, SHARED) for chunk in (8, 24)),
        *(Gather(chunk, 64, 64, FEW_CONFIG) for chunk in (1, 4)),
        *(Publish(m, 16, 16, PUBLISH_CONFIG, dim=dim) for dim, m in ((0, 8), (1, 40))),
        *(Publish(m, 16, 16, PUBLISH_PACKETS_CONFIG, programs=1) for m in (1, 9)),
    ]
    interpreters(world).run(run_calls, at_random(calls, count, world), timeout=200)


LOST = {
    "all_reduce": (Reduce(16, 16, 16, config=ROWS), REDUCING),
    "reduce_scatter": (Reduce(32, 16, 16, all_ranks=False, config=ROWS), REDUCING),
    "packets": (Packets(4, 16, 16, config=TWICE), REDUCING),
    "gather": (Gather(16, 16, 16, MOVED), GATHERING),
    "few": (Gather(2, 64, 64, FEW_CONFIG), GATHERING),
    "publish": (Publish(16, 16, 16, PUBLISH_CONFIG), GATHERING),
    "publish packets": (Publish(2, 16, 16, PUBLISH_PACKETS_CONFIG), GATHERING),
}


@pytest.mark.parametrize("kind", LOST)
def test_lost_peer(interpreters: Interpreters, kind: str) -> None:
    """The failure record says what a rank waited for, for whom and in which call, and the kernel ends.

    After half of its time the wait has told the host that it takes long.
    """
    call, what = LOST[kind]
    code = SITE * CODES_PER_SITE + what
    record, of_lost = interpreters(2).run(give_up, call, 1, False)
    assert [record[i] for i in (Record.RAISED, Record.CODE, Record.SOURCE, Record.EPOCH)] == [1, code, 1, 1]
    assert record[Record.SLOW] == (1 << SLOW_SOURCE_BIT) + code + 1
    assert record[Record.WAITED :][:2] == [0, code + 1]
    assert not any(of_lost)


@pytest.mark.parametrize("kind", LOST)
def test_stopped_by_the_host(interpreters: Interpreters, kind: str) -> None:
    """Ranks that wait for a rank of which the host says that it will not come give up at once."""
    call, what = LOST[kind]
    records = interpreters(2).run(give_up, call, 1, True)
    code = SITE * CODES_PER_SITE + what
    assert records[0][Record.RAISED : Record.INDEX] == [1, code, 1]
    interpreters(2).run(stopped_in_vain, call)


@pytest.mark.parametrize("kind", LOST)
def test_memory_is_as_new_after_a_reset(interpreters: Interpreters, kind: str) -> None:
    """Also what a kernel has stored and counted that came when its peers had given up."""
    call, _ = LOST[kind]
    others: list[Call] = [LOST[each][0] for each in ("packets", "all_reduce", "few")]
    records = interpreters(2).run(recover, [call, call, call, *others, call], 1)
    assert records[0][Record.RAISED]


@pytest.mark.parametrize("kind", ["all_reduce", "packets", "gather"])
def test_records_of_all_ranks_tell_who_is_lost(interpreters: Interpreters, kind: str) -> None:
    """Ranks may give up on sums of a rank that waits itself."""
    call, _ = LOST[kind]
    records = interpreters(3).run(give_up, call, 2, False)
    waits = {
        r: {s: code - 1 for s, code in enumerate(record[Record.WAITED :][:3]) if code}
        for r, record in enumerate(records)
    }
    assert lost_rank(waits, set()) == 2
