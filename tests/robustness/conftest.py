"""Ranks that start at once: forked from a process that has imported everything and compiled something."""

from collections.abc import Callable, Iterator
from multiprocessing import get_context

import pytest

from autofuse import config
from tests.ranks import WAIT_S, RankPool


def forked(world: int) -> RankPool:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.robustness.preload"])
    pool = RankPool(world, "forkserver")
    pool.run(_limit_waits)
    return pool


def _limit_waits(rank: int, world: int) -> None:
    config.timeout_s = WAIT_S  # the fork server had read the environment before


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)`: the pool of that size; started when first asked for, replaced after a failure."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            pools[world] = forked(world)
        return pools[world]

    yield pool
    for each in pools.values():
        if each.alive:
            each.close()


@pytest.fixture
def fresh() -> Iterator[Callable[[int], RankPool]]:
    """`fresh(world)`: a pool for one test."""
    pools: list[RankPool] = []

    def pool(world: int) -> RankPool:
        pools.append(forked(world))
        return pools[-1]

    yield pool
    for each in pools:
        if each.alive:
            each.close()
