"""Kernels of which some programs are placed late, in all interleavings of small worlds."""

import random

import pytest

from autofuse.lowering.progress import World, worlds


def proved(ranks: int, programs: int, count: int | None = None) -> int:
    """How many worlds there are: all are checked, or `count` of the smaller ones, in which each rank has
    late programs or one is absent."""
    found: list[World] = [w for w in worlds(ranks, programs) if count is None or all(w.late) or w.absent]
    for world in found if count is None else random.Random(0).sample(found, count):
        world.check()
    return len(found)


def test_two_ranks_of_two_programs() -> None:
    assert proved(2, 2) == 70


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "programs", "count"), [(3, 2, 12), (2, 3, 12)])
def test_larger_worlds(ranks: int, programs: int, count: int) -> None:
    assert proved(ranks, programs, count) > count
