"""What goes wrong between ranks with GPUs is told to all of them in time, and is over after a reset."""

import re
from collections.abc import Callable

import pytest

from tests.ranks import RankPool, RanksFailed

from . import failing_on_gpus
from .conftest import WORLDS, a_gpu_each
from .expected import MOST_ERROR

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("m", "copied"),
    [
        (16, False),
        (64, False),
        (4096, False),
        pytest.param(4096, True, marks=a_gpu_each("copy engines are left out")),
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_all_name_a_lost_peer_and_go_on_after_a_reset(
    gpu_ranks: Pools, world: int, m: int, copied: bool, captured: bool
) -> None:
    found = gpu_ranks(world).run(failing_on_gpus.lost_peer, m, copied, captured, timeout=200)
    for told, error in found:
        assert f"rank {world - 1} did not come" in told
        assert "matmul_all_reduce at a.py:1" in told
        assert error < MOST_ERROR


@pytest.mark.parametrize("world", WORLDS)
def test_replays_by_inductor_raise(gpu_ranks: Pools, world: int) -> None:
    for logged, told, error in gpu_ranks(world).run(failing_on_gpus.replayed_by_inductor, timeout=300):
        assert logged == [told]
        assert f"rank {world - 1} did not come" in told
        assert error < 2 * MOST_ERROR  # two matmuls


@pytest.mark.parametrize("m", [64, 4096])
@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank_is_named_at_once(gpu_ranks: Pools, world: int, m: int) -> None:
    gpu_ranks(world)  # skips with too few GPUs
    pool = RankPool(world, None, "nccl")
    with pytest.raises(RanksFailed) as failure:
        pool.run(failing_on_gpus.killed, m, timeout=200)
    reports = re.findall(r"AssertionError: (.*) \[after ([\d.]+) s\]", str(failure.value))
    assert len(reports) == world - 1
    for text, seconds in reports:
        assert f"rank {world - 1} (pid {pool.pids[world - 1]}) has died" in text
        assert float(seconds) < 5


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_disagree_are_told_before_they_call(gpu_ranks: Pools, world: int) -> None:
    for told, error in gpu_ranks(world).run(failing_on_gpus.disagreeing, timeout=200):
        assert "the ranks disagree: rank 0 runs matmul_all_reduce at a.py:1" in told
        assert error < MOST_ERROR
