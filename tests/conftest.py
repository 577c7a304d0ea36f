"""Fixtures that all tests share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPool

# A table that was tuned on this machine must not decide what tests see.
os.environ["AUTOFUSE_TABLE"] = str(Path(__file__).parents[1] / "passes/choice/tables/cpu.json")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)`: the pool of that size; started when first asked for, replaced after a failure."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            pools[world] = RankPool(world)
        return pools[world]

    yield pool
    for each in pools.values():
        if each.alive:
            each.close()
