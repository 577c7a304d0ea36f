"""exchange_sums on ranks that interpret it, bit by bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autofuse.native_kernels.gpu.state import CODES_PER_SITE, Record, Wait
from tests.kernels.calls import FP16, SITE, give_up, run_calls
from tests.kernels.sum_calls import CONFIG, Sums, sum_of_each_kind
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]

ONCE = replace(CONFIG, once=True)
CALLS = [
    Sums(24, 40, 16),
    Sums(13, 24, 16, mean=True, dtype=FP16),
    Sums(1, 8, 16),  # the last ranks have no item
    Sums(24, 40, 16, config=ONCE),
    Sums(5, 72, 16, mean=True, config=ONCE, programs=3),
    Sums(24, 16, 16, all_ranks=False),
    Sums(24, 40, 16, dtype=torch.float32),
    Sums(24, 24, 16, dtype=torch.float32, all_ranks=False, mean=True),
    Sums(9, 24, 16, dtype=torch.float32, config=ONCE),
    Sums(60, 8, 16, all_ranks=False, mean=True, config=replace(CONFIG, length=128)),
]


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_back_to_back(interpreters: Interpreters, world: int) -> None:
    """Calls use the halves of the memory by turns."""
    calls = [call for call in CALLS if call.all_ranks or call.m % world == 0]
    interpreters(world).run(run_calls, [*calls, *calls[1:3]], timeout=120)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_programs_that_are_placed_late(interpreters: Interpreters, seed: int) -> None:
    interpreters(2).run(run_calls, CALLS, 0, 1, seed, timeout=120)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16, torch.float32], ids=str)
def test_values_of_each_kind(interpreters: Interpreters, dtype: torch.dtype) -> None:
    for config in (CONFIG, ONCE):
        interpreters(3).run(sum_of_each_kind, dtype, config, timeout=60)


@pytest.mark.parametrize("config", [CONFIG, ONCE], ids=str)
def test_a_lost_rank(interpreters: Interpreters, config: object) -> None:
    """It is named, and the kernel ends."""
    records = interpreters(3).run(give_up, Sums(24, 40, 16, config=config), 1, False, timeout=60)
    for rank in (0, 2):
        assert records[rank][Record.RAISED] == 1
        assert records[rank][Record.SOURCE] == 1
        assert records[rank][Record.CODE] in {
            SITE * CODES_PER_SITE + what for what in (Wait.REDUCING, Wait.COPYING)
        }
