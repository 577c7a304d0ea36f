"""What the compiler makes of the Triton kernels, as PTX for sm_90; no GPU is needed.

The rules are those of `comm`: what goes before a signal and after a wait, and which scope. PTX is read as
text; what the kernels write as inline assembly stays in one piece there. The fast tier compiles a subset in
which every setting has each of its values; the full tier compiles every way in use.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import cycle, product
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from autofuse.lowering.gpu.choice.kernel import DTYPES, Way, ways_of
from autofuse.lowering.gpu.dense.ways import DenseProblem
from autofuse.lowering.gpu.memory.allocation import REGIONS
from autofuse.native_kernels.cuda.kernels.gather_matmul import ClusterGatherConfig
from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig
from autofuse.native_kernels.cuda.kernels.matmul_reduce import ClusterReduceConfig
from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig
from autofuse.native_kernels.gpu.memory import EVENTS, SHARED_MEMORY, PeerMemory, Region
from autofuse.native_kernels.gpu.state import MOST_TERMS, STATE_LENGTH
from autofuse.native_kernels.triton.exchange_row_packets import RowPacketsConfig
from autofuse.native_kernels.triton.exchange_rows import RowsConfig
from autofuse.native_kernels.triton.exchange_sums import SumsConfig
from autofuse.native_kernels.triton.gather_matmul import launch_gather_matmul
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig, launch_gather_matmul_few
from autofuse.native_kernels.triton.matmul_gather import PublishConfig, launch_matmul_gather
from autofuse.native_kernels.triton.matmul_gather_packets import (
    PublishPacketsConfig,
    launch_matmul_gather_packets,
)
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig, launch_matmul_packets
from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig, launch_matmul_reduce
from tests.subsets import EVERY, each_value

TARGET = GPUTarget("cuda", 90, 32)
K, N = 4096, 4096
KERNELS = {
    "matmul_all_reduce": {"matmul_packets", "matmul_reduce"},
    "matmul_reduce_scatter": {"matmul_packets", "matmul_reduce"},
    "all_gather_matmul": {"gather_matmul", "gather_matmul_few"},
    "matmul_all_gather": {"matmul_gather", "matmul_gather_packets"},
}
OPS = tuple(KERNELS)
REDUCTIONS = ("matmul_all_reduce", "matmul_reduce_scatter")
PACKETS = ("matmul_packets", "matmul_gather_packets", "exchange_row_packets", "exchange_token_packets")
"""Kernels without signals."""

BARRIER = re.compile(r"\bbar\.(sync|red)")
RELEASE = re.compile(r"\b(red|atom)\.[\w.]*release\b")
ACQUIRE = re.compile(r"\bld\.acquire\b")
STORE = re.compile(r"\bst\.[\w.]*global|\b(red|atom)\.|cp\.async\.bulk\.tensor\.\w+\.global\.shared")
READ = re.compile(
    r"\bld\.global\.(?!u64 (record|limit),)|cp\.async\.bulk\.tensor\.\w+\.shared::cluster\.global"
)
TMA_STORE = re.compile(r"cp\.async\.bulk\.tensor\.\w+\.global\.shared")
MULTIPLY = re.compile(r"wgmma\.mma_async|\bmma\.sync")
TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\w+\.shared::cluster\.global")
TMA_STORED = re.compile(r"cp\.async\.bulk\.wait_group\s+0;")
PROXY_FENCE = re.compile(r"fence\.proxy\.async;")
NARROW = re.compile(r"\bld\.global\.b16")
BRANCH = re.compile(r"\bbra\b")
LABEL = re.compile(r"^\$?\w+:")
GLOBAL = re.compile(r"\b(ld|st|red|atom|prefetch)\.[\w.:]*global|cp\.async\.bulk")
GPU_SCOPE = re.compile(r"\b(ld|st|red|atom)\.[\w.]*\bgpu\b")
POLL = re.compile(r"\bld\.volatile\.global\.(?P<type>[\w.]+)")
PUT = re.compile(r"\bst\.global\.(?P<type>[\w.]+)")
PACKET = {"b64", "v2.b64"}
"""The types of an access to packets, which holds payload and epoch."""
REGISTER = re.compile(r"%rd\d+")
ADDRESS = re.compile(r"\[\s*(%rd\d+)")
LOADED = re.compile(r"\bld\.shared(?!\.[su]32)")
"""What may be an address: 32 bits are an index."""
DEFINITION = re.compile(r"(?:@!?%p\d+ )?(?!st\.|red\.)[\w.:]+\s+\{?\s*(%rd\d+)")


@dataclass(frozen=True)
class Kernel:
    """A kernel as one launch needs it: its instructions, and the bytes of shared memory it takes."""

    name: str
    lines: tuple[str, ...]
    shared: int

    def find(self, pattern: re.Pattern[str], start: int = 0) -> list[int]:
        """Numbers of all lines from `start` on that have it."""
        return [i for i in range(start, len(self.lines)) if pattern.search(self.lines[i])]

    def last(self, pattern: re.Pattern[str], before: int) -> int:
        """Number of the last line before another that has it."""
        found = [i for i in self.find(pattern) if i < before]
        assert found, f"{self.name}: no {pattern.pattern} before {self.lines[before]}"
        return found[-1]

    def between(self, start: int, stop: int, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(line) for line in self.lines[start:stop])

    def is_from_memory(self, line: str) -> bool:
        """Whether an address in `line` was loaded: those of peers are, our own are arguments."""
        return any("ld.global" in source or LOADED.search(source) for source in self.sources(line))

    def sources(self, line: str) -> Iterator[str]:
        """The lines that make an address in `line`."""
        made: dict[str, list[str]] = {}
        for each in self.lines:
            if defined := DEFINITION.match(each):
                made.setdefault(defined[1], []).append(each)
        todo, seen = ADDRESS.findall(line), set[str]()
        while todo:
            register = todo.pop()
            for source in made.get(register, []) if register not in seen else []:
                yield source
                todo += REGISTER.findall(source)
            seen.add(register)


def launch(problem: DenseProblem, way: Way, transposed: bool, trace: bool, matmuls: int = 1) -> None:
    """As `lowering.gpu.dense.run` does on rank 0."""
    m, world, dtype = problem.m, problem.world, problem.dtype
    config, need, everywhere = way.config, way.need, problem.op == "matmul_all_reduce"
    sizes = (getattr(need, name) for name in REGIONS)
    regions = [
        Region.of([torch.empty(max(size, 256), dtype=torch.uint8)] * world)
        for size in (*sizes, 4 * 8192 + 4 * world)
    ]
    words = torch.empty(STATE_LENGTH, dtype=torch.int64)
    memory = PeerMemory(
        0,
        world,
        132,
        *regions,
        words,
        words.int(),
        torch.empty(need.pieces),
        torch.empty(need.done, dtype=torch.int32),
        torch.empty(need.outbox, dtype=torch.uint8),
    )
    w = torch.empty(N, K, dtype=dtype).t() if transposed else torch.empty(K, N, dtype=dtype)
    events = torch.empty(132, EVENTS, 2, dtype=torch.int64) if trace else None
    if problem.op == "all_gather_matmul":
        part, out = torch.empty(m // world, K, dtype=dtype), torch.empty(m, N, dtype=dtype)
        if isinstance(config, FewConfig):
            launch_gather_matmul_few(memory, part, w, out, config, trace=events)
        else:
            launch_gather_matmul(
                memory, part, [w] * matmuls, [out] * matmuls, 1, config, Mock(), trace=events
            )
        return
    if problem.op == "matmul_all_gather":
        x, out = torch.empty(m, K, dtype=dtype), torch.empty(m, world * N, dtype=dtype)
        bias = torch.empty(N, dtype=dtype) if trace else None
        many = isinstance(config, PublishConfig)
        start: Any = launch_matmul_gather if many else launch_matmul_gather_packets
        start(memory, x, w, out, 1, 1, config, trace=events, bias=bias)
        return
    shape = [m, N]
    shape[problem.dim] //= 1 if everywhere else world
    x, out = torch.empty(m, K, dtype=dtype), torch.empty(shape, dtype=dtype)
    xs, ws = [x] * matmuls, [w] * matmuls
    if isinstance(config, ReduceConfig):
        launch_matmul_reduce(memory, xs, ws, out, False, everywhere, 1, 0, config, trace=events)
    else:
        launch_matmul_packets(memory, xs, ws, out, False, everywhere, config, trace=events)


def compile_launch(launch: Callable[[], None]) -> tuple[Kernel, bytes]:
    """The first kernel that `launch` asks for, and its cubin."""
    return compile_launches(launch)[0]


def compile_launches(launch: Callable[[], None]) -> list[tuple[Kernel, bytes]]:
    """The kernels that `launch` asks for, specialised to their arguments, and their cubins; nothing is
    launched."""
    found: list[tuple[Kernel, bytes]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        backend = make_backend(TARGET)
        bound, specialization, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(
            *args, **kwargs
        )
        options, *rest = kernel._pack_args(backend, kwargs, bound, specialization, None)
        done = triton.compile(ASTSource(kernel, *rest), target=TARGET, options=options.__dict__)
        lines = [line.strip() for line in done.asm["ptx"].splitlines()]
        made = Kernel(kernel.__name__, tuple(filter(None, lines)), done.metadata.shared)
        found.append((made, done.asm["cubin"]))

    with patch.object(JITFunction, "run", run):
        launch()
    return found


@cache
def compiled(problem: DenseProblem, way: Way, transposed: bool, trace: bool, matmuls: int = 1) -> Kernel:
    """The kernel of a dense way."""
    return compile_launch(lambda: launch(problem, way, transposed, trace, matmuls))[0]


ELSEWHERE = (
    WordsConfig, WordsGatherConfig, ClusterReduceConfig, ClusterGatherConfig, SumsConfig, RowsConfig,
    RowPacketsConfig,
)  # fmt: skip
"""Configurations of kernels that test_cuda_ptx, test_ptx_sums and test_ptx_rows have."""


def cases() -> Iterator[tuple[DenseProblem, Way, bool, bool]]:
    """All ways for few and many tokens on 2, 4 and 8 ranks; weight layouts, dtypes and traces by turns."""
    turns = cycle(product([False, True], DTYPES, [True, False]))
    for op, m, world in product(OPS, (8, 32, 128, 4096), (2, 4, 8)):
        problem = DenseProblem(op, m, K, N, world, torch.bfloat16)
        columns = [replace(problem, dim=1)] if op == "matmul_reduce_scatter" and m == 4096 else []
        for each in [problem, *columns]:
            for way in (way for way in ways_of(each).values() if way.fused):
                if isinstance(way.config, ELSEWHERE):
                    continue
                trace, dtype, transposed = next(turns)
                yield replace(each, dtype=dtype), way, transposed, trace
        next(turns)  # so that not every world has the same turn


def settings(case: tuple[DenseProblem, Way, bool, bool]) -> dict[str, object]:
    problem, way, transposed, trace = case
    config = way.config
    layout = {"transposed": transposed, "trace": trace}
    return {"kernel": type(config)} | asdict(problem) | asdict(config) | layout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("op", OPS)
def test_rules(op: str, every: bool) -> None:
    """Before signals and after waits; shared memory; loads that run ahead of the products."""
    names = set()
    given = [case for case in cases() if case[0].op == op]
    for problem, way, transposed, trace in given if every else each_value(given, settings):
        kernel = compiled(problem, way, transposed, trace)
        where = f"{problem}, {way.config}, transposed={transposed}, trace={trace}"
        for rule in (check_signals, check_waits, check_scopes, check_packets, check_decisions):
            rule(kernel, where)
        if problem.op in REDUCTIONS:
            check_dependent(kernel.lines, where)
        if kernel.name == "matmul_gather" and not trace:  # with a trace there is a bias, too
            assert not kernel.find(NARROW), f"{where}: tiles are copied in pieces of 2 bytes"
        check_pipeline(kernel, way.config, problem, where)
        names.add(kernel.name)
    assert names == KERNELS[op]


@pytest.mark.parametrize(
    ("op", "m", "name"),
    [
        ("matmul_reduce_scatter", 4096, "tiles bt=32"),
        ("matmul_all_reduce", 16, "packets"),
        ("all_gather_matmul", 4096, "parts"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("matmul_all_reduce", 4096, "tiles visit=1"),
                ("matmul_reduce_scatter", 16, "packets bk=256 stages=4"),
                ("all_gather_matmul", 4096, "parts bn=128 stages=4 movers=16 slices=4"),
                ("all_gather_matmul", 512, "parts bn=128 movers=64 shared=1 pieces=2"),
            ]
        ),
    ],
)
def test_rules_of_several_matmuls(op: str, m: int, name: str) -> None:
    """Terms of a sum, and weights of a gather, are multiplied in one loop, like one matmul of their total
    length, or width."""
    problem = DenseProblem(op, m, K, N, 4, torch.bfloat16)
    way = ways_of(problem)[name]
    alone = compiled(problem, way, True, False)
    for terms, transposed in ((2, True), (MOST_TERMS, False)):
        kernel, where = compiled(problem, way, transposed, False, terms), f"{name}, {terms} matmuls"
        for rule in (check_signals, check_waits, check_scopes, check_packets, check_decisions):
            rule(kernel, where)
        check_pipeline(kernel, way.config, problem, where)
        assert kernel.shared == alone.shared, where
        for unit in (MULTIPLY, TMA_LOAD):
            assert len(kernel.find(unit)) <= len(alone.find(unit)), f"{where}: {unit.pattern}"
        assert not any(".local" in line for line in kernel.lines), where


def check_signals(kernel: Kernel, where: str) -> None:
    """Stores, barrier, signal; after TMA stores to peers first their end and a fence."""
    signals = kernel.find(RELEASE)
    assert bool(signals) == (kernel.name not in PACKETS), where
    for at in signals:
        assert "sys" in kernel.lines[at], where
        barrier = kernel.last(BARRIER, at)
        assert not kernel.between(barrier + 1, at, STORE), f"{where}: a store after the barrier"
        assert not kernel.between(barrier + 1, at, LABEL), f"{where}: a way around the barrier"
    if kernel.name in ("matmul_reduce", "matmul_gather"):
        for store in kernel.find(TMA_STORE):
            at = min(i for i in signals if i > store)
            barrier = kernel.last(BARRIER, at)
            ended = kernel.last(TMA_STORED, barrier)
            assert ended > store, f"{where}: signalled before a TMA store has ended"
            assert kernel.between(ended, barrier, PROXY_FENCE), f"{where}: no fence after TMA stores"


def check_waits(kernel: Kernel, where: str) -> None:
    """Acquire, barrier, reads; before TMA reads of what peers stored a fence."""
    waits = kernel.find(ACQUIRE)  # with packets: for the presence of peers, where programs may leave
    assert waits or kernel.name in PACKETS, where
    for at in waits:
        assert "ld.acquire.sys" in kernel.lines[at], where
        barrier = kernel.find(BARRIER, at)[0]
        assert not kernel.between(at, barrier, READ), f"{where}: a read before the barrier"
        if kernel.name.startswith("gather"):
            load = next(iter(kernel.find(TMA_LOAD, barrier)), len(kernel.lines))  # none: it jumps back
            assert kernel.between(barrier, load, PROXY_FENCE), f"{where}: no fence before TMA loads"


def check_scopes(kernel: Kernel, where: str) -> None:
    """What is ordered for our own GPU only is our own memory."""
    narrow = [kernel.lines[i] for i in kernel.find(GPU_SCOPE)]
    assert narrow, where  # of `finish` at least
    for line in narrow:
        assert not kernel.is_from_memory(line), f"{where}: {line}"
    if kernel.name not in PACKETS:
        # The check above finds peers: the address of a signal is one that was loaded.
        atomics = [kernel.lines[i] for i in kernel.find(RELEASE) if "atom" in kernel.lines[i]]
        assert all(kernel.is_from_memory(line) for line in atomics), where


def check_dependent(lines: Sequence[str], where: str) -> None:
    """A kernel that a tail may follow: it touches global memory only after the kernels in front of it have
    ended, and lets the kernel behind it begin early only after a look at its peers."""
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    assert len(waits) == 1, f"{where}: waits {len(waits)} times"
    before = lines[: waits[0]]
    assert not any(GLOBAL.search(line) for line in before), f"{where}: an access before griddepcontrol.wait"
    for at, line in enumerate(lines):
        if "griddepcontrol.launch_dependents" in line:
            begun = max(i for i in range(at) if BARRIER.search(lines[i]) or i == waits[0])
            looks = [line for line in lines[begun:at] if re.search(r"ld\.relaxed\.sys\.global\.[su]32", line)]
            assert looks, f"{where}: lets the next kernel begin without a look at its peers"


def check_packets(kernel: Kernel, where: str) -> None:
    """Payload and epoch of a packet are one access of 8 bytes, never two elements of 4 bytes in a vector."""
    if kernel.name in PACKETS:
        check_polls(kernel, where)
        puts = types_of(kernel, PUT)
        assert {"b32"} < puts <= {"b32", *PACKET}, f"{where}: {puts}"  # b32: the failure record


def check_polls(kernel: Kernel, where: str) -> None:
    polls = types_of(kernel, POLL)
    assert {"b32"} < polls <= {"b32", *PACKET}, f"{where}: {polls}"  # b32: Record.STOP


def types_of(kernel: Kernel, access: re.Pattern[str]) -> set[str]:
    """The types of accesses to addresses that the kernel has loaded from memory."""
    return {m["type"] for line in kernel.lines if (m := access.search(line)) and kernel.is_from_memory(line)}


def check_decisions(kernel: Kernel, where: str) -> None:
    """What was polled decides for all warps: each may have polled the same packets, and seen other ones."""
    for at in kernel.find(POLL):
        match = POLL.search(kernel.lines[at])
        if match and match["type"] != "b32" and kernel.is_from_memory(kernel.lines[at]):
            branch = kernel.find(BRANCH, at)[0]
            assert kernel.between(at, branch, BARRIER), f"{where}: a branch after a poll, without a barrier"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("matmul_all_reduce", "packets once=1"),
        ("matmul_all_reduce", "packets"),
        ("matmul_all_gather", "packets"),
    ],
)
def test_decisions_on_a_few_packets(op: str, name: str) -> None:
    """So few that each warp holds all of them."""
    problem = DenseProblem(op, 1, K, N, 2, torch.bfloat16)
    check_decisions(compiled(problem, ways_of(problem)[name], False, False), name)


def check_pipeline(kernel: Kernel, config: Any, problem: DenseProblem, where: str) -> None:
    """Blocks of K are loaded into as many buffers as the configuration has stages, less the one in use."""
    few = isinstance(config, PacketsConfig | FewConfig | PublishPacketsConfig)
    rows = max(16, triton.next_power_of_2(problem.m)) if few else config.bm
    block = (rows + config.bn) * config.bk * 2
    assert (config.stages - 1) * block <= kernel.shared <= SHARED_MEMORY, f"{where}: {kernel.shared}"
    if kernel.find(re.compile("wgmma.mma_async")):
        assert kernel.find(re.compile(r"wgmma\.wait_group\.sync\.aligned\s+[1-9]")), (
            f"{where}: no product in flight"
        )
