"""Calls of a workspace over real processes: ordering, growth, back-to-back calls, stragglers, groups."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from autofuse.lowering.workspace import Call, workspace_for
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]


def push_to_all(call: Call, rank: int, world: int, value: float, n: int) -> list[torch.Tensor]:
    """Every rank stores `n` values into every rank's buffer; returns what arrived, by source."""
    stride = -(-n * 4 // 64) * 64
    mine = [call.tensor(rank, source * stride, (n,), torch.float32) for source in range(world)]
    for step in range(world):
        dest = (rank + 1 + step) % world
        call.tensor(dest, rank * stride, (n,), torch.float32).fill_(value + rank)
        call.signal(dest, 3)
    arrived = []
    for source in range(world):
        call.wait(source, 3)
        arrived.append(mine[source].clone())
        mine[source].fill_(torch.nan)
    return arrived


def _bytes(n: int, world: int) -> int:
    return world * (-(-n * 4 // 64) * 64)


def _many_calls(rank: int, world: int, calls: int, straggler: int) -> float:
    workspace = workspace_for(fresh_group())
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 3000, (calls,), generator=generator).tolist()
    start = time.perf_counter()
    for i, n in enumerate(sizes):
        if rank == straggler:
            time.sleep(0.002)
        with workspace.call("push", "here", str(n), _bytes(n, world)) as call:
            for source, got in enumerate(push_to_all(call, rank, world, 10.0 * i, n)):
                assert bool((got == 10.0 * i + source).all()), (i, n, source)
    return (time.perf_counter() - start) / calls


@pytest.mark.parametrize("world", [2, 4])
def test_a_thousand_calls_of_changing_size(ranks: Ranks, world: int) -> None:
    print("seconds a call", ranks(world).run(_many_calls, 1000, -1))


@pytest.mark.parametrize("straggler", range(4))
def test_a_straggler_on_each_rank_in_turn(ranks: Ranks, straggler: int) -> None:
    ranks(4).run(_many_calls, 60, straggler)
