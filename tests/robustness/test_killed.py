"""A rank that is killed inside a fused op: the others raise in time and name it, nothing is left."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

import autofuse
from autofuse.lowering.cpu import names, rendezvous
from autofuse.lowering.cpu.workspace import Call
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.gpu.memory.board import Board
from tests.passes.dense import group as everybody
from tests.passes.harness import passes_only
from tests.ranks import RankPool, RanksFailed, fresh_group
from tests.robustness.seven import MAKERS

VICTIM, LIMIT_S = 1, 8.0


def _die_at_signal(rank: int, number: int) -> None:
    """Kill this process, if it is the victim, at its signal `number` from here on."""
    send, count = Call.signal, itertools.count()

    def lethal(call: Call, dest: int, slot: int) -> None:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        send(call, dest, slot)

    if rank == VICTIM:
        patch.object(Call, "signal", lethal).start()


def _raises(call: Callable[[], object]) -> None:
    """Hands back, as this rank's failure, what `call` raises and whether that was in time."""
    start = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        raise AssertionError(f"{error} [{'in time' if seconds < LIMIT_S else 'late'}]") from error
    raise AssertionError("the call returned")


def _compiled(rank: int, world: int, generated: bool, number: int) -> None:
    def model(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        hidden = funcol.all_reduce(x @ v, "sum", everybody()).relu()
        return funcol.reduce_scatter_tensor(hidden @ w, "sum", 0, everybody())

    args = tuple(torch.randn(16, 16) for _ in range(3))
    backend = "autofuse" if generated else passes_only()
    compiled = torch.compile(model, backend=backend)
    with autofuse.debug() as report:
        compiled(*args)
    assert len(report.fused) == 2
    _die_at_signal(rank, number)
    _raises(lambda: [compiled(*args) for _ in range(3)])


def _eager(rank: int, world: int, name: str, number: int) -> None:
    case = MAKERS[name](rank, world, 5, fresh_group())
    case.run(1)
    _die_at_signal(rank, number)
    _raises(lambda: [case.run(1) for _ in range(3)])


def _check(pool: RankPool, failure: RanksFailed, op: str) -> None:
    text = str(failure)
    survivors = pool.world - 1
    assert f"rank {VICTIM}: died with exit code -9" in text
    assert text.count("[in time]") == survivors, text
    reports = [line for line in text.splitlines() if line.startswith("AssertionError")]
    assert len(reports) == survivors
    for line in reports:
        assert f"autofuse.{op}" in line
        assert f"rank {VICTIM} (pid {pool.pids[VICTIM]}) has died" in line
    assert [p for pid in pool.pids for p in Path("/dev/shm").glob(f"af-{pid}-*")] == []


@pytest.mark.parametrize(
    ("world", "generated", "number", "op"),
    [
        (4, False, 1, "matmul_all_reduce"),
        (4, False, 4, "matmul_reduce_scatter"),
        (2, True, 1, "matmul_reduce_scatter"),
    ],
)
def test_killed_inside_a_compiled_model(
    fresh: Callable[[int], RankPool], world: int, generated: bool, number: int, op: str
) -> None:
    pool = fresh(world)
    with pytest.raises(RanksFailed) as failure:
        pool.run(_compiled, generated, number, timeout=120)
    _check(pool, failure.value, op)


@pytest.mark.parametrize("name", MAKERS)
def test_killed_inside_each_op(fresh: Callable[[int], RankPool], name: str) -> None:
    pool = fresh(3)
    with pytest.raises(RanksFailed) as failure:
        pool.run(_eager, name, 1, timeout=60)
    _check(pool, failure.value, name)


def _names(pids: Iterable[int | None]) -> list[str]:
    return [path.name for pid in pids for path in Path(names.FOLDER).glob(f"af*-{pid}-*")]


def _all_killed_while_they_meet(rank: int, world: int) -> None:
    board = Board.create(world)
    board.__enter__()

    def die(name: str) -> int:
        assert len(_names([os.getpid()])) == 2, "the names of the board and of the segment"
        os.kill(os.getpid(), signal.SIGKILL)
        return -1

    with patch.object(rendezvous.cpu, "open_segment", die):
        workspace_for(fresh_group())


def _meets(rank: int, world: int, dead: list[int]) -> list[str]:
    """The names of dead ranks after a meeting, while this rank has names of its own."""
    segment = rendezvous.make_segment(f"/af-{os.getpid()}-01234567-0", 4096)
    with Board.create(world):
        workspace_for(fresh_group())
        assert len(_names([os.getpid()])) == 2, "a name of a process that lives"
    del segment
    rendezvous.cpu.unlink_segment(f"/af-{os.getpid()}-01234567-0")
    return _names(dead)


def test_all_killed_while_they_meet(fresh: Callable[[int], RankPool]) -> None:
    """What they leave behind is removed when other processes meet, which keep each other's names."""
    pool = fresh(2)
    with pytest.raises(RanksFailed, match="died with exit code -9") as failure:
        pool.run(_all_killed_while_they_meet, timeout=60)
    assert "AssertionError" not in str(failure.value)
    # Not all names need be left: processes of other tests meet at the same time.
    assert fresh(2).run(_meets, pool.pids) == [[], []]


def test_names_that_are_in_use_stay() -> None:
    """A lock lasts as long as a mapping of the file, or its descriptor."""
    name = f"/af-{os.getpid()}-89abcdef-0"
    segment = rendezvous.make_segment(name, 4096)
    with Board.create(2) as path:
        names.remove_left_behind.__wrapped__()
        assert os.path.exists(path)
        assert os.path.exists(names.FOLDER + name)
        del segment
        names.remove_left_behind.__wrapped__()
        assert not os.path.exists(names.FOLDER + name)
    assert not os.path.exists(path)
