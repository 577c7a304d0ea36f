"""The kernels in CUDA C++ as NVRTC compiles them for sm_90; no GPU is needed.

The rules are those of test_ptx.py. PTX is read as text, from top to bottom. The fast tier compiles a subset
in which every value of each constant occurs; the full tier compiles every way in use.
"""

import re
from collections.abc import Iterator
from itertools import cycle, product

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import DTYPES, ways_of
from autofuse.lowering.gpu.dense.ways import DenseProblem
from autofuse.native_kernels.cuda.host.compiler import Constants, compile_both, compile_cubin, why_not
from autofuse.native_kernels.cuda.kernels import (
    gather_matmul,
    gather_words,
    matmul_reduce,
    matmul_words,
)
from autofuse.native_kernels.cuda.kernels.gather_matmul import ClusterGatherConfig
from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig
from autofuse.native_kernels.cuda.kernels.matmul_reduce import ClusterReduceConfig
from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig
from autofuse.native_kernels.gpu.memory import SHARED_MEMORY
from autofuse.native_kernels.gpu.state import MOST_TERMS
from tests.kernels.test_ptx import check_dependent
from tests.subsets import EVERY, each_value

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

K, N = 4096, 4096
OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
SOURCES = (matmul_reduce.SOURCE, matmul_words.SOURCE, gather_matmul.SOURCE, gather_words.SOURCE)

STAGES = (False, False, False), (True, False, False), (False, True, False), (False, False, True)
"""Of a reduction: whether it is biased, scaled, added."""

SIGNAL = re.compile(r"red\.(release|relaxed)\.sys")
RELEASE = re.compile(r"red\.release\.sys")
FENCE = re.compile(r"fence\.acq_rel\.sys;")
BARRIER = re.compile(r"\bbar(rier)?\.(cta\.)?sync")
BULK_STORE = re.compile(r"cp\.(reduce\.)?async\.bulk\.(tensor\.\w+\.)?global\.shared")
BULK_STORED = re.compile(r"cp\.async\.bulk\.wait_group 0;")
TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\w+\.shared::cluster\.global")
PROXY_FENCE = re.compile(r"fence\.proxy\.async;")
STORE = re.compile(r"\bst\.(volatile\.)?global|\bst\.volatile\.u32")
READ = re.compile(r"\bld\.global\.cg")
COUNT = re.compile(r"atom\.acq_rel\.gpu\.global\.add\.s32")
ACQUIRE = re.compile(r"\bld\.acquire")
PUT = re.compile(r"\bst\.relaxed\.sys\.global\.v4")
CLEAR = re.compile(r"\bst\.global\.v4\.\w+ \[\S+\], \{(%\w+), \1, \1, \1\}")
TAKE = re.compile(r"\bld\.relaxed\.sys\.global\.v4")


def cases(op: str) -> Iterator[tuple[str, Constants, int]]:
    """Source, constants and bytes of shared memory of all ways; layouts, dtypes and traces by turns."""
    turns = cycle(product([False, True], DTYPES, [True, False], [True, False]))
    matmuls, stages = cycle((1, 2, MOST_TERMS, 1, 1)), cycle(STAGES)
    sizes = [*product((8, 16, 40, 128, 512, 2048, 8192), (2, 4, 8)), *product((512, 2048), (3, 5))]
    sizes += product((384, 640, 768), (2, 4))  # whose last wave is fuller with tiles of other widths
    for m, world in sizes:
        for way in ways_of(DenseProblem(op, m, K, N, world, torch.bfloat16, update=op == OPS[1])).values():
            config = way.config
            transposed, dtype, trace, other = next(turns)
            if isinstance(config, ClusterReduceConfig | WordsConfig):
                reduced = world, transposed, dtype, other, op == OPS[0]
                summed = trace, next(matmuls), *next(stages)
                if isinstance(config, WordsConfig):
                    constants = matmul_words.words_constants(m, *reduced, config, *summed)
                    yield matmul_words.SOURCE, constants, config.shared_bytes
                else:
                    constants = matmul_reduce.cluster_reduce_constants(*reduced, 0, config, *summed)
                    yield matmul_reduce.SOURCE, constants, config.shared_bytes
            elif isinstance(config, WordsGatherConfig):
                constants = gather_words.words_gather_constants(
                    m, world, transposed, dtype, other, config, trace
                )
                yield gather_words.SOURCE, constants, config.shared_bytes(gather_words.tokens_of(m))
            elif isinstance(config, ClusterGatherConfig):
                yield (
                    gather_matmul.SOURCE,
                    gather_matmul.cluster_gather_constants(
                        m, world, transposed, dtype, other, config, trace, next(matmuls)
                    ),
                    config.shared_bytes,
                )
        next(turns)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("source", SOURCES)
def test_rules(source: str, every: bool) -> None:
    """Before signals and after waits; shared memory; that each variant becomes machine code."""
    shared = {constants: size for op in OPS for of, constants, size in cases(op) if of == source}
    variants = list(shared) if every else each_value(shared, dict)
    assert len(variants) >= 5
    for constants in variants:
        where = f"{source} {dict(constants)}"
        assert shared[constants] <= SHARED_MEMORY, where
        ptx, cubin = compile_both(source, dict(constants))
        assert cubin, where
        lines = [line.strip() for line in ptx.splitlines()]
        if source in (matmul_words.SOURCE, matmul_reduce.SOURCE):
            check_dependent(lines, where)
        words = source in (matmul_words.SOURCE, gather_words.SOURCE)
        if words:
            check_words(lines, where)
        if words and not dict(constants).get("SIGNALLED"):
            assert not find(lines, SIGNAL), where
            assert not find(lines, ACQUIRE), where
        else:
            check_signals(lines, where)
            check_waits(lines, where)


def test_gathers_of_one_rank_become_machine_code() -> None:
    """The benchmark has its matmul alone from them."""
    found = ways_of(DenseProblem("all_gather_matmul", 2048, K, N, 1, torch.bfloat16)).values()
    clusters = [way.config for way in found if isinstance(way.config, ClusterGatherConfig)]
    for config in clusters:
        constants = gather_matmul.cluster_gather_constants(
            2048, 1, False, torch.bfloat16, False, config, False
        )
        assert compile_cubin(gather_matmul.SOURCE, dict(constants))
    assert clusters


def find(lines: list[str], pattern: re.Pattern[str], start: int = 0, stop: int | None = None) -> list[int]:
    return [i for i in range(start, len(lines) if stop is None else stop) if pattern.search(lines[i])]


def check_signals(lines: list[str], where: str) -> None:
    """A release comes after a barrier; relaxed ones after a fence; TMA stores have ended before either.

    And before a tile for copy engines is counted.
    """
    signals = find(lines, SIGNAL)
    assert signals, where
    for at in signals:
        released = RELEASE.search(lines[at]) is not None
        order = find(lines, BARRIER if released else FENCE, 0, at)[-1]
        assert not find(lines, STORE, order, at), f"{where}: a store between {lines[order]} and {lines[at]}"
        assert not find(lines, BULK_STORE, order, at), f"{where}: a TMA store before {lines[at]}"
        if not released:
            check_stored(lines, order, where)
    counts = find(lines, COUNT)
    assert bool(counts) == (matmul_reduce.SOURCE in where and "'ENGINES': 1" in where), where
    for at in counts:
        check_stored(lines, at, where)


def check_stored(lines: list[str], at: int, where: str) -> None:
    """What TMA has stored before is where others find it."""
    stored = find(lines, BULK_STORE, 0, at)[-1]
    ended = find(lines, BULK_STORED, stored, at)
    assert ended, f"{where}: signalled before a TMA store has ended"
    assert find(lines, PROXY_FENCE, ended[-1], at), f"{where}: no fence after TMA stores"


def check_waits(lines: list[str], where: str) -> None:
    """After a wait a barrier comes before reads, and a fence before loads by TMA."""
    waits = find(lines, ACQUIRE)
    assert waits, where
    for at in waits:
        assert "ld.acquire.sys" in lines[at], where
        reads, loads = find(lines, READ, at), find(lines, TMA_LOAD, at)
        if "gather" in where or "dispatch" in where:
            assert loads, where
            assert find(lines, PROXY_FENCE, at, loads[0]), f"{where}: no fence before TMA loads"
        else:
            assert reads, where
            assert find(lines, BARRIER, at, reads[0]), f"{where}: a read before the barrier"


def check_words(lines: list[str], where: str) -> None:
    """Words go and come whole, between GPUs, and what is taken is cleared."""
    puts, takes = find(lines, PUT), find(lines, TAKE)
    assert puts, where
    assert takes, where
    assert puts[0] < takes[0], f"{where}: waits before it has sent"
    # gather_words clears the memory of the call before, while its own words are on their way.
    assert find(lines, CLEAR, 0 if gather_words.SOURCE in where else takes[0]), (
        f"{where}: what was taken stays"
    )
