"""Failures of kernels, by records that tests write instead of kernels: all ranks name the same lost rank."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist

import autofuse
from autofuse import config
from autofuse.lowering import watcher
from autofuse.lowering.gpu.memory import failures as module
from autofuse.lowering.gpu.memory.board import Board
from autofuse.lowering.gpu.memory.failures import Failures, lost_rank
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.gpu.state import (
    BAD_INPUT_WORD,
    CODES_PER_SITE,
    RECORD_WORDS,
    SLOW_SOURCE_BIT,
    Record,
    State,
    Wait,
)
from tests.ranks import RankPool, RanksFailed, fresh_group
from tests.workspace.gpu_memory import CPU, gpus, needing

WORLD, SITE = 4, 1
REDUCING, SUMS = (SITE * CODES_PER_SITE + wait for wait in (Wait.REDUCING, Wait.COPYING))


@dataclass
class Rank:
    """A rank whose kernel waits; waits[s]: the code of a wait for rank s."""

    rank: int
    board: Board
    peers: list[Mock]
    waits: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
        self.failures = Failures("0", self.rank, self.record, self.board, self.peers, 2.0)
        assert self.failures.number("autofuse.matmul_all_reduce at a.py:1") == SITE

    def gives_up(self, source: int) -> None:
        """As a kernel does; all its waits stop."""
        words = {Record.CODE: self.waits[source], Record.SOURCE: source, Record.INDEX: 3, Record.EPOCH: 7}
        for word, value in {**words, Record.RAISED: 1}.items():
            self.record[word] = value
        for s, code in self.waits.items():
            self.record[Record.WAITED + s] = code + 1
        self.waits = {}

    def look(self) -> None:
        """The host looks, then the kernel whether it is to stop."""
        self.failures.look()
        stopped = [s for s in self.waits if int(self.record[Record.STOP]) >> s & 1]
        if stopped:
            self.gives_up(stopped[0])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(module, "SETTLE_S", 0.02)
    monkeypatch.setattr(module, "LOOKS_PER_DEATH", 1)
    peers = [Mock(pid=100 + r, **{"is_dead.return_value": False}) for r in range(WORLD)]
    with Board.create(WORLD) as path:
        opened = [Rank(r, Board(path, WORLD), peers) for r in range(WORLD)]
    yield opened
    watcher.failed.clear()


def texts(ranks: list[Rank]) -> list[str]:
    """What each rank says has failed, after some looks."""
    for _ in range(8):
        for each in ranks:
            each.look()
        time.sleep(0.01)
    return [each.failures.text for each in ranks]


def test_all_ranks_name_the_lost_rank_and_not_the_messenger(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 gives up first, on the sums of rank 2, which waits for rank 3; rank 0 waits for nobody."""
    ranks[1].waits = {2: SUMS}
    ranks[2].waits = {1: SUMS, 3: REDUCING}
    assert texts(ranks) == [""] * WORLD
    ranks[1].gives_up(2)
    (text,) = set(texts(ranks))
    assert "autofuse.matmul_all_reduce at a.py:1, rank 2 of group 0: rank 3 did not come to add its" in text
    assert "call 7) within 2 s (AUTOFUSE_TIMEOUT_S" in text
    assert [r.message for r in caplog.records if r.levelno == logging.ERROR] == [text] * WORLD
    assert "0" in watcher.failed
    for each in ranks:
        with pytest.raises(RuntimeError, match="rank 3 did not come"):
            each.failures.check()


@pytest.mark.parametrize(
    ("waits", "dead", "lost"),
    [
        ({0: {1: REDUCING}}, set(), 1),
        ({0: {1: SUMS}, 1: {2: REDUCING}, 2: {}}, set(), 2),
        ({0: {1: SUMS, 2: REDUCING}, 1: {0: SUMS, 2: REDUCING}}, set(), 2),
        ({0: {1: SUMS}, 1: {0: REDUCING}}, set(), 0),  # in a circle
        ({0: {1: REDUCING, 2: REDUCING}, 2: {3: SUMS}}, {2}, 2),
        ({0: {}}, {3}, None),
    ],
)
def test_who_is_lost(waits: dict[int, dict[int, int]], dead: set[int], lost: int | None) -> None:
    assert lost_rank(waits, dead) == lost


def test_a_dead_rank_is_named_once_somebody_waits_for_it(ranks: list[Rank]) -> None:
    ranks[0].peers[2].is_dead.return_value = True
    assert texts(ranks) == [""] * WORLD
    ranks[0].waits = {1: SUMS}
    ranks[1].waits = {2: REDUCING}
    living = [ranks[0], ranks[1], ranks[3]]
    (text,) = set(texts(living))
    assert "rank 1 of group 0: rank 2 (pid 102) has died: it did not come to add its part" in text


def test_a_wait_for_some_rank_ends_when_one_has_died(ranks: list[Rank]) -> None:
    """Waits for rows of any rank name their own rank."""
    ranks[0].peers[2].is_dead.return_value = True
    ranks[0].look()
    assert [int(ranks[0].record[Record.STOP]) >> s & 1 for s in range(WORLD)] == [1, 0, 1, 0]


def test_a_peer_that_does_not_look_delays_nobody(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    ranks[0].waits = {1: REDUCING}
    ranks[0].gives_up(1)
    assert "rank 1 did not come" in texts(ranks[:1])[0]


def test_a_long_wait_is_told_once_and_goes_on(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    ranks[0].record[Record.SLOW] = (3 << SLOW_SOURCE_BIT) + REDUCING + 1
    assert texts(ranks) == [""] * WORLD
    (warning,) = (record.message for record in caplog.records)
    assert "at a.py:1, rank 0 of group 0: has waited 1 of 2 s for rank 3 to add its part" in warning


def test_bad_input_fails_all_ranks(ranks: list[Rank]) -> None:
    word = (SITE * CODES_PER_SITE + Wait.BAD_INDEX) << 48 | 2 << 32 | 77
    ranks[1].record.view(torch.int64)[BAD_INPUT_WORD] = word
    (text,) = set(texts(ranks))
    assert "rank 1 of group 0: index 77 of table 2 is outside of its rows" in text


def test_calls_that_overlap_fail_all_ranks(ranks: list[Rank]) -> None:
    ranks[1].record.view(torch.int64)[BAD_INPUT_WORD] = Wait.OVERLAP << 48 | 77
    (text,) = set(texts(ranks))
    assert "two calls of group 0 ran at the same time on the GPU of rank 1 (at call 77)" in text


def test_what_a_host_says_fails_all_ranks(ranks: list[Rank]) -> None:
    ranks[2].failures.tell("rank 2 waited in vain")
    assert set(texts(ranks)) == {"rank 2 waited in vain"}


def test_a_group_that_was_reset_is_fine(ranks: list[Rank]) -> None:
    ranks[0].waits = {1: REDUCING}
    ranks[0].gives_up(1)
    assert all(texts(ranks))
    for each in ranks:
        each.failures.pause()
    for each in ranks:  # rows of others may still be as they were
        each.failures.forget()
        each.look()
    for each in ranks:
        each.failures.resume()
    assert texts(ranks) == [""] * WORLD
    assert not watcher.failed
    assert not any(each.record.any() for each in ranks)
    ranks[2].waits = {3: SUMS}
    ranks[2].gives_up(3)
    assert all("rank 3 did not come to send a sum" in text for text in texts(ranks))


def test_the_watcher_tells_and_raises(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    """Without a call of this process; and no longer than the group lives."""
    for each in ranks:
        watcher.watch(each.failures)
    ranks[0].waits = {1: REDUCING}
    ranks[0].gives_up(1)
    end = time.monotonic() + 10
    while not watcher.failed and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        autofuse.check()
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        watcher.check({"0"})
    watcher.check({"another"})
    del each
    ranks.clear()
    watcher.check({"0"})
    assert "0" not in watcher.failed


PROGRAM = """
import os, sys, time
from unittest.mock import Mock, patch
from autofuse.lowering import watcher
watched = Mock(group_name="g")
watcher.watch(watched)
while watched.look.call_count < 2:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    count = watched.look.call_count
    time.sleep(0.3)
    os._exit(watched.look.call_count - count + len(watcher._all))
print(os.waitpid(child, 0)[1])
"""


def test_the_watcher_ends_with_the_process_and_has_no_children() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def _gives_up(record: torch.Tensor, source: int) -> None:
    """As a kernel of the first site does."""
    record[Record.CODE], record[Record.SOURCE] = REDUCING, source
    record[Record.WAITED + source], record[Record.RAISED] = REDUCING + 1, 1


def _told(group: str, until: Callable[[], None] = lambda: None) -> str:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        until()
        try:
            autofuse.check(group)
        except RuntimeError as error:
            return str(error)
        time.sleep(0.02)
    return ""


def _enters(workspace: GpuWorkspace, m: int) -> None:
    assert workspace.enter("matmul", "a.py:1", needing(8), "tiles", m, Need(m)) is not None


def _fails(rank: int, world: int) -> list[str]:
    """Rank 1 waits for rank 2; what ranks are told. Then they go on, also with what only some had called."""
    found = []
    with gpus(), patch.object(torch.cuda, "current_device", lambda: 0), config.patch(timeout_s=5.0):
        group = fresh_group()
        workspace = workspace_for(group, CPU)
        for _ in range(2):
            _enters(workspace, 1)
            dist.barrier()
            if rank == 1:
                _gives_up(workspace.memory.record, 2)
            found.append(_told(group))
            workspace.memory.signals.views[rank].fill_(7)
            workspace.memory.state[State.GIVEN_UP : State.FIRM] = 7 + rank
            workspace._kernels.add(rank)
            if rank == 0:
                workspace.calls[0] = None
                workspace._meetings += 1
            autofuse.reset(group)
            assert not workspace.memory.signals.views[rank].any()
            assert not workspace.memory.state[State.GIVEN_UP : State.FIRM].any()
            assert not workspace.memory.record.any()
            assert not workspace.calls
            _enters(workspace, 2)
        autofuse.check(group)
    return found


def test_a_group_fails_on_all_ranks_and_is_reset() -> None:
    pool = RankPool(3)
    try:
        first, *others = pool.run(_fails)
    finally:
        pool.close()
    assert all("rank 1 of group" in text and "within 5 s" in text for text in first)
    assert all("autofuse.matmul at a.py:1" in text and "rank 2 did not come to add" in text for text in first)
    assert others == [first, first]


def _is_killed(rank: int, world: int) -> None:
    with gpus(), config.patch(timeout_s=60.0):
        group = fresh_group()
        workspace = workspace_for(group, CPU)
        record = workspace.memory.record
        _enters(workspace, 1)
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

        def kernel() -> None:
            """Of rank 1, which waits for rank 2."""
            if rank == 1 and int(record[Record.STOP]) >> 2 & 1:
                _gives_up(record, 2)

        text = _told(group, kernel)
        with pytest.raises(RuntimeError, match=r"rank 2 \(pid \d+\) has died while"):
            autofuse.reset(group)
        raise AssertionError(text)


def test_a_killed_process_is_named_on_all_ranks() -> None:
    pool = RankPool(3)
    with pytest.raises(RanksFailed) as failure:
        pool.run(_is_killed)
    assert str(failure.value).count(f"rank 2 (pid {pool.pids[2]}) has died: it did not come to add its") == 2
