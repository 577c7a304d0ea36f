"""Calls one after another: many, of changing shapes, with ranks that come late, from buffers full of NaN."""

import itertools
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autofuse
from autofuse.lowering.cpu.workspace import Call
from tests.ops.dense import ORDERS, poison, same_on_all_ranks, world_group
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import MAKERS, Case
from tests.subsets import in_tiers

Ranks = Callable[[int], RankPool]
CALLS = 1000
SIZES = (1, 2, 3, 5, 8, 13, 31)


def _check(case: Case, factor: int, what: object) -> Tensor:
    actual = case.run(factor)
    expected = (case.exact * factor).float()
    assert torch.equal(actual, expected), (what, actual, expected)
    return actual


def _many(rank: int, world: int) -> int:
    group = fresh_group()
    cases = [
        (name, size, maker(rank, world, size, group)) for size in SIZES for name, maker in MAKERS.items()
    ]
    generator = torch.Generator().manual_seed(0)  # the same calls on all ranks
    for i in range(CALLS):
        name, size, case = cases[int(torch.randint(0, len(cases), (), generator=generator))]
        _check(case, 1 + i % 7, (i, name, size))
    return i + 1


@pytest.mark.parametrize("world", [2, 4])
def test_a_thousand_calls_of_mixed_ops_and_shapes(ranks: Ranks, world: int) -> None:
    assert ranks(world).run(_many, timeout=120) == [CALLS] * world


def _late(rank: int, world: int, straggler: int, inside: bool) -> None:
    group = fresh_group()
    signal = Call.signal

    def slow(call: Call, dest: int, slot: int) -> None:
        time.sleep(0.01)
        signal(call, dest, slot)

    for order, (name, maker) in itertools.product(ORDERS, MAKERS.items()):
        case = maker(rank, world, 3, group)
        with autofuse.config.patch(order=order):
            if rank == straggler and not inside:
                time.sleep(0.05)
            with patch.object(Call, "signal", slow if rank == straggler and inside else signal):
                for factor in (1, 2, 3):
                    _check(case, factor, (order, name, factor))


@in_tiers(straggler=range(4), inside=[False, True])
def test_a_straggler_changes_nothing(ranks: Ranks, straggler: int, inside: bool) -> None:
    ranks(4).run(_late, straggler, inside, timeout=120)


def _from_nan(rank: int, world: int) -> None:
    group = world_group()
    for order, size, (name, maker) in itertools.product(ORDERS, (1, 7), MAKERS.items()):
        case = maker(rank, world, size, group)
        with autofuse.config.patch(order=order):
            poison(group)
            for factor in (1, 2, 3):  # the buffers alternate
                _check(case, factor, (order, name, size))


@pytest.mark.parametrize("world", [2, 3])
def test_memory_full_of_nan_does_not_show(ranks: Ranks, world: int) -> None:
    ranks(world).run(_from_nan, timeout=120)


def _twice(rank: int, world: int) -> list[Tensor]:
    """Results of numbers whose sums depend on their order."""
    found = []
    for order, (_, maker) in itertools.product(ORDERS, MAKERS.items()):
        case = maker(rank, world, 9, world_group())
        with autofuse.config.patch(order=order):
            results = [case.run(0.1) for _ in range(5)]
        assert all(torch.equal(results[0], r) for r in results)
        if case.replicated:
            same_on_all_ranks(results[0])
        found.append(results[0])
    return found


def test_results_are_bitwise_equal_on_all_ranks_and_in_every_run(ranks: Ranks) -> None:
    first, second = (ranks(4).run(_twice, timeout=120) for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
