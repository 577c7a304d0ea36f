"""What the compiler makes of embedding_exchange for sm_90, in every way in use; no GPU is needed.

The rules are those of test_ptx.py, and three of this kernel: rows are read and written 16 bytes at a time, no
register is spilled, and so many programs as a multiprocessor is to run at once fit on it.
"""

import re
import subprocess
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import triton

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.embedding.kernels import BAGS, MERGED_NCCL
from autofuse.lowering.gpu.embedding.places import places_of, send_places
from autofuse.lowering.gpu.embedding.ways import ExchangeProblem
from autofuse.lowering.gpu.memory.allocation import REGIONS
from autofuse.native_kernels.gpu.memory import EVENTS, Need, PeerMemory, Region
from autofuse.native_kernels.gpu.state import STATE_LENGTH
from autofuse.native_kernels.triton.embedding_exchange import launch_embedding_exchange
from autofuse.native_kernels.triton.embedding_tables import BagsConfig, Tables, Tiles
from tests.kernels.test_ptx import (
    ACQUIRE,
    BARRIER,
    GPU_SCOPE,
    LABEL,
    POLL,
    PUT,
    READ,
    STORE,
    Kernel,
    compile_launch,
)
from tests.subsets import EVERY, each_value

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B = 512
VECTOR = re.compile(r"\.v[24]\.b32")
SIGNAL = re.compile(r"\b(red|atom)\.[\w.]*(sys[\w.]*release|release[\w.]*sys)\b")
COUNT = re.compile(r"\b(red|atom)\.[\w.]*(gpu[\w.]*release|release[\w.]*gpu)\b")
COUNTED = r"@q atom\.(release|acquire)\.gpu\.global\.add\.u32 n, \[%rd\d+\]"
PAYLOAD = re.compile(rf"^(?!.*{COUNTED}).*({STORE.pattern})")
"""Stores of data. The atomics on the counter of `count_and_signal` are left out: they stand between its
barrier and its signal."""
LOADED_A = "@p ld.global.u64 a, [a];"
"""In the inline PTX of `signal_all` and `count_and_signal`, this loads the address of a peer's memory. The
PTX names its registers itself, so that `is_from_memory` does not know them."""
REGISTERS, PROGRAMS, SHARED = 65536, 32, 227 * 1024  # that a multiprocessor has

Case = tuple[str, BagsConfig, bool, torch.dtype, torch.dtype, int, bool, bool]


def cases() -> Iterator[Case]:
    """Every way for 2, 4 and 8 ranks; dtypes, modes, weights, index dtypes and traces by turns."""
    turns = cycle(product([BF16, FP16, FP32], [torch.int64, torch.int32], [0, 1, 2], [False, True]))
    for world in (2, 4, 8):
        problem = ExchangeProblem(B, (1024,) * world, "bsc", BF16)
        for name, way in ways_of(problem).items():
            if way.fused:
                dtype, index, mode, trace = next(turns)
                yield name, way.config, name == MERGED_NCCL, dtype, index, mode, mode == 0 and trace, trace
        next(turns)


def memory_for(need: Need, world: int) -> PeerMemory:
    """Of rank 0, of a GPU of 132 multiprocessors; nothing is behind it."""
    sizes = (*(getattr(need, name) for name in REGIONS), 0)
    regions = [Region.of([torch.empty(max(size, 256), dtype=torch.uint8)] * world) for size in sizes]
    state, done = torch.empty(STATE_LENGTH, dtype=torch.int64), torch.empty(need.done, dtype=torch.int32)
    nothing = torch.empty(0)
    return PeerMemory(0, world, 132, *regions, state, state.int(), nothing, done, nothing)


def compiled(
    config: BagsConfig,
    send: bool,
    dtypes: tuple[torch.dtype, ...],
    index: torch.dtype = torch.int64,
    mode: int = 0,
    weighted: bool = False,
    trace: bool = False,
    world: int = 4,
) -> tuple[Kernel, bytes]:
    """As `lowering.gpu.embedding.run` launches it on rank 0, for 4 tables of 256 columns."""
    columns, dims = (1024,) * world, [256] * 4
    memory = memory_for(BAGS.needs(config, ExchangeProblem(B, columns, "bsc", BF16)), world)
    tables = Tables(
        [torch.empty(8, 256, dtype=dtypes[t % len(dtypes)]) for t in range(4)],
        [torch.empty(8, dtype=index)] * 4,
        [torch.empty(B * world, dtype=index)] * 4,
        [torch.empty(8, dtype=dtypes[t % len(dtypes)]) for t in range(4)] if weighted else [],
        mode,
    )
    places = send_places(0, B, columns, dims) if send else places_of("bsc", 0, B, columns, dims)
    words, out = torch.empty(256, dtype=torch.int64), torch.empty(world * B, 1024, dtype=BF16)
    events = torch.empty(132 * config.per_sm, EVENTS, 2, dtype=torch.int64) if trace else None
    return compile_launch(
        lambda: launch_embedding_exchange(memory, words, tables, places, out, config, send, trace=events)
    )


def used(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers of a thread (REG), bytes of its stack, and of shared memory, of a kernel's cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", told)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", EVERY)
def test_rules(every: bool) -> None:
    names = ("way", "config", "send", "dtype", "index", "mode", "weighted", "trace")
    given = list(cases())
    chosen = given if every else each_value(given, lambda case: dict(zip(names, case, strict=True)))
    for way, config, send, dtype, index, mode, weighted, trace in chosen:
        kernel, _ = compiled(config, send, (dtype,), index, mode, weighted, trace)
        where = f"{way}, {dtype}, {index}, mode {mode}, weighted={weighted}, trace={trace}"
        assert all(bool(kernel.find(each)) == (not send) for each in (SIGNAL, COUNT, ACQUIRE)), where
        check_signals(kernel, where)
        check_waits(kernel, where)
        check_scopes(kernel, where)


def check_signals(kernel: Kernel, where: str) -> None:
    """Stores, barrier, signal. Before a program counts an item there is a barrier, too."""
    for at in kernel.find(SIGNAL) + kernel.find(COUNT):
        barrier = kernel.last(BARRIER, at)
        assert not kernel.between(barrier + 1, at, PAYLOAD), f"{where}: a store after the barrier"
        # One thread does it: the others go round it, not round the barrier.
        ways_in = [i for i in kernel.find(LABEL) if barrier < i < at]
        assert len(ways_in) <= 1, f"{where}: a way around the barrier"


def check_waits(kernel: Kernel, where: str) -> None:
    """Acquire at system scope, barrier, reads."""
    for at in kernel.find(ACQUIRE):
        assert "ld.acquire.sys" in kernel.lines[at], where
        barrier = kernel.find(BARRIER, at)[0]
        assert not kernel.between(at, barrier, READ), f"{where}: a read before the barrier"


def check_words(kernel: Kernel, where: str) -> None:
    """Words are polled 8 or 16 bytes at a time, and stored so to addresses that were loaded; few polls look
    at a word alone."""
    polls = [kernel.lines[at] for at in kernel.find(POLL)]
    wide = [line for line in polls if VECTOR.search(line)]
    assert wide, where
    assert all(kernel.is_from_memory(line) for line in wide), where
    assert sum(".b16" in line for line in polls) <= 1, where
    sent = [line for line in map(kernel.lines.__getitem__, kernel.find(PUT)) if VECTOR.search(line)]
    assert any(kernel.is_from_memory(line) for line in sent), where


def check_scopes(kernel: Kernel, where: str) -> None:
    """What is ordered for our own GPU only is our own memory; signals go to addresses that were loaded."""
    for at in kernel.find(GPU_SCOPE):
        assert not kernel.is_from_memory(kernel.lines[at]), f"{where}: {kernel.lines[at]}"
    for at in kernel.find(SIGNAL):
        in_block = "[a]" in kernel.lines[at] and any(LOADED_A in line for line in kernel.lines[at - 3 : at])
        assert in_block or kernel.is_from_memory(kernel.lines[at]), where


WAYS = ways_of(ExchangeProblem(B, (1024,) * 4, "bsc", BF16))


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.fused])
def test_registers_and_vectors(way: str, tmp_path: Path) -> None:
    """For tables of bfloat16."""
    config = WAYS[way].config
    kernel, cubin = compiled(config, way == MERGED_NCCL, (BF16,))
    check_resources(kernel, cubin, config, tmp_path)
    text = "\n".join(kernel.lines)
    threads = 32 * config.warps
    assert text.count("ld.global.v4.b32") >= config.unroll * max(1, config.tile // (8 * threads))
    assert "st.global.v4.b32" in text
    assert "ld.global.b16" not in text
    assert "st.global.b16" not in text


def check_resources(kernel: Kernel, cubin: bytes, config: Tiles, folder: Path, spilled: int = 0) -> None:
    """At most so many bytes are spilled, and `per_sm` programs fit on a multiprocessor."""
    found = used(cubin, folder)
    assert found["STACK"] <= spilled, f"{found['STACK']} bytes are spilled"
    # A warp gets registers in units of 256, a program 1 KiB of shared memory besides its own.
    warp = -(-found["REG"] * 32 // 256) * 256
    assert config.per_sm <= min(PROGRAMS, REGISTERS // (warp * config.warps))
    assert config.per_sm * (kernel.shared + 1024) <= SHARED


def test_tables_of_all_dtypes() -> None:
    """In one kernel, which has a branch for each."""
    kernel, _ = compiled(BagsConfig(), False, (BF16, FP16, FP32))
    check_signals(kernel, "all dtypes")
    check_scopes(kernel, "all dtypes")
