"""embedding_exchange on ranks that interpret it, bitwise against pooling bag by bag."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autofuse.lowering.gpu.embedding.kernels import MERGED_NCCL
from autofuse.native_kernels.gpu.state import CODES_PER_SITE
from autofuse.native_kernels.triton.comm import BAD_BAG, BAD_INDEX, POOLING
from tests.kernels.calls import SITE, at_random
from tests.kernels.embedding_calls import (
    CONFIG,
    Exchange,
    lose,
    reported,
    run_exchanges,
    run_way,
    same_bits,
)
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
SUM, MEAN, MAX = range(3)


def even(world: int, tables: int = 2, dim: int = 16) -> tuple[tuple[int, ...], ...]:
    return ((dim,) * tables,) * world


def mixed(world: int) -> tuple[tuple[int, ...], ...]:
    """Other dims on every rank, some of them odd and wider than a tile; the last rank has an empty table."""
    return ((24, 8, 40), (5, 96, 16), (64,), (0,))[:world] if world > 2 else ((24, 8, 72), (5,))


def cases(world: int) -> dict[str, Exchange]:
    few = Exchange(even(world))
    return {
        "plain": few,
        "mixed dims": Exchange(mixed(world), b=3),
        "mixed dtypes": Exchange(even(world, 3), dtypes=(BF16, FP32, FP16), wire=FP16),
        "fp32": Exchange(even(world), dtypes=(FP32,), wire=FP32, index=INT32, last=True),
        "cast": Exchange(even(world), dtypes=(FP32,), wire=BF16, mode=MEAN),
        "mean": Exchange(even(world, 1), mode=MEAN, padding=3, index=INT32),
        "max": Exchange(even(world, 1), mode=MAX, padding=2, dtypes=(FP16,), wire=FP16),
        "weighted": Exchange(even(world), weighted=True, padding=4, last=True),
        "long bags": Exchange(even(world, 1), b=2, pooling=23, config=replace(CONFIG, unroll=4)),
        "empty bags": Exchange(even(world), pooling=0),
        "one bag": Exchange(even(world), b=1, pooling=1),
        "many slices": Exchange(even(world, 1, 32), b=70, pooling=1, config=replace(CONFIG, tile=512)),
        "by turns": Exchange(even(world, 1), b=40, pooling=1, config=replace(CONFIG, mixed=True)),
        "one program": Exchange(even(world), config=replace(CONFIG, per_sm=1, copying=0)),
        "send": Exchange(mixed(world), b=3, send=True),
    }  # fmt: skip


@pytest.mark.parametrize("part", range(3))
def test_bitwise(interpreters: Interpreters, part: int) -> None:
    """Calls use the halves of the memory by turns."""
    interpreters(2).run(run_exchanges, list(cases(2).values())[part::3], timeout=120)


def test_bitwise_on_four_ranks(interpreters: Interpreters) -> None:
    interpreters(4).run(run_exchanges, [cases(4)["mixed dims"]], timeout=120)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 9))])
def test_late_programs(interpreters: Interpreters, seed: int) -> None:
    """Of two multiprocessors; the programs that are placed wait for nothing that the others would do."""
    calls = [case for case in cases(2).values() if not case.send]
    interpreters(2).run(run_exchanges, calls[seed % 4 :: 4], 0, seed, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world"),
    [
        *((name, 2) for name in cases(2)),
        *((name, 4) for name in ("plain", "mixed dims", "by turns", "one program", "send")),
    ],
)
def test_bitwise_in_both_halves(interpreters: Interpreters, name: str, world: int) -> None:
    """Every call in either half of the memory."""
    interpreters(world).run(run_exchanges, [cases(world)[name]] * 2, timeout=120)


@pytest.mark.parametrize(
    "layout",
    ["sbc", "stbd", *(pytest.param(each, marks=pytest.mark.full) for each in ("bsc", "bstd", "sbtd"))],
)
def test_layouts(interpreters: Interpreters, layout: str) -> None:
    """Slices of 32 bags, the last one shorter."""
    call = Exchange(even(2, 3, 8), b=37, pooling=1, layout=layout, config=replace(CONFIG, tile=256))
    interpreters(2).run(run_exchanges, [call] * 2, timeout=120)


@pytest.mark.parametrize(
    ("world", "count"), [(3, 6), *(pytest.param(world, 50, marks=pytest.mark.full) for world in (2, 4))]
)
def test_back_to_back(interpreters: Interpreters, world: int, count: int) -> None:
    """Calls of changing shapes on one memory, with no barrier between, by ranks that straggle."""
    calls = list(cases(world).values())
    calls.remove(cases(world)["many slices"])
    calls += [Exchange(even(world, 1, 8), b=b, layout="sbc") for b in (2, 9, 40)]
    interpreters(world).run(run_exchanges, at_random(calls, count, world), timeout=300)


@pytest.mark.parametrize("way", ["bags", MERGED_NCCL])
def test_as_the_op_runs_it(interpreters: Interpreters, way: str) -> None:
    """With the workspace of CPU ranks, and gloo in place of NCCL."""
    for call in (Exchange(mixed(2), b=3, last=True), Exchange(even(2), layout="stbd", wire=FP32)):
        interpreters(2).run(run_way, way, call)


def test_the_same_bits_in_every_run(interpreters: Interpreters) -> None:
    """Of values whose sums depend on the order."""
    interpreters(2).run(same_bits, Exchange(even(2), pooling=9, weighted=True))


@pytest.mark.parametrize(
    ("index", "value", "offset"),
    [(torch.int64, 9, False), (torch.int64, -1, False), (torch.int64, 1 << 40, False), (INT32, 77, False),
     (INT32, -5, True), (torch.int64, 1000, True)],
)  # fmt: skip
def test_bad_input(interpreters: Interpreters, index: torch.dtype, value: int, offset: bool) -> None:
    """It is reported by site, table and value; other bags are right, and so are later calls."""
    call = Exchange(even(2, 3), index=index, rows=9)
    words = interpreters(2).run(reported, call, 2, 1 if offset else 0, value, offset)
    assert words[0] == 0
    code, table, low = words[1] >> 48, words[1] >> 32 & 0xFFFF, words[1] & 0xFFFFFFFF
    assert (code, table) == (SITE * CODES_PER_SITE + (BAD_BAG.value if offset else BAD_INDEX.value), 2)
    if not offset:
        assert low == min(value, 2**31 - 1) & 0xFFFFFFFF
    else:
        assert low in (0, 1)  # a bag that ends or begins there


def test_lost_peer(interpreters: Interpreters) -> None:
    """The record says what a rank waited for, for whom and in which call, and the kernel ends."""
    records = interpreters(2).run(lose, Exchange(even(2)), 1)
    raised, what, source, _, epoch = records[0][:5]
    assert (raised, what, source, epoch) == (1, SITE * CODES_PER_SITE + POOLING.value, 1, 1)
    assert not any(records[1])
