"""Ranks whose kernels are interpreted: CPU processes that map each other's memory."""

import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Callable[[int], RankPool]]:
    """As `ranks`, with TRITON_INTERPRET=1, which Triton reads when it is imported."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            with patch.dict(os.environ, TRITON_INTERPRET="1"):
                pools[world] = RankPool(world)
        return pools[world]

    yield pool
    for each in pools.values():
        if each.alive:
            each.close()
