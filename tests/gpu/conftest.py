"""Ranks with a GPU each. All tests here need GPUs and are marked so; `make test-gpu` runs them.

GPU_WORLDS="4" in the environment runs them with that many ranks alone; ONE_GPU=1 on one GPU.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ranks import ONE_GPU, RankPool

WORLDS = [int(world) for world in os.environ.get("GPU_WORLDS", "2 4 8").split()]


def a_gpu_each(why: str) -> pytest.MarkDecorator:
    """Marks a test that cannot work where ranks share a GPU: ONE_GPU=1 skips it and says why."""
    return pytest.mark.skipif(ONE_GPU, reason=f"ranks share one GPU: {why}")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[int], RankPool]]:
    """`gpu_ranks(world)`: a pool that tests share; a new one after a failure. Skips with too few GPUs."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if torch.cuda.device_count() < (1 if ONE_GPU else world):
            pytest.skip(f"needs {world} GPUs")
        if world not in pools or not pools[world].alive:
            pools[world] = RankPool(world, None, "nccl")
        return pools[world]

    yield pool
    for found in pools.values():
        found.close()
