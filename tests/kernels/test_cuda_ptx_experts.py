"""The expert kernels as NVRTC compiles them for sm_90: the rules and the tiers of test_cuda_ptx.py."""

import re
from collections.abc import Iterator
from itertools import cycle, product

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import DTYPES, ways_of
from autofuse.lowering.gpu.experts.ways import (
    COMBINE,
    DISPATCH,
    DROPLESS,
    DroplessProblem,
    ExpertProblem,
)
from autofuse.lowering.gpu.support import MOST_TERMS
from autofuse.native_kernels.cuda.host.compiler import compile_both, why_not
from autofuse.native_kernels.cuda.host.experts import Cut
from autofuse.native_kernels.cuda.host.gemm import BOX, PROGRESS_BYTES
from autofuse.native_kernels.cuda.kernels import (
    dropless_combine,
    dropless_dispatch,
    expert_combine,
    expert_dispatch,
)
from autofuse.native_kernels.cuda.kernels.expert_combine import CombineConfig
from autofuse.native_kernels.cuda.kernels.expert_dispatch import DispatchConfig
from autofuse.native_kernels.gpu.memory import SHARED_MEMORY
from tests.subsets import EVERY, each_value

from .test_cuda_ptx import (
    ACQUIRE,
    BARRIER,
    FENCE,
    PROXY_FENCE,
    READ,
    STORE,
    TMA_LOAD,
    Constants,
    check_signals,
    check_waits,
    find,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

K, N = 2880, 4096
COUNT = re.compile(r"red\.relaxed\.sys")


def cut_of(experts: int, rows: int, world: int, config: CombineConfig | DispatchConfig) -> Cut:
    return Cut.of(experts, rows, N, 1, world, config.bn, config.across)


def cases(op: str) -> Iterator[tuple[str, Constants, int]]:
    """Source, constants and bytes of shared memory of all ways; layouts, dtypes and traces by turns."""
    turns = cycle(product([False, True], DTYPES, [True, False], [True, False]))
    counts = cycle((1, 2, 2, 1, 2))
    terms = cycle((1, 2, MOST_TERMS))
    for rows, world in ((16, 2), (64, 8), (4096, 2), (4096, 4)):
        for way in ways_of(ExpertProblem(op, 8, rows, K, N, world, torch.bfloat16)).values():
            config = way.config
            transposed, dtype, trace, biased = next(turns)
            if isinstance(config, CombineConfig):
                found = expert_combine.combine_constants(
                    8, rows, N, 1, world, transposed, dtype, biased, 0, config, trace, next(terms)
                )
                yield expert_combine.SOURCE, found, cut_of(8, rows, world, config).shared_bytes
            elif isinstance(config, DispatchConfig) and config.slices < 128:  # they are no constant
                weights = next(counts)
                found = expert_dispatch.dispatch_constants(
                    8, rows, N, 1, world, transposed, dtype, biased, config, trace, weights
                )
                yield expert_dispatch.SOURCE, found, cut_of(8, rows, world, config).shared_bytes
        next(turns)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("op", [COMBINE, DISPATCH])
def test_rules(op: str, every: bool) -> None:
    """Before signals and after waits; shared memory; that each variant becomes machine code."""
    seen = {(source, constants): shared for source, constants, shared in cases(op)}
    variants = list(seen) if every else each_value(seen, lambda variant: dict(variant[1]))
    assert len(variants) >= 5
    for source, constants in variants:
        where = f"{source} {dict(constants)}"
        assert seen[source, constants] + PROGRESS_BYTES <= SHARED_MEMORY, (
            where
        )  # and what is declared in the kernel
        ptx, cubin = compile_both(source, dict(constants))
        assert cubin, where
        lines = [line.strip() for line in ptx.splitlines()]
        if not dict(constants).get("ENGINES"):
            check_signals(lines, where)
        check_waits(lines, where)


def dropless_cases(
    source: str, weights: int, gated: bool = False, kept: bool = False
) -> dict[Constants, int]:
    """Constants and bytes of shared memory of all ways; layouts, dtypes, traces and worlds by turns."""
    problem = DroplessProblem(COMBINE + DROPLESS, 16, K, N, 4, torch.bfloat16, gated=gated)
    turns = cycle(product([False, True], DTYPES, [True, False], [True, False]))
    terms = cycle((1, 2, MOST_TERMS, 1))
    worlds = cycle((2, 8, 4))
    found = {}
    for way, height in product(ways_of(problem).values(), dropless_combine.HEIGHTS):
        config = way.config
        if config is None:
            continue
        transposed, dtype, trace, biased = next(turns)
        kind = 16, next(worlds), transposed, dtype, biased and not gated, height, config, trace
        if source == dropless_dispatch.SOURCE:
            constants = dropless_dispatch.dropless_dispatch_constants(*kind, weights, gated, kept)
            found[constants] = config.shared_bytes(16, height, BOX)
        else:
            constants = dropless_combine.dropless_combine_constants(*kind, next(terms))
            found[constants] = config.shared_bytes(16, height)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("source", [dropless_combine.SOURCE, dropless_dispatch.SOURCE])
def test_rules_of_dropless(source: str, every: bool) -> None:
    """Rows are stored by all lanes of a warp: a barrier, then a fence, then the counts."""
    shared = dropless_cases(source, 1)
    if source == dropless_dispatch.SOURCE:
        shared |= dropless_cases(source, 2) | dropless_cases(source, 2, gated=True)
        shared |= dropless_cases(source, 2, gated=True, kept=True)
    static = 2 * 4 * (16 + 2) + PROGRESS_BYTES
    for constants in shared if every else each_value(shared, dict):
        where = f"{source} {dict(constants)}"
        assert shared[constants] + static <= SHARED_MEMORY, where
        ptx, cubin = compile_both(source, dict(constants))
        assert cubin, where
        lines = [line.strip() for line in ptx.splitlines()]
        counts = find(lines, COUNT)
        assert counts, where
        for at in counts:
            fence = find(lines, FENCE, 0, at)[-1]
            barrier = find(lines, BARRIER, 0, fence)[-1]
            assert not find(lines, STORE, barrier, at), f"{where}: a store after {lines[barrier]}"
        waits = [(at, find(lines, READ, at)) for at in find(lines, ACQUIRE)]  # not all are for data
        assert any(reads for _, reads in waits), where
        for at, reads in waits:
            assert "ld.acquire.sys" in lines[at], where
            assert not reads or find(lines, BARRIER, at, reads[0]), f"{where}: a read before the barrier"
            loads = find(lines, TMA_LOAD, at) if "dispatch" in source else []
            assert not loads or find(lines, PROXY_FENCE, at, loads[0]), f"{where}: no fence before TMA loads"
