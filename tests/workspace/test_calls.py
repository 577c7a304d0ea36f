"""Calls of a workspace over real processes: ordering, growth, back-to-back calls, stragglers, groups."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autofuse.lowering.cpu.workspace import Call
from autofuse.lowering.cpu.workspaces import workspace_for
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


def _past_the_wraps(rank: int, world: int) -> None:
    workspace = workspace_for(fresh_group())
    for wrap in (2**31, 2**32):
        workspace._epoch = wrap - 3
        for i in range(6):
            with workspace.call("push", "here", "40", _bytes(40, world)) as call:
                for source, got in enumerate(push_to_all(call, rank, world, 10.0 * i, 40)):
                    assert bool((got == 10.0 * i + source).all()), (wrap, i, source)


def test_calls_whose_number_needs_33_bits(ranks: Ranks) -> None:
    ranks(2).run(_past_the_wraps)


def _late_signals(rank: int, world: int) -> list[int]:
    """Rank 0 writes a value and signals, one slot after the other; the others must see each in order."""
    ws = workspace_for(fresh_group())
    seen = []
    with ws.call("ordered", "here", "", 64 * 64) as call:
        if rank == 0:
            for slot in range(64):
                for dest in range(1, world):
                    call.tensor(dest, slot * 64, (1,), torch.int64).fill_(slot * slot)
                    call.signal(dest, slot)
        else:
            for slot in reversed(range(64)):
                call.wait(0, slot)
                seen.append(int(call.tensor(rank, slot * 64, (1,), torch.int64)))
        call.exchange([])
    return seen[::-1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_signal_comes_after_what_was_stored(ranks: Ranks, world: int) -> None:
    for seen in ranks(world).run(_late_signals)[1:]:
        assert seen == [slot * slot for slot in range(64)]


def _growth(rank: int, world: int) -> list[int]:
    ws = workspace_for(fresh_group())
    capacities = []
    for n in (1, 100_000, 10, 3_000_000, 20_000_000):
        with ws.call("push", "here", str(n), _bytes(n, world)) as call:
            for source, got in enumerate(push_to_all(call, rank, world, 5.0, n)):
                assert bool((got == 5.0 + source).all())
        capacities.append(ws.capacity)
    with ws.call("reserve", "here", "", 64) as call:
        [needed] = {max(row) for row in zip(*call.exchange([100 * rank]), strict=True)}
        call.reserve(_bytes(30_000_000, world) + needed)
        for source, got in enumerate(push_to_all(call, rank, world, 1.0, 30_000_000)):
            assert bool((got == 1.0 + source).all())
    capacities.append(ws.capacity)
    return capacities


def test_buffers_grow_together(ranks: Ranks) -> None:
    sizes = ranks(2).run(_growth)
    assert sizes[0] == sizes[1] == [1 << 16, 7 << 17, 7 << 17, 6 << 22, 5 << 25, 8 << 25]


def _exchange(rank: int, world: int) -> list[list[list[int]]]:
    ws = workspace_for(fresh_group())
    with ws.call("exchange", "here", "", 0) as call:
        return [call.exchange([rank, -i] * rank if i else list(range(512))) for i in range(20)]


@pytest.mark.parametrize("world", [2, 4])
def test_exchange(ranks: Ranks, world: int) -> None:
    for got in ranks(world).run(_exchange):
        assert got[0] == [list(range(512))] * world
        for i in range(1, 20):
            assert got[i] == [[rank, -i] * rank for rank in range(world)]


def _subgroups(rank: int, world: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    half = halves[rank % 2]
    own = workspace_for(half.group_name)
    all_ranks = workspace_for(fresh_group())
    assert workspace_for(half.group_name) is own
    assert (own.rank, own.world) == (half.rank(), 2)
    for i in range(50):
        with own.call("half", "here", str(i % 3), 1024) as call:
            got = push_to_all(call, own.rank, 2, 100.0 * (rank % 2) + i, 5)
            assert [int(x[0]) for x in got] == [100 * (rank % 2) + i + r for r in range(2)]
        with all_ranks.call("whole", "here", str(i % 2), 1024) as call:
            got = push_to_all(call, rank, world, i, 5)
            assert [int(x[0]) for x in got] == [i + r for r in range(world)]


def test_subgroups_and_the_whole_group_interleave(ranks: Ranks) -> None:
    ranks(4).run(_subgroups)


def _opposite_orders(rank: int, world: int) -> None:
    first, second = sorted((fresh_group(), fresh_group()), reverse=rank > 0)
    with ThreadPoolExecutor(1) as thread:
        met = thread.submit(workspace_for, first)
        time.sleep(0.1)
        workspace_for(second)
        met.result()


def test_groups_meet_at_once_on_several_threads(ranks: Ranks) -> None:
    ranks(2).run(_opposite_orders)


def _again_and_again(rank: int, world: int, directory: str) -> None:
    dist.destroy_process_group()
    names = set()
    spaces = set()
    for i in range(4):
        dist.init_process_group("gloo", init_method=f"file://{directory}/{i}", rank=rank, world_size=world)
        group = dist.group.WORLD
        assert group is not None
        ws = workspace_for(group.group_name)
        names.add(ws.group_name)
        spaces.add(id(ws))
        with ws.call("push", "here", str(i), 1024) as call:
            assert [int(x[0]) for x in push_to_all(call, rank, world, i, 3)] == [i, i + 1]
        del ws
        dist.destroy_process_group()
    assert len(names) == 1
    dist.init_process_group("gloo", init_method=f"file://{directory}/last", rank=rank, world_size=world)


def test_groups_of_one_name_that_follow_each_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_again_and_again, str(tmp_path))


def _inference(rank: int, world: int) -> None:
    with torch.inference_mode():
        ws = workspace_for(fresh_group())
        with ws.call("push", "here", "first", 1024) as call:
            push_to_all(call, rank, world, 1.0, 4)
    with ws.call("push", "here", "second", 1024) as call:
        push_to_all(call, rank, world, 1.0, 4)  # in-place stores outside of inference mode
        assert call.tensor(rank, 0, (0, 3), torch.bfloat16).shape == (0, 3)


def test_inference_mode_makes_no_difference(ranks: Ranks) -> None:
    ranks(2).run(_inference)


def _halves(rank: int, world: int, before: int) -> list[int]:
    """Where the buffer of each call begins: of `before` small calls, then of four large ones."""
    workspace, places = workspace_for(fresh_group()), []
    for n in (8,) * before + (1 << 16,) * 4:
        with workspace.call("push", "here", str(n), _bytes(n, world)) as call:
            push_to_all(call, rank, world, 1.0, n)
            places.append(call.tensor(rank, 0, (1,), torch.float32).data_ptr())
    return places[before:]


@pytest.mark.parametrize("before", [1, 2])
def test_calls_take_the_halves_of_grown_buffers_by_turns(ranks: Ranks, before: int) -> None:
    """Growing may happen at an odd and at an even epoch."""
    for first, second, third, fourth in ranks(2).run(_halves, before):
        assert (first, second) == (third, fourth)
        assert first != second


def _entered(rank: int, world: int) -> list[float]:
    """When this rank began a call of a new kind, and when it had entered the call."""
    workspace = workspace_for(fresh_group())
    dist.barrier()
    time.sleep(0.3 * rank)
    began = time.monotonic()
    with workspace.call("push", "here", "8", _bytes(8, world)) as call:
        entered = time.monotonic()
        push_to_all(call, rank, world, 1.0, 8)
    return [began, entered]


def test_the_first_call_of_a_kind_waits_for_all_ranks(ranks: Ranks) -> None:
    """Ranks that disagree must find out before anything is stored."""
    (_, entered), (began, _) = ranks(2).run(_entered)
    assert entered >= began
