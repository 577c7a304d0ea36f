"""What goes wrong between ranks becomes an error on all of them, in time and by name."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from autofuse import config
from autofuse.lowering.cpu import rendezvous
from autofuse.lowering.cpu.rendezvous import GroupSpansHosts
from autofuse.lowering.cpu.workspace import Workspace
from autofuse.lowering.cpu.workspaces import workspace_for
from tests.ranks import RankPool, RanksFailed, fresh_group

Ranks = Callable[[int], RankPool]


def _barrier(ws: Workspace, key: str = "") -> None:
    with ws.call("barrier", "model.py:1", key, 64) as call:
        for peer in range(ws.world):
            call.signal(peer, 0)
        for peer in range(ws.world):
            call.wait(peer, 0, tile=7)


def _error_of(function: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        function()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def _left_over(pool: RankPool) -> list[str]:
    return [p.name for pid in pool.pids for p in Path("/dev/shm").glob(f"af-{pid}-*")]


def _skips(rank: int, world: int, lazy: int) -> tuple[str, float, str]:
    ws = workspace_for(fresh_group())
    _barrier(ws)
    with config.patch(timeout_s=0.7):
        if rank == lazy:
            time.sleep(2.5)
            text, seconds = "", 0.0
            _barrier(ws)  # rank 0 had signalled before it gave up: this call is complete
        else:
            text, seconds = _error_of(lambda: _barrier(ws))
    return text, seconds, _error_of(lambda: _barrier(ws))[0]


def test_a_wait_is_bounded_and_names_everything(ranks: Ranks) -> None:
    lazy = 1
    results = ranks(2).run(_skips, lazy)
    text, seconds, later = results[0]
    for part in (
        "barrier at model.py:1",
        "tile 7",
        "epoch 3",
        "waited 0.7 s for rank 1",
        "AUTOFUSE_TIMEOUT_S",
    ):
        assert part in text
    assert 0.5 < seconds < 2.4
    assert "cannot be used after" in later
    assert text in later
    assert "rank 0 gave up: autofuse.barrier" in results[lazy][2]


def _chain(rank: int, world: int) -> str:
    """Rank 0 waits for rank 1 first; rank 1 waits for rank 2, which is late; rank 3 waits for rank 0."""
    ws = workspace_for(fresh_group())
    _barrier(ws)
    with config.patch(timeout_s=1.0):
        time.sleep((0.0, 0.3, 2.5, 0.3)[rank])

        def call() -> None:
            with ws.call("barrier", "model.py:1", "", 64) as call:
                call.wait((1, 2, 3, 0)[rank], 0)

        return _error_of(call)[0]


def test_all_ranks_name_the_lost_rank_and_not_the_messenger(ranks: Ranks) -> None:
    """The first rank to give up finds that the one that it waits for waits itself."""
    first, *others = ranks(4).run(_chain)
    assert "rank 0 of group" in first
    assert "waited 1 s for rank 1, which waits for rank 2; it is late or has skipped this call" in first
    for text in others:
        assert f"rank 0 gave up: {first}" in text


def _dies(rank: int, world: int, victim: int, moment: str) -> None:
    ws = workspace_for(fresh_group())
    for _ in range(20):
        _barrier(ws)
    if rank == victim and moment == "between calls":
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "before a group meets":
        other = fresh_group()
        _barrier(ws)  # gloo still connects the other ranks: a death would fail their fresh_group()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        text, seconds = _error_of(lambda: workspace_for(other))
        raise AssertionError(f"{text} [{'in time' if seconds < 5 else 'late'}]")

    def call() -> None:
        with ws.call("step", "model.py:2", "", 1 << 20) as call:
            for peer in range(world):
                call.signal(peer, 0)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            for peer in range(world):
                call.signal(peer, 1)
            for peer in range(world):
                call.wait(peer, 1)

    text, seconds = _error_of(call)
    raise AssertionError(f"{text} [{'in time' if seconds < 5 else 'late'}]")


@pytest.mark.parametrize(
    ("world", "moment"), [(3, "between calls"), (4, "in a call"), (3, "before a group meets")]
)
def test_a_killed_rank_is_named_by_all_others(world: int, moment: str) -> None:
    pool = RankPool(world)
    with pytest.raises(RanksFailed) as failure:
        pool.run(_dies, 2, moment)
    text = str(failure.value)
    assert "rank 2: died with exit code -9" in text
    assert text.count("has died") == world - 1
    assert text.count("[in time]") == world - 1
    assert "rank 2 (pid" in text
    assert _left_over(pool) == []


def _dies_while_growing(rank: int, world: int) -> None:
    ws = workspace_for(fresh_group())
    kill = Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with patch.object(rendezvous, "map_segment", kill) if rank == 1 else nullcontext():
        text, _ = _error_of(lambda: ws.call("big", "model.py:3", "", 1 << 24).__enter__())
    raise AssertionError(text)


def test_a_rank_killed_while_buffers_grow_leaves_nothing() -> None:
    pool = RankPool(2)
    with pytest.raises(RanksFailed, match=r"rank 1 \(pid \d+\) has died"):
        pool.run(_dies_while_growing)
    assert _left_over(pool) == []


def _disagrees(rank: int, world: int, odd: int, known: bool) -> str:
    ws = workspace_for(fresh_group())
    if known:  # calls that were seen before do not meet first: the wait itself finds out
        for key in ("shape 8", "shape 9"):
            _barrier(ws, key)
    return _error_of(lambda: _barrier(ws, "shape 9" if rank == odd else "shape 8"))[0]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_disagree_all_raise_with_both_texts(ranks: Ranks, world: int, known: bool) -> None:
    for text in ranks(world).run(_disagrees, world - 1, known):
        assert "the ranks disagree" in text
        assert all(part in text for part in ("shape 8", "shape 9", "barrier at model.py:1"))


def _error_inside(rank: int, world: int) -> str:
    ws = workspace_for(fresh_group())

    def call() -> None:
        with ws.call("kernel", "model.py:4", "", 64) as call:
            if rank == 0:
                raise RuntimeError("no such expert")
            call.wait(0, 0)

    return _error_of(call)[0]


def test_an_error_inside_a_call_reaches_the_peers(ranks: Ranks) -> None:
    mine, theirs = ranks(2).run(_error_inside)
    assert mine == "no such expert"
    assert "rank 0 gave up: no such expert" in theirs


def _interrupted(rank: int, world: int) -> tuple[str, str]:
    ws = workspace_for(fresh_group())
    try:
        with ws.call("kernel", "model.py:5", "", 64) as call:
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                signal.signal(signal.SIGALRM, signal.default_int_handler)
            call.wait(1 - rank, 0)
    except KeyboardInterrupt:
        return "interrupted", _error_of(lambda: _barrier(ws))[0]
    except RuntimeError as error:
        return str(error), ""
    return "", ""


def test_a_waiting_rank_can_be_interrupted(ranks: Ranks) -> None:
    mine, theirs = ranks(2).run(_interrupted)
    assert mine[0] == "interrupted"
    assert "cannot be used after: KeyboardInterrupt" in mine[1]
    assert "rank 0 gave up: KeyboardInterrupt" in theirs[0]


def _too_much(rank: int, world: int) -> list[str]:
    ws = workspace_for(fresh_group())
    return [_error_of(lambda: ws.call("huge", "here", "", 1 << 50).__enter__())[0] for _ in range(2)]


def test_no_room_in_shared_memory_is_an_error(ranks: Ranks) -> None:
    pool = ranks(2)
    for first, later in pool.run(_too_much):
        assert "bytes of shared memory" in first
        assert first in later
    assert _left_over(pool) == []


def _destroyed(rank: int, world: int) -> tuple[str, str, bool]:
    group = dist.new_group(list(range(world)))
    name = group.group_name
    _barrier(workspace_for(name))
    ws = weakref.ref(workspace_for(name))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    gone = _error_of(lambda: workspace_for(name))[0]
    never = _error_of(lambda: workspace_for("no such group"))[0]
    return gone, never, ws() is None


def _held(rank: int, world: int) -> bool:
    group = dist.new_group(list(range(world)))
    _barrier(workspace_for(group.group_name))
    ws = weakref.ref(workspace_for(group.group_name))
    dist.destroy_process_group(group)
    _barrier(workspace_for(fresh_group()))
    gc.collect()
    return ws() is None


def test_a_destroyed_group_to_which_something_refers_gives_back_its_memory(ranks: Ranks) -> None:
    assert ranks(2).run(_held) == [True, True]


def _descriptors(rank: int, world: int) -> int:
    group = fresh_group()
    before = len(os.listdir("/proc/self/fd"))
    _barrier(workspace_for(group))
    return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list descriptors")
def test_shared_memory_holds_no_descriptors(ranks: Ranks) -> None:
    """A process with many groups would run out of them."""
    assert ranks(2).run(_descriptors) == [0, 0]


def test_a_destroyed_group_is_gone(ranks: Ranks) -> None:
    for gone, never, freed in ranks(2).run(_destroyed):
        assert freed
        assert "is gone: it was destroyed after compile" in gone
        assert "no such group" in never


def _two_hosts(rank: int, world: int) -> tuple[bool, str, bool]:
    name = fresh_group()
    errors = []
    with patch.object(rendezvous, "host_identity", lambda: f"machine {rank}"):
        for _ in range(2):
            try:
                workspace_for(name)
            except GroupSpansHosts as error:
                errors.append(error)
    return len(errors) == 2, str(errors[0]), errors[0] is errors[1]


def test_a_group_that_spans_hosts_is_refused(ranks: Ranks) -> None:
    for raised, text, same in ranks(2).run(_two_hosts):
        assert (raised, same) == (True, True)
        assert all(part in text for part in ("machine 0", "machine 1"))


def _absent(rank: int, world: int) -> str:
    name = fresh_group()
    if rank == 1:
        return ""
    with config.patch(timeout_s=0.5):
        return _error_of(lambda: workspace_for(name))[0]


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    assert "waited 0.5 s for ranks [1]" in ranks(2).run(_absent)[0]


def _forks(rank: int, world: int) -> str:
    ws = workspace_for(fresh_group())
    _barrier(ws)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, _error_of(lambda: _barrier(ws))[0].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    _barrier(ws)  # the parent goes on
    return text


def test_a_forked_child_must_not_speak_for_its_parent(ranks: Ranks) -> None:
    for text in ranks(2).run(_forks):
        assert "this process is a fork" in text


def _bad_tensor(rank: int, world: int) -> list[str]:
    texts = []
    for offset, n in ((8, 4), (0, 1 << 20), (-64, 1)):
        ws = workspace_for(fresh_group())
        try:
            with ws.call("op", "here", "", 64) as call:
                call.tensor(rank, offset, (n,), torch.float32)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_tensor_outside_the_buffer_is_refused(ranks: Ranks) -> None:
    for texts in ranks(2).run(_bad_tensor):
        assert len(texts) == 3
        assert all("not aligned to 64 or not inside a buffer of 65536 bytes" in text for text in texts)


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    """A killed rank is a zombie until its parent reads its exit status."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert rendezvous._started(process.pid) == ""
    process.wait()
