"""The pool of ranks that other tests rely on."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool, RanksFailed


def _sum(rank: int, world: int, value: float) -> torch.Tensor:
    x = torch.full((3,), value + rank)
    dist.all_reduce(x)
    return x


def _raise_on_one(rank: int, world: int) -> int:
    if rank == 1:
        raise ValueError("only here")
    return rank


def _die(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(3)


def _hang(rank: int, world: int) -> None:
    time.sleep(60 if rank == 1 else 0)


def test_results_come_back_by_rank(ranks: Callable[[int], RankPool]) -> None:
    pool = ranks(2)
    for result in pool.run(_sum, 2.0):
        torch.testing.assert_close(result, torch.full((3,), 5.0))
    assert ranks(2) is pool


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (_raise_on_one, "rank 1: Traceback"),
        (_die, "rank 0: died with exit code 3"),
        (_hang, "rank 1: was still"),
    ],
)
def test_failures_name_the_rank_and_discard_the_pool(
    ranks: Callable[[int], RankPool], fn: Callable[..., object], text: str
) -> None:
    pool = ranks(2)
    with pytest.raises(RanksFailed, match=text):
        pool.run(fn, timeout=3)
    assert not pool.alive
    assert ranks(2).run(_sum, 0.0)[1].tolist() == [1.0] * 3
