"""embedding_backward on ranks that interpret it, bitwise against adding entry by entry."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autofuse.lowering.gpu.embedding.kernels import MERGED_NCCL
from autofuse.native_kernels.gpu.state import CODES_PER_SITE
from autofuse.native_kernels.triton.comm import BAD_BAG, BAD_INDEX
from autofuse.native_kernels.triton.embedding_backward import GRADIENTS
from tests.kernels.backward_calls import (
    CONFIG,
    Backward,
    lose_backward,
    reported,
    run_backward_way,
    run_backwards,
    same_sums,
)
from tests.kernels.calls import SITE, at_random
from tests.kernels.embedding_calls import Exchange
from tests.kernels.test_interpreted_embedding import even, mixed
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
MEAN = 1


def cases(world: int) -> dict[str, Backward]:
    few = Exchange(even(world))
    one = even(world, 1)
    return {
        "plain": Backward(few),
        "mixed dims": Backward(Exchange(mixed(world), b=3), keep=True),
        "fp16": Backward(Exchange(even(world, 3), dtypes=(FP16,), wire=FP16, index=INT32), keep=True),
        "fp32": Backward(Exchange(even(world), dtypes=(FP32,), wire=FP32, index=INT32, last=True)),
        "cast": Backward(Exchange(even(world), dtypes=(FP32,), wire=BF16, padding=0)),
        "mean": Backward(Exchange(one, mode=MEAN, pooling=2, b=20, padding=3, index=INT32, last=True)),
        "weighted": Backward(Exchange(even(world), weighted=True, padding=4, last=True)),
        "weighted mean": Backward(Exchange(one, weighted=True, mode=MEAN, pooling=2, b=9)),
        "no row twice": Backward(Exchange(one, rows=5000, pooling=2)),
        "one row": Backward(Exchange(even(world), rows=1, b=17)),
        "two rows": Backward(Exchange(one, rows=2, b=21, pooling=7, dtypes=(FP32,))),
        "strips of 4": Backward(Exchange(one, rows=3, b=13), config=replace(CONFIG, strip=4, tile=16)),
        "long bags": Backward(Exchange(one, b=2, pooling=23)),
        "many bags": Backward(Exchange(one, b=70, pooling=1, rows=50)),
        "empty bags": Backward(Exchange(even(world), pooling=0)),
        "a table without rows": Backward(Exchange(even(world, 3), bare=2, last=True, weighted=True)),
        "no rows at all": Backward(Exchange(even(world), bare=9), keep=True),
        "one bag": Backward(Exchange(even(world), b=1, pooling=1)),
        "many tables": Backward(Exchange(even(world, 9, 8), b=2)),
        "one program": Backward(few, keep=True, config=replace(CONFIG, per_sm=1, adding=0)),
        "merged": Backward(Exchange(mixed(world), b=3, weighted=True), push=False),
    }  # fmt: skip


@pytest.mark.parametrize("part", range(3))
def test_bitwise(interpreters: Interpreters, part: int) -> None:
    """Calls use the halves of the memory by turns."""
    interpreters(2).run(run_backwards, list(cases(2).values())[part::3], timeout=120)


def test_bitwise_on_four_ranks(interpreters: Interpreters) -> None:
    interpreters(4).run(run_backwards, [cases(4)["mixed dims"]], timeout=120)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 9))])
def test_late_programs(interpreters: Interpreters, seed: int) -> None:
    """Of two multiprocessors; the programs that are placed wait for nothing that the others would do."""
    calls = [replace(case, config=replace(case.config, adding=0)) for case in cases(2).values() if case.push]
    interpreters(2).run(run_backwards, calls[seed % 6 :: 6], 0, seed, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world"),
    [
        *((name, 2) for name in cases(2)),
        *((name, 4) for name in ("plain", "mixed dims", "one row", "one program")),
    ],
)
def test_bitwise_in_both_halves(interpreters: Interpreters, name: str, world: int) -> None:
    """Every call in either half of the memory."""
    interpreters(world).run(run_backwards, [cases(world)[name]] * 2, timeout=120)


@pytest.mark.parametrize(
    "layout",
    ["sbc", "stbd", *(pytest.param(each, marks=pytest.mark.full) for each in ("bsc", "bstd", "sbtd"))],
)
def test_layouts(interpreters: Interpreters, layout: str) -> None:
    call = Backward(Exchange(even(2, 3, 8), b=9, pooling=2, layout=layout), keep=True)
    interpreters(2).run(run_backwards, [call] * 2, timeout=120)


@pytest.mark.parametrize(
    ("world", "count"), [(3, 5), *(pytest.param(world, 25, marks=pytest.mark.full) for world in (2, 4))]
)
def test_back_to_back(interpreters: Interpreters, world: int, count: int) -> None:
    """Calls of changing shapes, forward and backward on one memory, by ranks that straggle."""
    calls: list[Backward | Exchange] = list(cases(world).values())
    calls += [Exchange(even(world, 1, 8), b=b, layout="sbc") for b in (2, 9, 40)] * 4
    interpreters(world).run(run_backwards, at_random(calls, count, world), timeout=400)


@pytest.mark.parametrize("way", ["strips", MERGED_NCCL])
def test_as_the_op_runs_it(interpreters: Interpreters, way: str) -> None:
    """With the workspace of CPU ranks, and gloo in place of NCCL."""
    for of in (Exchange(mixed(2), b=3, last=True), Exchange(even(2), layout="stbd", wire=FP32)):
        interpreters(2).run(run_backward_way, way, Backward(of, keep=True))


@pytest.mark.parametrize(
    ("world", "mode"),
    [(2, 0), (2, MEAN), *(pytest.param(4, mode, marks=pytest.mark.full) for mode in (0, MEAN))],
)
def test_the_same_bits_in_every_run(interpreters: Interpreters, world: int, mode: int) -> None:
    """Of values whose sums depend on the order, near sums in fp64."""
    of = Exchange(even(world), pooling=9, mode=mode, weighted=mode == 0, padding=1, dtypes=(FP32,))
    interpreters(world).run(same_sums, Backward(of), timeout=120)


@pytest.mark.parametrize(
    ("index", "value", "offset"),
    [(torch.int64, 9, False), (torch.int64, -1, False), (torch.int64, 1 << 40, False), (INT32, -5, True),
     (torch.int64, 1000, True)],
)  # fmt: skip
def test_bad_input(interpreters: Interpreters, index: torch.dtype, value: int, offset: bool) -> None:
    """It is reported by site, table and value; other tables are right, and so are later calls."""
    call = Backward(Exchange(even(2, 3), index=index, rows=9))
    words = interpreters(2).run(reported, call, value, offset)
    assert words[0] == 0
    code, table = words[1] >> 48, words[1] >> 32 & 0xFFFF
    assert (code, table) == (SITE * CODES_PER_SITE + (BAD_BAG.value if offset else BAD_INDEX.value), 1)
    if not offset:
        assert words[1] & 0xFFFFFFFF == min(value, 2**31 - 1) & 0xFFFFFFFF


def test_lost_peer(interpreters: Interpreters) -> None:
    """The record says what a rank waited for, for whom and in which call, and the kernel ends."""
    records = interpreters(2).run(lose_backward, Backward(Exchange(even(2))), 1)
    raised, what, source, _, epoch = records[0][:5]
    assert (raised, what, source, epoch) == (1, SITE * CODES_PER_SITE + GRADIENTS.value, 1, 1)
    assert not any(records[1])
