"""After a failure: who is told, and that a group that was reset, or whose job was restarted, works."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

import autofuse
from autofuse import config
from autofuse.agreeing import Agreed
from autofuse.lowering import limits, watcher
from autofuse.lowering.cpu import rendezvous, workspace, workspaces
from autofuse.lowering.proofs import exchange
from autofuse.lowering.torch_internals import fake_store
from autofuse.passes.schedules.schedule import Proof
from tests.ranks import WAIT_S, RankPool, fresh_group

Ranks = Callable[[int], RankPool]


def _sum(group: str, rank: int, value: float) -> Tensor:
    x = torch.full((3, 4), float(value + rank))
    return autofuse.ops.matmul_all_reduce(x, torch.ones(4, 5), group=group)


def _is_right(group: str, rank: int, world: int, calls: int) -> None:
    for value in range(calls):
        expected = 4.0 * sum(value + r for r in range(world))
        assert bool((_sum(group, rank, value) == expected).all()), value


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _reset(rank: int, world: int, met: bool, late: int) -> list[str]:
    """What each rank was told of a call that rank `late` misses, and of a reset that it misses."""
    group = fresh_group()
    if met:
        _is_right(group, rank, world, 3)
    with config.patch(timeout_s=0.5):
        if rank == late:
            time.sleep(1.5)
            # What its peers had sent before they gave up completes one call.
            told = ["", _error_of(lambda: [_sum(group, rank, 0.0) for _ in range(2)])]
        else:
            told = [
                _error_of(call) for call in (lambda: _sum(group, rank, 0.0), lambda: autofuse.reset(group))
            ]
    dist.barrier()
    autofuse.reset(group)
    _is_right(group, rank, world, 1000)
    autofuse.reset(group)  # also where nothing has failed
    _is_right(group, rank, world, 3)
    return told


@pytest.mark.parametrize("met", [True, False])
def test_a_group_is_usable_after_a_reset(ranks: Ranks, met: bool) -> None:
    """Also where some ranks had given up before the group had met."""
    late = 1
    results = ranks(3).run(_reset, met, late)
    for rank, (call, then) in enumerate(results):
        if rank != late:
            assert "waited 0.5 s for rank" in call
            assert f"waited 0.5 s for ranks [{late}]" in then
        else:
            assert ("gave up" if met else "waited 0.5 s for ranks") in then


def _skips(rank: int, world: int, reset_by: int, met: bool) -> tuple[str, float]:
    """What a rank is told that waits for one which resets the group without the call, and after how long."""
    group, begun = fresh_group(), time.monotonic()
    if met:
        _is_right(group, rank, world, 1)
    told = "" if rank == reset_by else _error_of(lambda: _sum(group, rank, 0.0))
    for _ in range(2):  # also once more
        autofuse.reset(group)
        _is_right(group, rank, world, 3)
    return told, time.monotonic() - begun


@pytest.mark.parametrize("met", [True, False])
def test_who_waits_for_a_rank_that_resets_its_group_is_told_at_once(ranks: Ranks, met: bool) -> None:
    """Such as a rank whose program has failed between two calls."""
    for rank, (told, seconds) in enumerate(ranks(3).run(_skips, 1, met)):
        assert rank == 1 or "gave up: autofuse.reset was called" in told
        assert seconds < WAIT_S / 2


def _straggles(rank: int, world: int) -> None:
    """Ranks reset the group while others are still in a call that all have come to."""
    group = fresh_group()
    _is_right(group, rank, world, 3)
    for _ in range(3):
        with workspaces.workspace_for(group).call("relay", "here", "", 64) as call:
            if rank == 1:
                call.wait(2, 0)
            elif rank == 2:
                time.sleep(0.5)  # longer than a wait sleeps
                call.signal(1, 0)
        autofuse.reset(group)


def test_a_reset_fails_no_call_that_others_are_still_in(ranks: Ranks) -> None:
    ranks(3).run(_straggles)


def test_a_time_limit_is_a_number_of_seconds() -> None:
    for wrong in (0, -1.0, float("inf"), float("nan"), "5", True):
        with config.patch(timeout_s=wrong), pytest.raises(ValueError, match=r"timeout_s=.*positive number"):
            limits.limit_s(370.0)


def _interrupted(rank: int, world: int) -> str:
    """Of a call after one that was interrupted while the group met."""
    group = fresh_group()
    with suppress(KeyboardInterrupt), patch.object(rendezvous, "all_gather", side_effect=KeyboardInterrupt):
        _sum(group, rank, 0.0)
    told = _error_of(lambda: _sum(group, rank, 0.0))
    autofuse.reset(group)
    _is_right(group, rank, world, 3)
    return told


def test_an_interrupted_meeting_needs_a_reset(ranks: Ranks) -> None:
    """A rank that visited the store once more would wait for a visit that nobody makes."""
    for told in ranks(2).run(_interrupted):
        assert "did not meet: KeyboardInterrupt" in told


def _exchanged(rank: int, world: int) -> list[str]:
    """What each rank is told of proofs that rank 1 exchanges too late, and less often."""
    group, told = fresh_group(), []
    with config.patch(timeout_s=0.3):
        for late in (False, True, True):
            if rank == late:
                told.append(_error_of(lambda: exchange(group, "a proof")))
            dist.barrier()
    autofuse.reset(group)
    return [*told, *exchange(group, f"of {rank}")]


def test_a_reset_repairs_an_exchange_of_proofs(ranks: Ranks) -> None:
    """A rank that comes too late does not find what its peers have left."""
    first, second = ranks(2).run(_exchanged)
    assert "waited 0.3 s for ranks [1]" in first[0]
    assert all("waited 0.3 s for ranks [0]" in told for told in second[:2])
    assert first[1:] == second[2:] == ["of 0", "of 1"]


def _compared_again(rank: int, world: int) -> list[bool]:
    """Whether a graph runs as compiled: before a reset of its group, or of another one, and after them. One
    rank has called it more often."""
    group, other, told = fresh_group(), fresh_group(), []
    graph = Agreed(lambda: True, lambda: False, [Proof(group, "a", ())], Mock(inputs=[], check_every=0), {})
    calls = [graph() for _ in range(2 + rank)]
    for each in (other, group):
        autofuse.reset(each)
        graph._proofs = [Proof(group, f"of {rank}", ())]
        told.append(graph())
    return [all(calls), *told]


def test_after_a_reset_ranks_compare_proofs_again(ranks: Ranks) -> None:
    assert ranks(2).run(_compared_again) == [[True, True, False]] * 2


def _late(rank: int, world: int) -> list[str]:
    """Warnings of a call for which the last rank is late, but not too late."""
    told: list[str] = []
    handler = Mock(level=logging.WARNING, handle=lambda record: told.append(record.getMessage()))
    group = fresh_group()
    _is_right(group, rank, world, 2)
    with config.patch(timeout_s=1.6), patch.object(workspace.log, "handlers", [handler]):
        dist.barrier()
        if rank == world - 1:
            time.sleep(1.1)
        _is_right(group, rank, world, 2)
    return told


def test_a_long_wait_warns_and_goes_on(ranks: Ranks) -> None:
    first, last = ranks(2).run(_late)
    (warning,) = first
    assert "autofuse.matmul_all_reduce at eager, epoch 4, rank 0" in warning
    assert "has waited 0.8 of 1.6 s for rank 1; it is late" in warning
    assert not last


def _limits(rank: int, world: int) -> list[float]:
    found = []
    for seconds in (400, 40):
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=seconds))
        with config.patch(timeout_s=None):
            found.append(limits.limit_s(workspaces.workspace_for(group.group_name)._default_limit))
        dist.destroy_process_group(group)
    return found


def test_ops_give_up_before_the_collectives_of_their_group(ranks: Ranks) -> None:
    assert ranks(2).run(_limits) == [[370.0, 20.0]] * 2
    with config.patch(timeout_s=5):
        assert limits.limit_s(370.0) == 5.0


def test_a_compiled_function_raises_what_failed_in_its_groups() -> None:
    """Where Inductor replays CUDA graphs, no op is called that could raise."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    try:
        name = dist.group.WORLD.group_name
        ours = torch.compile(lambda x: funcol.all_reduce(x, "sum", name) + 1, backend="autofuse")
        others = torch.compile(lambda x: x + 1, backend="autofuse")
        x = torch.ones(3)
        torch.testing.assert_close(ours(x), others(x))
        group = Mock(group_name=name, **{"check.side_effect": RuntimeError("rank 1 did not come")})
        watcher.watch(group)
        watcher.failed.add(name)
        others(x)
        for call in (lambda: ours(x), autofuse.check, lambda: autofuse.check(name)):
            with pytest.raises(RuntimeError, match="rank 1 did not come"):
                call()
        group.check.side_effect = None
        ours(x)
        assert not watcher.failed
    finally:
        watcher.failed.clear()
        dist.destroy_process_group()


PROGRAM = """
import os, sys, torch, torch.distributed as dist, autofuse
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
# gloo itself does not work twice with the same keys.
store = dist.PrefixStore(f"attempt {attempt}", store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
x, w = torch.ones(4, 8), torch.ones(8, 8)
for call in range(20):
    if attempt == 0 and call == 10 and rank == 1:
        os._exit(7)
    y = autofuse.ops.matmul_all_reduce(x, w)
    assert bool((y == 16).all())
print(f"rank {rank} of attempt {attempt} is through")
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_job_that_torchrun_restarts_in_place_works(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [sys.executable, *torchrun, "--nproc-per-node=2", "--max-restarts=1", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of attempt 1 is through" in done.stdout
