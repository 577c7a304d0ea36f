"""What the host tells copy engines to do, carried out at once on ranks of one process; no GPU is needed."""

import ctypes
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from autofuse.native_kernels.gpu import copy_engine
from autofuse.native_kernels.gpu import driver as cuda_driver
from autofuse.native_kernels.gpu.commands import OF_CALL, Do
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, CopyEngine
from autofuse.native_kernels.gpu.memory import PeerMemory, Region
from autofuse.native_kernels.gpu.prepared import recording
from autofuse.native_kernels.gpu.state import STATE_LENGTH

TILE_BYTES, TILES, SLICE = 16, 7, 3
SLICES = 3


def wait_value(stream: int, address: int, value: int, flags: object) -> tuple[int]:
    assert ctypes.c_int32.from_address(address).value == value, "this would wait forever"
    return (0,)


def write_value(stream: int, address: int, value: int, flags: int) -> tuple[int]:
    ctypes.c_int32.from_address(address).value = value
    return (0,)


def copy(to: int, source: int, nbytes: int, stream: int) -> tuple[int]:
    ctypes.memmove(to, source, nbytes)
    return (0,)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has done what it is told when it returns."""
    fake = MagicMock(cuStreamWaitValue32=wait_value, cuStreamWriteValue32=write_value, cuMemcpyDtoDAsync=copy)
    fake.CUresult.CUDA_SUCCESS = 0
    handles = count(1)
    fake.cuStreamCreate = fake.cuEventCreate = lambda flags: (0, next(handles))
    fake.cuEventRecord.return_value = fake.cuStreamWaitEvent.return_value = (0,)
    monkeypatch.setattr(cuda_driver, "bindings", lambda: fake)
    monkeypatch.setattr(copy_engine, "current_raw_stream", lambda device: 7)


def group(world: int) -> list[PeerMemory]:
    """The same memory as every rank maps it; credit for all."""
    nbytes = world * TILES * TILE_BYTES
    copies = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(world)]
    signals = [torch.zeros(FIRST_CREDIT + world, dtype=torch.int32) for _ in range(world)]
    for r in range(world):
        signals[r][FIRST_CREDIT:] = 1
    regions = SimpleNamespace(
        copies=Region.of(copies), signals=Region.of([s.view(torch.uint8) for s in signals])
    )
    nothing = Region.of([torch.empty(0)])
    return [
        PeerMemory(
            r, world, 132, *[nothing] * 5, regions.copies, nothing, nothing, regions.signals,
            torch.zeros(STATE_LENGTH, dtype=torch.int64), torch.zeros(8, dtype=torch.int32), torch.empty(0),
            torch.zeros(2 * world * SLICES, dtype=torch.int32), torch.empty(nbytes, dtype=torch.uint8),
        )
        for r in range(world)
    ]  # fmt: skip


def words(memory: PeerMemory, rank: int) -> Tensor:
    return memory.copy_signals.views[rank].view(torch.int32)


def receive(memory: PeerMemory) -> None:
    """As a kernel ends: its counters are 0 again, and peers have credit."""
    words(memory, memory.rank)[:FIRST_CREDIT] = 0
    for p in range(memory.world):
        if p != memory.rank:
            words(memory, p)[FIRST_CREDIT + memory.rank] += 1


@pytest.mark.parametrize("world", [2, 4, 8])
def test_an_outbox_reaches_its_owners(world: int) -> None:
    """By chunks, the last slice shorter; a second call needs the credit of the first."""
    ranks = group(world)
    engines = [CopyEngine(memory) for memory in ranks]
    for call in range(2):
        for r, (memory, engine) in enumerate(zip(ranks, engines, strict=True)):
            tiles = memory.outbox.view(world, TILES, TILE_BYTES)
            for owner in range(world):
                tiles[owner] = torch.arange(TILES, dtype=torch.uint8)[:, None] + 10 * r + 5 * owner + call
            full = memory.done.view(2, world, SLICES)[1]
            full[[p for p in range(world) if p != r]] = 1
            engine.fork()
            engine.forward(full, TILES * TILE_BYTES, SLICE * TILE_BYTES)
            engine.join()
            assert not memory.done.any()
        for r, memory in enumerate(ranks):
            tiles = memory.copies.views[r].view(world, TILES, TILE_BYTES)
            for source in range(world):
                sent = torch.arange(TILES, dtype=torch.uint8)[:, None] + 10 * source + 5 * r + call
                assert torch.equal(
                    tiles[source], (sent if source != r else sent * 0 + 255).expand(-1, TILE_BYTES)
                )
            arrived = words(memory, r)[: world * SLICES].view(world, SLICES)
            assert arrived.sum() == (world - 1) * SLICES
            assert not arrived[r].any()
            assert words(memory, r)[FIRST_CREDIT:].nonzero().flatten().tolist() == [r]
        for memory in ranks:
            receive(memory)


@pytest.mark.parametrize("forwards", [False, True])
def test_copies_come_behind_what_was_before_the_call_and_before_what_is_behind_it(forwards: bool) -> None:
    """By what every stream has waited for."""
    memory, *_ = group(4)
    engine = CopyEngine(memory)
    memory.done.fill_(1)
    with recording() as parts:
        if forwards:
            engine.fork()
            engine.forward(memory.done.view(2, 4, SLICES)[1], TILES * TILE_BYTES, SLICE * TILE_BYTES)
        else:
            engine.push(torch.zeros(TILES, TILE_BYTES // 2, dtype=torch.bfloat16), SLICE, SLICES)
        engine.join()
    before, copies = "all of the call's stream before", set()
    behind: dict[int, set[object]] = {OF_CALL: {before}}
    recorded: dict[int, set[object]] = {}
    for part in parts:
        assert isinstance(part, tuple)
        for command in part:
            done = behind.setdefault(command.stream, set())
            if command.do is Do.RECORD:
                recorded[command.at] = set(done)
            elif command.do is Do.AWAIT:
                done |= recorded[command.at]
            else:
                assert before in done
                assert command.stream != OF_CALL
                copies.add(command)
                done.add(command)
    assert len(copies) == 3 * (1 + SLICES * (3 if forwards else 2))
    assert behind[OF_CALL] == copies | {before}


def test_nobody_stores_without_credit() -> None:
    memory, _ = group(2)
    engine, part = CopyEngine(memory), torch.zeros(TILES, TILE_BYTES // 2, dtype=torch.bfloat16)
    engine.push(part, SLICE, SLICES)
    with pytest.raises(AssertionError, match="wait forever"):
        engine.push(part, SLICE, SLICES)
    with pytest.raises(AssertionError, match="wait forever"):
        engine.forward(memory.done.view(2, 2, SLICES)[1], TILES * TILE_BYTES, SLICE * TILE_BYTES)
    engine.give_credit()
    assert words(memory, 1)[FIRST_CREDIT] == 1
