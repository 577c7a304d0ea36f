"""Calls go on where their number needs more than 31 bits, and more than 32: which half they use, and packets.

A job of 20 us a call comes to the first of these in half a day.
"""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from autofuse.native_kernels.cuda.host.compiler import INCLUDE, KERNELS
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.gpu.state import BAD_INPUT_WORD, Wait
from autofuse.native_kernels.triton.comm import (
    STATE_EPOCH,
    begin,
    finish,
    half_of,
    peer,
    put_packets,
    take_packets,
)
from autofuse.native_kernels.triton.packet_shares import end_packets, further, look
from autofuse.native_kernels.triton.shares import STATE_STARTED, A, start
from tests.kernels.backward_calls import Backward, run_backwards
from tests.kernels.calls import Call, peer_memory, run_calls
from tests.kernels.embedding_calls import Exchange
from tests.kernels.test_interpreted import (
    FEW,
    GATHER,
    ONCE,
    PACKETS,
    PUBLISH,
    PUBLISH_PACKETS,
    REDUCE,
    SCATTER,
)
from tests.kernels.test_interpreted_embedding import even
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]
WRAPS = (2**31, 2**32)
SOURCE = """
#include "epoch.cuh"
extern "C" int half(long long epoch) { return half_of(epoch); }
extern "C" int third(long long call) { return third_of(call); }
"""


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["tiles", "packets"])
def test_kernels(interpreters: Interpreters, kind: str, wrap: int) -> None:
    """Call `wrap` of packets finds memory that has never held one."""
    calls: list[Call] = (
        [each for kind in (REDUCE, SCATTER, GATHER, FEW, PUBLISH) for each in kind[:1] * 2]
        if kind == "tiles"
        else [PUBLISH[2], *PACKETS[:1] * 2, *PUBLISH_PACKETS[:1] * 2, *PACKETS[2:3] * 2]
    )
    assert kind == "tiles" or PACKETS[2].config == ONCE  # type: ignore[union-attr]
    interpreters(2).run(run_calls, calls, wrap - 2, timeout=120)


@pytest.mark.parametrize("wrap", WRAPS)
def test_embedding_kernels(interpreters: Interpreters, wrap: int) -> None:
    bags = Exchange(even(2))
    calls = [each for each in (bags, Backward(bags)) for _ in range(2)]
    interpreters(2).run(run_backwards, calls, wrap - 2, timeout=120)


@triton.jit
def _overlapping(state, others, ENDS: tl.constexpr):
    """A program during which `others` launches end their calls."""
    epoch = begin(state)
    tl.store(state + STATE_EPOCH, epoch - 1 + others)
    finish(state, epoch, 1, ENDS)


@triton.jit
def _overlapping_packets(state, others, begun):
    """The same of the packets kernels; others may also have `begun` programs and not ended."""
    epoch = begin(state)
    start(state)
    tl.store(state + STATE_STARTED, 1 + begun)
    tl.store(state + STATE_EPOCH, epoch - 1 + others)
    further(look(state, 1, epoch), 1, state, A, 1, epoch)
    end_packets(state, epoch)


def _overlaps(rank: int, world: int, first: int) -> list[int]:
    memory = peer_memory(rank, world, Need())
    found = []

    def run(kernel: Any, *args: Any, ended: int = 1) -> None:
        memory.epoch.fill_(first)
        memory.record.zero_()
        kernel[(1,)](memory.state, *args)
        found.append(int(memory.record.view(torch.int64)[BAD_INPUT_WORD]))
        assert int(memory.epoch) == first + ended

    run(_overlapping, 0, True)
    run(_overlapping, 0, False, ended=0)
    run(_overlapping_packets, 0, 0)
    run(_overlapping, 1, True)
    run(_overlapping_packets, 1, 0)
    run(_overlapping_packets, 0, 1)
    return found


@pytest.mark.parametrize("first", [0, 7, 2**32 - 1])
def test_calls_that_overlap_are_told(interpreters: Interpreters, first: int) -> None:
    """Hosts do not see replays: a program of a call finds that its epoch has ended already."""
    for told in interpreters(2).run(_overlaps, first):
        assert told[:3] == [0, 0, 0]
        assert [each >> 48 for each in told[3:]] == [Wait.OVERLAP] * 3
        assert {each & 0xFFFFFFFF for each in told[3:]} == {(first + 1) % 2**32}


@triton.jit
def _swapping(packets, out, state, rank, half):
    """A kernel of one's own: 64 pairs for the other rank, and 64 from there."""
    epoch = begin(state)
    at = half_of(epoch) * half + tl.arange(0, 64)
    pairs = (rank * 1000 + tl.arange(0, 64)).to(tl.uint32)
    put_packets(peer(packets, 1 - rank, tl.int64) + at, pairs, epoch, at >= 0)
    found = take_packets(peer(packets, rank, tl.int64) + at, epoch, at >= 0, state, 0, at * 0 + 1 - rank, 0)
    tl.store(out + tl.arange(0, 64), (found & 0xFFFFFFFF).to(tl.int32))
    finish(state, epoch, 1)


def _swaps(rank: int, world: int, first: int) -> list[list[int]]:
    memory, found = peer_memory(rank, world, Need(packets=2 * 64 * 8)), []
    memory.epoch.fill_(first)
    for _ in range(4):
        out = torch.zeros(64, dtype=torch.int32)
        half = memory.packets.half(torch.int64)
        _swapping[(1,)](memory.packets.addresses, out, memory.state, rank, half)
        found.append(out.tolist())
    return found


@pytest.mark.parametrize("first", [0, 2**32 - 3])
def test_packets_of_a_kernel_of_ones_own(interpreters: Interpreters, first: int) -> None:
    found = interpreters(2).run(_swaps, first)
    assert found == [[[1000 * (1 - rank) + i for i in range(64)]] * 4 for rank in range(2)]


def test_cuda_counts_on(tmp_path: Path) -> None:
    """By the header that all CUDA kernels take halves and thirds from."""
    source, library = tmp_path / "epoch.cpp", tmp_path / "epoch.so"
    source.write_text(SOURCE)
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{INCLUDE}", str(source), "-o", str(library)],
        check=True, timeout=120,
    )  # fmt: skip
    found = ctypes.CDLL(str(library))
    for wrap in WRAPS:
        for epoch in range(wrap - 5, wrap + 5):
            assert found.half(ctypes.c_longlong(epoch)) == epoch % 2
            assert found.third(ctypes.c_longlong(epoch)) == epoch % 3


def test_no_kernel_counts_otherwise() -> None:
    """`%` of a number that has wrapped is negative in C and in Triton."""
    sources = [*KERNELS.glob("*.cu"), *INCLUDE.glob("*.cuh"), *(KERNELS.parents[1] / "triton").glob("*.py")]
    assert len(sources) > 20
    for path in sources:
        assert "epoch % " not in path.read_text().replace("`epoch % (2**32 - 1)`", ""), path
