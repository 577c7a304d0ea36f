"""Who makes memory of GPUs, who has no room, and when it is given back. No GPU is needed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import autofuse
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.lowering.cpu.workspaces import workspace_for as cpu_workspace_for
from autofuse.lowering.gpu.memory import allocation
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for
from autofuse.lowering.torch_internals import resolve_group
from autofuse.native_kernels.gpu.memory import Need
from tests.ranks import RankPool, fresh_group
from tests.workspace.gpu_memory import CPU, Gpu, gpus, needing

Ranks = Callable[[int], RankPool]
MORE = 100 << 20


def _enter(workspace: GpuWorkspace, inbox: int, variant: int = 0) -> str:
    """Empty, or why a call runs unfused."""
    try:
        entered = workspace.enter("op", "here", needing(inbox), "tiles", variant, Need(variant))
    except SharedMemoryFull as error:
        return str(error)
    assert entered is not None
    assert entered[0].inbox.views[0].numel() >= inbox, "the call would store behind its memory"
    return ""


def _no_room(rank: int, world: int) -> None:
    with gpus() as gpu:
        workspace = GpuWorkspace(resolve_group(fresh_group()), CPU)
        before = workspace.memory
        gpu.room = MORE // 2 if rank == 1 else gpu.room
        told = [_enter(workspace, MORE)]
        asked = gpu.asked
        told.append(_enter(workspace, MORE))
        assert gpu.asked == asked, "ranks try again in every call"
        assert workspace.memory is before
        assert told[0] == told[1]
        assert told[0].startswith("rank 1 of group")
        assert "out of memory" in told[0]
        assert _enter(workspace, 1 << 20, variant=1) == ""  # what there is room for goes on
        told.append(_enter(workspace, MORE))
        assert told[2] == told[0], "a second warning for the same"
        gpu.room = 1 << 40
        found = [_enter(workspace, MORE) for _ in range(3)]
        assert found == [told[0], told[0], ""], found
        assert _enter(workspace, MORE) == ""


def test_one_rank_has_no_room(ranks: Ranks) -> None:
    """All ranks run the call unfused, and try again later, at the same call."""
    ranks(2).run(_no_room)


def _no_room_at_first(rank: int, world: int) -> None:
    with gpus() as gpu:
        group, told = fresh_group(), []
        gpu.room = 1 if rank == 0 else gpu.room
        for attempt in range(3):
            if attempt == 2:
                gpu.room = 1 << 40
            try:
                workspace_for(group, CPU)
                told.append("")
            except SharedMemoryFull as error:
                told.append(str(error))
    assert told[0].startswith("rank 0 of group")
    assert told[1:] == [told[0], ""]


def test_no_room_when_the_group_meets(ranks: Ranks) -> None:
    ranks(2).run(_no_room_at_first)


def _captured(gpu: Gpu, workspace: GpuWorkspace, graph: int) -> None:
    with gpu.capturing(graph):
        workspace.enter_again()
        workspace.leave()
        workspace.enter_again()
        workspace.leave()


def _inbox(workspace: GpuWorkspace) -> "weakref.ref[Any]":
    return weakref.ref(workspace.memory.inbox)


def _outgrown(rank: int, world: int) -> None:
    with gpus() as gpu:
        workspace = GpuWorkspace(resolve_group(fresh_group()), CPU)
        first, words = _inbox(workspace), weakref.ref(workspace.memory.words)
        _enter(workspace, MORE)
        assert first() is None, "nothing can use it any more"
        assert words() is not None, "it is large enough"
        second = _inbox(workspace)
        if rank == 0:  # also where only a peer captures
            for graph in (7, 8):
                _captured(gpu, workspace, graph)
        _enter(workspace, 2 * MORE, 1)
        gc.collect()
        if rank == 0:
            assert len(workspace._held.outgrown()) == 1
            gpu.driver.end(7)
            assert second() is not None
            assert len(workspace._held.outgrown()) == 1
            gpu.driver.end(8)
            assert workspace._held.outgrown() == {}
            assert second() is None


def test_memory_that_no_graph_uses_is_given_back(ranks: Ranks) -> None:
    ranks(2).run(_outgrown)


def _destroyed(rank: int, world: int, captured: bool) -> None:
    with gpus() as gpu:
        group = resolve_group(fresh_group())
        workspace = workspace_for(group.group_name, CPU)
        inbox = _inbox(workspace)
        if captured:
            _captured(gpu, workspace, 3)
        del workspace
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert (inbox() is not None) == captured
        if captured:
            gpu.driver.end(3)
            allocation.give_back()
            gc.collect()
            assert inbox() is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_destroyed_group(ranks: Ranks, captured: bool) -> None:
    """Its memory goes with it, or with the last graph that uses it."""
    ranks(2).run(_destroyed, captured)


def _unknown_driver(rank: int, world: int) -> None:
    with gpus() as gpu:
        workspace = GpuWorkspace(resolve_group(fresh_group()), CPU)
        gpu.driver.cuUserObjectCreate = lambda *args: (999,)  # type: ignore[method-assign]
        _captured(gpu, workspace, 1)
        first = _inbox(workspace)
        _enter(workspace, MORE)
        assert first() is not None


def test_a_driver_that_does_not_tell(ranks: Ranks) -> None:
    """What a graph was captured with is then kept as long as the process."""
    ranks(2).run(_unknown_driver)


def _summary(rank: int, world: int) -> tuple[str, str]:
    with gpus() as gpu:
        name = fresh_group()
        workspace = workspace_for(name, CPU)
        _enter(workspace, 20 << 20)
        _captured(gpu, workspace, 1)
        _enter(workspace, MORE, 1)
        return name, autofuse.memory_summary(name)


def test_summary(ranks: Ranks) -> None:
    """What there is, what it is for, and what only graphs still use."""
    name, found = ranks(2).run(_summary)[1]
    lines = [" ".join(line.split()) for line in found.splitlines()]
    assert lines[0].startswith(f"group {name}, rank 1 of 2, ")
    assert "inbox 112.0 MiB 100.0 MiB op at here" in lines
    assert "words 8.0 MiB 0.0 MiB" in lines
    assert "20.0 MiB more that CUDA graphs may use" in lines
    assert lines[-2].startswith("in all 1")


def _cpu_summary(rank: int, world: int) -> str:
    name = fresh_group()
    workspace = cpu_workspace_for(name)
    for nbytes in (100, 600 << 10, 5000):
        with workspace.call("op", "model.py:7", "", nbytes) as call:
            call.exchange([])
    return autofuse.memory_summary(name)


def test_summary_of_cpu_ranks(ranks: Ranks) -> None:
    (found, _) = ranks(2).run(_cpu_summary)
    assert "2 buffers   1.2 MiB  1.2 MiB  op at model.py:7" in found, found
