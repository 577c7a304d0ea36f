"""Pools that tests of failures spoil."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture
def fresh() -> Iterator[Callable[[int], RankPool]]:
    """`fresh(world)`: a pool for one test."""
    pools: list[RankPool] = []

    def pool(world: int) -> RankPool:
        pools.append(RankPool(world))
        return pools[-1]

    yield pool
    for each in pools:
        if each.alive:
            each.close()
