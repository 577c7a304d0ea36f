"""The kernels of optimizers on ranks that interpret them, against the rules in fp64."""

import itertools
from collections.abc import Callable

import pytest
import torch

from autofuse.lowering.gpu.choice.choose import choose, predictor_of
from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.optimizer.ways import UpdateProblem
from autofuse.lowering.update_rules import NUMBERS, adam_terms, lamb_terms, numbers_at, sgd_terms
from autofuse.native_kernels.gpu.state import CODES_PER_SITE, Record, Wait
from autofuse.native_kernels.triton.update_numbers import launch_update_numbers
from autofuse.optim.on_device import words_of
from tests.kernels.calls import SITE
from tests.kernels.optimizer_calls import cases, give_up, refuse, run_op, run_updates
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]


@pytest.mark.parametrize("part", range(3))
def test_exact(interpreters: Interpreters, part: int) -> None:
    """Calls use the halves of the memory by turns."""
    interpreters(2).run(run_updates, list(cases().values())[part::3], timeout=120)


@pytest.mark.parametrize(
    ("world", "step"), [(3, 3), *(pytest.param(world, 1, marks=pytest.mark.full) for world in (4, 8))]
)
def test_back_to_back(interpreters: Interpreters, world: int, step: int) -> None:
    interpreters(world).run(run_updates, [*cases().values()][1::step], timeout=300)


def test_tensors_of_several_ranks(interpreters: Interpreters) -> None:
    """Rank 1 of 3 owns parts of two that have other owners, too."""
    calls = [call for name, call in cases().items() if "shared" in name]
    interpreters(3).run(run_updates, [*calls, *calls], timeout=120)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_programs_that_are_placed_late(interpreters: Interpreters, seed: int) -> None:
    calls = [
        cases()[name]
        for name in (
            "bf16",
            "packets",
            "lamb packets, shared tensors",
            "one bucket",
            "clipped",
            "packets, missing",
            "pieces",
            "clipped, pieces",
            "lamb, pieces",
        )
    ]
    interpreters(2).run(run_updates, calls, seed, timeout=120)


@pytest.mark.parametrize("firm", [1, 8])
def test_programs_of_packets_that_are_placed_late(interpreters: Interpreters, firm: int) -> None:
    """Others have made their share of the sums, which they must not make again. With one firm program, those
    of the margin do all of its work if it is late."""
    calls = [call for name, call in cases().items() if "packets" in name and "long" not in name]
    for seed in range(2):
        interpreters(2).run(run_updates, calls, seed, firm, timeout=120)


@pytest.mark.parametrize(
    "name",
    [
        "odd lengths",
        "packets",
        "lamb packets",
        "pieces",
        "clipped",
        "norm of one bucket",
        "lamb",
        "lamb, clipped, pieces",
    ],
)
def test_as_the_op_runs_it(interpreters: Interpreters, name: str) -> None:
    """Nothing is written, nor launched, where ranks disagree."""
    interpreters(2).run(run_op, cases()[name], timeout=120)


def _numbers(rank: int, world: int) -> None:
    kinds = [
        (0.5, adam_terms((0.9, 0.999), 1e-8, 0.01, True)),
        (1e-3, adam_terms((0.0, 0.95), 1e-6, 0.1, False, True)),
        (0.25, sgd_terms(0.9, 0.1, 0.01, False)),
        (1.0, lamb_terms((0.9, 0.99), 1e-6, 0.02, False)),
    ]
    options = torch.stack(
        [torch.frombuffer(bytearray(words_of(*kind)), dtype=torch.float64) for kind in kinds]
    )
    before = [t for t in (0, 1, 2, 1000, 10**7) for _ in kinds] * 4  # more than a program has
    order = torch.arange(len(before), dtype=torch.int32) % len(kinds)
    counts = torch.tensor(before, dtype=torch.float64)
    numbers = torch.full((len(before), NUMBERS), torch.nan, dtype=torch.float64)
    wanted = [numbers_at(terms, t + 1, lr) for t, (lr, terms) in zip(before, itertools.cycle(kinds))]
    launch_update_numbers(counts, (order % 2).double(), order, options, numbers)
    torch.testing.assert_close(numbers, torch.tensor(wanted, dtype=torch.float64), rtol=1e-11, atol=0.0)
    assert counts.tolist() == [t + i % 2 for i, t in enumerate(before)]
    launch_update_numbers(counts, None, order, options, numbers)
    assert counts.tolist() == [t + i % 2 for i, t in enumerate(before)]


def test_numbers(interpreters: Interpreters) -> None:
    """Those that a captured step computes on the device are those of the host."""
    interpreters(2).run(_numbers, timeout=60)


@pytest.mark.parametrize("name", ["clipped", "lamb, clipped"])
def test_a_norm_that_is_not_finite(interpreters: Interpreters, name: str) -> None:
    interpreters(2).run(refuse, cases()[name], timeout=60)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 1 << 10, 1 << 20, 1 << 30])
def test_points_decide(world: int, size: int) -> None:
    """Without points the kernel is predicted to be faster, as it was wherever both were measured."""
    problem = UpdateProblem(size, -(-size // 1024 // world) + 1, "adam", (torch.bfloat16,) * 2, 2, world)
    assert choose(problem, predictor_of([])).way.startswith(("buckets", "packets"))
    for fastest in ways_of(problem):
        times = {name: 10.0 if name == fastest else 20.0 for name in ways_of(problem)}
        assert choose(problem, predictor_of([Point.of(problem, times)])).way == fastest


def test_a_lost_rank(interpreters: Interpreters) -> None:
    """It is named, and the kernel ends."""
    records = interpreters(3).run(give_up, cases()["one bucket"], 1, timeout=60)
    for rank in (0, 2):
        assert records[rank][Record.RAISED] == 1
        assert records[rank][Record.SOURCE] == 1
        assert records[rank][Record.CODE] in {
            SITE * CODES_PER_SITE + what for what in (Wait.REDUCING, Wait.COPYING)
        }


@pytest.mark.parametrize("name", ["packets of one bucket", "lamb packets of one bucket"])
def test_a_lost_rank_of_packets(interpreters: Interpreters, name: str) -> None:
    """The owner names it, and changes and sends nothing, so that the others wait for the owner in vain."""
    records = interpreters(3).run(give_up, cases()[name], 1, timeout=60)
    for rank, source, what in ((0, 1, Wait.REDUCING), (2, 0, Wait.COPYING)):
        assert records[rank][Record.RAISED] == 1
        assert records[rank][Record.SOURCE] == source
        assert records[rank][Record.CODE] == SITE * CODES_PER_SITE + what
