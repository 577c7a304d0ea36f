"""exchange_bags on ranks that interpret it, bitwise against pooling bag by bag."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autofuse.native_kernels.gpu.state import CODES_PER_SITE, Record, Wait
from tests.kernels.bag_sum_calls import CONFIG, BagSums, reported
from tests.kernels.calls import SITE, give_up, run_calls
from tests.kernels.embedding_calls import Exchange
from tests.ranks import RankPool
from tests.subsets import in_tiers

Interpreters = Callable[[int], RankPool]

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
SUM, MEAN, MAX = range(3)
ONCE = replace(CONFIG, once=True)


def of(*dims: int, b: int = 12, **options: object) -> Exchange:
    return Exchange((dims,), b=b, **options)  # type: ignore[arg-type]


CALLS = [
    BagSums(of(16, 8)),
    BagSums(of(5, 3, 72, b=9, pooling=7), mean=True, config=ONCE),  # odd rows, and one wider than a tile
    BagSums(of(8, b=1, last=True)),  # the last ranks own no bag
    BagSums(of(24, 8, b=70, pooling=1, index=INT32)),  # several slices
    BagSums(of(16, 16, b=72, dtypes=(FP32,), wire=FP32, pooling=1), all_ranks=False),
    BagSums(of(16, 8, b=6, mode=MEAN, padding=3, dtypes=(FP16,), wire=FP16), all_ranks=False, mean=True),
    BagSums(of(8, 8, b=6, dtypes=(FP32, BF16), wire=BF16, mode=MAX, padding=2), config=ONCE, programs=3),
    BagSums(of(8, 8, b=6, weighted=True, last=True), all_ranks=False),
    BagSums(of(16, 8, pooling=0)),  # every bag is empty
    BagSums(of(16, 8, b=20), only=1),
]


@in_tiers(full={"world": [4, 5]}, world=[2, 3, 4, 5], part=range(3))
def test_back_to_back(interpreters: Interpreters, world: int, part: int) -> None:
    """Calls use the halves of the memory by turns."""
    calls = [call for call in CALLS if call.all_ranks or call.of.b % world == 0][part::3]
    interpreters(world).run(run_calls, [*calls, calls[0]], timeout=120)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 9))])
def test_programs_that_are_placed_late(interpreters: Interpreters, seed: int) -> None:
    interpreters(2).run(run_calls, CALLS[seed % 3 :: 3], 0, 1, seed, timeout=120)


@pytest.mark.parametrize("config", [CONFIG, ONCE], ids=str)
def test_a_lost_rank(interpreters: Interpreters, config: object) -> None:
    """The other ranks name the lost rank, and their kernels end. The host tells the kernels which rank that
    is; waits for slow ranks go on."""
    call = replace(CALLS[0], config=config)
    records = interpreters(3).run(give_up, call, 1, True, timeout=60)
    for rank in (0, 2):
        assert records[rank][Record.RAISED] == 1
        assert records[rank][Record.SOURCE] == 1
        assert records[rank][Record.CODE] in {
            SITE * CODES_PER_SITE + what for what in (Wait.REDUCING, Wait.COPYING)
        }


@pytest.mark.parametrize(
    ("index", "value", "offset"),
    [(torch.int64, 9, False), (torch.int64, 1 << 40, False), (INT32, -5, False), (INT32, -5, True),
     (torch.int64, 1000, True)],
)  # fmt: skip
@pytest.mark.parametrize("config", [CONFIG, ONCE], ids=str)
def test_bad_input(
    interpreters: Interpreters, config: object, index: torch.dtype, value: int, offset: bool
) -> None:
    """It is reported by site, table and value; other bags are right, and so are later calls."""
    call = BagSums(of(8, 8, 16, b=7, index=index), config=config)  # type: ignore[arg-type]
    words = interpreters(2).run(reported, call, 2, 1 if offset else 0, value, offset)
    assert words[0] == 0
    code, table, low = words[1] >> 48, words[1] >> 32 & 0xFFFF, words[1] & 0xFFFFFFFF
    assert (code, table) == (SITE * CODES_PER_SITE + (Wait.BAD_BAG if offset else Wait.BAD_INDEX), 2)
    assert low in ((0, 1) if offset else (min(value, 2**31 - 1) & 0xFFFFFFFF,))
