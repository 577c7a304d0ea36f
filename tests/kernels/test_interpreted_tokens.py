"""exchange_tokens and exchange_token_packets, interpreted, bitwise against sums token by token."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autofuse.native_kernels.gpu.state import CODES_PER_SITE, Record, Wait
from tests.kernels.calls import SITE, give_up, run_calls
from tests.kernels.token_calls import BF16, CONFIG, FP32, PACKETS, Tokens, alone, reported
from tests.ranks import RankPool
from tests.subsets import in_tiers

Interpreters = Callable[[int], RankPool]

FP16 = torch.float16
ONCE = replace(CONFIG, once=True)

CALLS = [
    Tokens(12, 24, behind=BF16),
    Tokens(9, 72, k=3, before=FP32, mean=True, config=ONCE),  # a row is no multiple of an item
    Tokens(1, 8, k=1),  # the last ranks own nothing
    Tokens(70, 16, fold=True, taken=False, added=True),
    Tokens(36, 40, dtype=FP16, wire=FP16, fold=True, behind=FP16, all_ranks=False),
    Tokens(12, 8, k=4, wire=FP32, before=BF16, behind=FP32, all_ranks=False, mean=True),
    Tokens(24, 16, before=FP32, behind=FP32, one=True, added=True, config=ONCE, programs=3),
    Tokens(12, 136, taken=False, behind=FP32, added=True, all_ranks=False),
    Tokens(24, 40, k=1, counts=False),  # as of a vocabulary
    Tokens(12, 24, k=1, counts=True, all_ranks=False, mean=True),
]
PACKED = [replace(call, config=PACKETS) for call in CALLS]


@in_tiers(full={"world": [4]}, world=[2, 3, 4], part=range(2))
def test_back_to_back(interpreters: Interpreters, world: int, part: int) -> None:
    """Calls use the halves of the memory by turns."""
    calls = [*CALLS, *PACKED][part::2]
    interpreters(world).run(run_calls, [*calls, calls[0]], timeout=120)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 8))])
def test_programs_that_are_placed_late(interpreters: Interpreters, seed: int) -> None:
    calls = [*CALLS[seed % 3 :: 3], *PACKED[seed % 2 :: 2]]
    interpreters(2).run(run_calls, calls, 0, 1, seed, timeout=120)


def test_sums_of_one_rank(interpreters: Interpreters) -> None:
    interpreters(2).run(alone, CALLS, timeout=60)


@pytest.mark.parametrize("config", [CONFIG, ONCE, PACKETS], ids=str)
def test_a_lost_rank(interpreters: Interpreters, config: object) -> None:
    """The other ranks name the lost rank, and their kernels end."""
    call = replace(CALLS[0], config=config)
    records = interpreters(3).run(give_up, call, 1, True, timeout=60)
    for rank in (0, 2):
        assert records[rank][Record.RAISED] == 1
        assert records[rank][Record.SOURCE] == 1
        assert records[rank][Record.CODE] in {
            SITE * CODES_PER_SITE + what for what in (Wait.REDUCING, Wait.COPYING)
        }


@pytest.mark.parametrize("value", [27, 1 << 40, -1])
@pytest.mark.parametrize("config", [CONFIG, ONCE, PACKETS], ids=str)
def test_an_index_of_no_row(interpreters: Interpreters, config: object, value: int) -> None:
    """It is reported by site and value; other tokens are right, and so are later calls."""
    call = Tokens(12, 24, more=2, config=config)  # type: ignore[arg-type]
    words = interpreters(2).run(reported, call, 5, value, timeout=120)
    assert words[0] == 0
    assert words[1] >> 32 == (SITE * CODES_PER_SITE + Wait.BAD_INDEX) << 16
    assert words[1] & 0xFFFFFFFF == min(value, 2**31 - 1) & 0xFFFFFFFF
