"""All ways to run the expert ops on GPUs, by names that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from autofuse.lowering.gpu.dense.ways import CUBLAS_NCCL, DTYPES, settings_of
from autofuse.native_kernels.cuda.host.gemm import BM
from autofuse.native_kernels.cuda.kernels.dropless_combine import MOST_EXPERTS, DroplessConfig
from autofuse.native_kernels.cuda.kernels.expert_combine import CombineConfig, combine_needs
from autofuse.native_kernels.cuda.kernels.expert_dispatch import DispatchConfig, dispatch_needs
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT
from autofuse.native_kernels.gpu.memory import Need, cdiv

COMBINE, DISPATCH = "expert_matmul_all_to_all", "all_to_all_expert_matmul"

ExpertConfig: TypeAlias = CombineConfig | DispatchConfig

MOST_BYTES = 4 << 30
"""A way that needs a larger region than this is left out."""

MOST_RUNS = 32
"""Stores of a tile that spans runs, one after another."""


@dataclass(frozen=True)
class ExpertProblem:
    """A call: `[experts, rows, k] @ [experts, k, columns]` on every rank, rows = (outer, W, run).

    programs: that run at once; aligned: operands are as TMA loads them; weights: that a dispatch's kernel
    multiplies, of so many columns each. To tables of ways they are one weight with the columns of all.
    """

    op: str
    experts: int
    rows: int
    k: int
    columns: int
    world: int
    dtype: torch.dtype
    programs: int = 132
    outer: int = 1
    aligned: bool = True
    weights: int = 1

    @property
    def m(self) -> int:
        """As tables of ways have it: what shares a weight."""
        return self.rows

    @property
    def n(self) -> int:
        return self.experts * self.columns * self.weights

    @property
    def run(self) -> int:
        return self.rows // (self.outer * self.world)


@lru_cache(maxsize=1024)
def expert_ways(problem: ExpertProblem) -> Mapping[str, ExpertConfig | None]:
    """Names of all ways that can run, with the configurations of the kernels."""
    found: dict[str, ExpertConfig | None] = {CUBLAS_NCCL: None}
    if problem.run > 0 and _kernels_take(problem):
        found |= {settings_of("clusters", c): c for c in _configs(problem) if _fits(c, problem)}
    return found


def _configs(problem: ExpertProblem) -> Iterator[ExpertConfig]:
    few = problem.rows <= 256  # and so few tiles that narrow ones keep more multiprocessors busy
    if problem.op == COMBINE:
        if few:
            yield CombineConfig(bn=64, across=1, along=2)
            yield CombineConfig(bn=64, across=1)
        yield CombineConfig()
        yield CombineConfig(bn=128)
        yield CombineConfig(bn=128, across=1, along=2)
        yield CombineConfig(across=1)
        yield CombineConfig(across=1, along=2)
        yield CombineConfig(bn=128, across=1)
        return
    if few:
        yield DispatchConfig(bn=64, across=1, along=2)
        yield DispatchConfig(bn=64, across=1)
    for slices in (8, 32, 128):
        yield DispatchConfig(slices=slices)
        yield DispatchConfig(bn=128, slices=slices)
        yield DispatchConfig(bn=128, across=1, along=2, slices=slices)
        yield DispatchConfig(across=1, slices=slices)
        yield DispatchConfig(across=1, along=2, slices=slices)
        yield DispatchConfig(bn=128, across=1, slices=slices)
        yield DispatchConfig(within=True, slices=slices, copied=True)
        yield DispatchConfig(bn=128, within=True, slices=slices, copied=True)


def _fits(config: ExpertConfig, problem: ExpertProblem) -> bool:
    need = expert_needs(config, problem)
    if max(need.inbox, need.copies) > MOST_BYTES:
        return False
    if need.copy_signals > 4 * FIRST_CREDIT:
        return False
    if problem.run < BM:
        if cdiv(problem.rows, BM) < config.across:
            return False  # half of a cluster has no rows
        if isinstance(config, DispatchConfig):
            return not config.copied and (not config.within or config.across == 1)
        return cdiv(BM, problem.run) <= MOST_RUNS or cdiv(problem.rows, problem.run) <= MOST_RUNS
    if isinstance(config, DispatchConfig) and config.within:
        return cdiv(problem.run, BM) % config.across == 0
    return problem.world % config.across == 0


def expert_needs(config: ExpertConfig, problem: ExpertProblem) -> Need:
    """The memory that a fused way uses."""
    sizes = problem.experts, problem.rows
    if isinstance(config, CombineConfig):
        return combine_needs(*sizes, problem.columns, problem.outer, problem.world, config)
    return dispatch_needs(*sizes, problem.k, problem.world, config)


@dataclass(frozen=True)
class DroplessProblem:
    """A call of any number of rows: ranks have different ones, and must take the same way.

    op: with `DROPLESS` behind its name, since tables of ways know no rows of it; weights: as `ExpertProblem`.
    """

    op: str
    experts: int
    k: int
    columns: int
    world: int
    dtype: torch.dtype
    programs: int = 132
    aligned: bool = True
    weights: int = 1

    m = 1

    @property
    def n(self) -> int:
        return self.experts * self.columns * self.weights


DROPLESS = ", dropless"


@lru_cache(maxsize=1024)
def dropless_ways(problem: DroplessProblem) -> Mapping[str, DroplessConfig | None]:
    """Names of all ways that can run, with the configurations of the kernel."""
    found: dict[str, DroplessConfig | None] = {CUBLAS_NCCL: None}
    if problem.experts <= MOST_EXPERTS and _kernels_take(problem):
        configs = (
            DroplessConfig(),
            DroplessConfig(across=2),
            DroplessConfig(along=2),
            DroplessConfig(bn=128),
            DroplessConfig(bn=128, across=2),
            DroplessConfig(bn=128, along=2),
        )
        found |= {settings_of("clusters", config): config for config in configs}
    return found


def _kernels_take(problem: ExpertProblem | DroplessProblem) -> bool:
    """Whatever its rows: weights that TMA loads, and ranks that kernels serve."""
    return (
        problem.aligned
        and problem.dtype in DTYPES
        and problem.world <= 8
        and min(problem.experts, problem.k, problem.columns) > 0
        and problem.k % 8 == 0
        and problem.columns % 8 == 0
    )
