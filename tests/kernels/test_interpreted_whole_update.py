"""The kernels of all_reduce_update on ranks that interpret them, against the rules in fp64."""

from collections.abc import Callable

import pytest
import torch

from autofuse.native_kernels.gpu.state import CODES_PER_SITE, Record, Wait
from tests.kernels.calls import SITE
from tests.kernels.optimizer_calls import Update
from tests.kernels.whole_update_calls import (
    WholeUpdate,
    as_the_reference,
    give_up_whole,
    run_whole_op,
    run_whole_updates,
    run_without_pause,
    whole_cases,
)
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]


@pytest.mark.parametrize(("programs", "step"), [(1, 3), (3, 1), (16, 3)])
def test_exact(interpreters: Interpreters, programs: int, step: int) -> None:
    """Of fewer programs than buckets, and of more. Calls use the halves of the memory by turns."""
    calls = [*whole_cases().values()][::step]
    interpreters(2).run(run_whole_updates, calls, programs, programs, timeout=120)


@pytest.mark.parametrize(
    ("world", "step"), [(3, 2), *(pytest.param(world, 1, marks=pytest.mark.full) for world in (4, 8))]
)
def test_more_ranks(interpreters: Interpreters, world: int, step: int) -> None:
    """Sums of three numbers depend on their order."""
    calls = [*whole_cases().values()][1::step]
    interpreters(world).run(run_whole_updates, calls, 2, 2, timeout=300)


@pytest.mark.parametrize("name", ["one bucket", "empty tensors"])
def test_back_to_back(interpreters: Interpreters, name: str) -> None:
    interpreters(3).run(run_without_pause, whole_cases()[name], 15, timeout=120)


@pytest.mark.parametrize("firm", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_programs_that_are_placed_late(interpreters: Interpreters, firm: int, seed: int) -> None:
    """States change once, whoever sends, and also where programs of the margin have left."""
    interpreters(2).run(run_whole_updates, [*whole_cases().values()], 4, firm, seed, timeout=240)


def test_programs_of_the_margin(interpreters: Interpreters) -> None:
    """They leave while a rank has not begun, and the last program does their shares."""
    calls = [*whole_cases().values()][::3]
    interpreters(3).run(run_whole_updates, calls, 4, 1, None, True, timeout=240)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("name", ["odd lengths, kept", "momentum"])
def test_as_the_op_runs_it(interpreters: Interpreters, name: str, on_device: bool) -> None:
    interpreters(2).run(run_whole_op, whole_cases()[name], on_device, timeout=120)


@pytest.mark.parametrize("large", [1.0, 1.5e4])
@pytest.mark.parametrize("mean", [True, False])
def test_as_the_reference(interpreters: Interpreters, mean: bool, large: float) -> None:
    """A sum is rounded before it is divided, so that one of large float16 is infinite, and so is its mean."""
    half = torch.float16
    call = WholeUpdate(Update((2000, 7), "sgd", (half, torch.float32), mean=mean), kept=(0, 1), large=large)
    interpreters(2).run(as_the_reference, call, timeout=120)


def test_a_lost_rank(interpreters: Interpreters) -> None:
    """All others name it, and change nothing."""
    for name in ("one bucket", "bf16"):
        records = interpreters(3).run(give_up_whole, whole_cases()[name], 1, timeout=60)
        for rank in (0, 2):
            assert records[rank][Record.RAISED] == 1
            assert records[rank][Record.SOURCE] == 1
            assert records[rank][Record.CODE] == SITE * CODES_PER_SITE + Wait.REDUCING
