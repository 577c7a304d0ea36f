"""All ways to run a dense call on GPUs: fused kernels in several configurations, and what they replace.

A way has a name, which is equal on all ranks and in every table. Whether it can run depends on nothing but
the problem, so that all ranks find the same ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from autofuse.native_kernels.cuda.kernels import gather_words
from autofuse.native_kernels.cuda.kernels.dropless_combine import DroplessConfig
from autofuse.native_kernels.cuda.kernels.expert_combine import CombineConfig
from autofuse.native_kernels.cuda.kernels.expert_dispatch import DispatchConfig
from autofuse.native_kernels.cuda.kernels.gather_matmul import ClusterGatherConfig, cluster_gather_needs
from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig, words_gather_needs
from autofuse.native_kernels.cuda.kernels.matmul_reduce import ClusterReduceConfig, cluster_reduce_needs
from autofuse.native_kernels.cuda.kernels.matmul_words import MOST_ROWS, WordsConfig, words_needs
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT
from autofuse.native_kernels.gpu.memory import LONGEST_ROW, Need, cdiv
from autofuse.native_kernels.triton.gather_matmul import GatherConfig, gather_needs
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig, few_needs
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig, packets_needs
from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig, reduce_needs

DTYPES = (torch.bfloat16, torch.float16)
MOST_BYTES = 1 << 30
"""A way that needs a larger region than this is left out."""

CUBLAS_NCCL = "cublas+nccl"
ONE_SHOT = "cublas+one_shot"
TWO_SHOT = "cublas+two_shot"
ASYNC_TP = "async_tp"
"""torch's own: matmuls of chunks and copies on two streams."""


Config: TypeAlias = (
    ReduceConfig
    | PacketsConfig
    | GatherConfig
    | FewConfig
    | WordsConfig
    | WordsGatherConfig
    | ClusterReduceConfig
    | ClusterGatherConfig
)

_KINDS: dict[type, str] = {
    ReduceConfig: "tiles",
    PacketsConfig: "packets",
    GatherConfig: "parts",
    FewConfig: "few",
    WordsConfig: "words",
    WordsGatherConfig: "words",
    ClusterReduceConfig: "clusters",
    ClusterGatherConfig: "clusters",
}


@dataclass(frozen=True)
class Problem:
    """A dense call: `[m, k] @ [k, n]` on every rank, of 16-bit floats.

    m: rows of the product: all tokens, of a gather too. programs: that run at once. dim, outer: which rows
    (columns) belong to whom. aligned: operands are as TMA loads them. update: tiles are added at their owners
    as they come, where they can be.
    """

    op: str
    m: int
    k: int
    n: int
    world: int
    dtype: torch.dtype
    programs: int = 132
    dim: int = 0
    outer: int = 1
    aligned: bool = True
    update: bool = False


@lru_cache(maxsize=1024)
def ways(problem: Problem) -> Mapping[str, Config | None]:
    """Names of all ways that can run, with the configurations of the fused ones."""
    found: dict[str, Config | None] = {CUBLAS_NCCL: None}
    if problem.op == "matmul_all_reduce":
        nbytes = problem.m * problem.n * 2
        # torch's kernels read and write 16 bytes at a time, of every rank's share.
        if (
            problem.dtype is torch.bfloat16
            and nbytes % (16 * problem.world) == 0
            and problem.world in (2, 4, 8)
        ):
            if nbytes <= 8 << 20:
                found[ONE_SHOT] = None
            found[TWO_SHOT] = None
    elif problem.m >= 1024 and problem.dim == 0 and problem.outer == 1 and problem.dtype is torch.bfloat16:
        found[ASYNC_TP] = None
    if _aligned(problem):
        found |= {name_of(c): c for c in _configs(problem) if _fits(c, problem)}
    return found


def _aligned(problem: Problem) -> bool:
    return (
        problem.aligned
        and problem.dtype in DTYPES
        and problem.world <= 8
        and min(problem.m, problem.k, problem.n) > 0
        and problem.n % 8 == 0
        and problem.k % 8 == 0
        and max(problem.k, problem.n + 256) * problem.dtype.itemsize <= LONGEST_ROW
    )


def fused(problem: Problem) -> list[str]:
    """Names of the ways that are kernels of ours."""
    return [name for name, config in ways(problem).items() if config is not None]


def is_copied(config: object) -> bool:
    """Whether copy engines move the parts of a gather or of a dispatch, or the tiles of a reduction."""
    copied = GatherConfig | ClusterGatherConfig | ClusterReduceConfig | DispatchConfig
    return isinstance(config, copied) and config.copied


def is_update(config: object) -> bool:
    """Whether tiles are added at their owners as they come."""
    return isinstance(config, ClusterReduceConfig) and config.update


def host_us(way: str, config: object) -> float:
    """About how long the host is busy with one call; measured beside H200s with torch 2.11 on 4 ranks."""
    if config is None:
        return {CUBLAS_NCCL: 45.0, ONE_SHOT: 45.0, TWO_SHOT: 55.0}.get(way, 300.0)
    if isinstance(config, ClusterReduceConfig) and config.copied:
        return 300.0  # not measured: four calls of the driver for each slice and peer
    if isinstance(config, ClusterReduceConfig | ClusterGatherConfig):
        return 160.0 if is_copied(config) else 40.0
    if isinstance(config, WordsConfig | WordsGatherConfig):
        return 40.0
    if isinstance(config, CombineConfig | DispatchConfig | DroplessConfig):
        return 160.0 if is_copied(config) else 55.0
    if isinstance(config, PacketsConfig | FewConfig):
        return 60.0
    return 185.0 if is_copied(config) else 100.0


def name_of(config: Config) -> str:
    """`kind`, and every setting that differs from the default."""
    return settings_of(_KINDS[type(config)], config)


def settings_of(kind: str, config: Any) -> str:
    """`kind`, and every setting of a dataclass that differs from its default."""
    words = [kind]
    for f in fields(config):
        value, default = getattr(config, f.name), f.default
        assert default is not MISSING
        if value != default:
            words.append(f"{f.name}={value:d}" if isinstance(value, bool) else f"{f.name}={value}")
    return " ".join(words)


def _configs(problem: Problem) -> Iterator[Config]:
    if problem.op == "all_gather_matmul":
        if problem.dim == 0:
            yield from _gather_configs(problem)
        return
    everywhere, by_rows, m = problem.op == "matmul_all_reduce", problem.dim == 0, problem.m
    if m <= 32 and by_rows and problem.outer == 1:
        if everywhere and m <= 16:
            yield PacketsConfig(once=True)
        yield PacketsConfig()
        yield PacketsConfig(bk=256, stages=4)
        yield PacketsConfig(bn=32, bk=256, stages=4)
        if problem.n >= 128 * problem.programs // 2:
            yield PacketsConfig(bn=128)
    if by_rows and problem.outer == 1 and m <= MOST_ROWS:
        yield from _words_configs(problem)
    if everywhere and 32 < m <= 512:
        for bt in (32, 128):
            yield ReduceConfig(bn=64, bk=128, warps=4, stages=4, bt=bt, by_rows=False)
    if by_rows and m < 64 * problem.world:
        return
    if by_rows and problem.world % 2 == 0 and m > MOST_ROWS:
        yield from _cluster_reduce_configs(m)
        if problem.update:
            bn, stages = (256, 3) if m > 1024 else (128, 5)
            yield ClusterReduceConfig(bn, stages=stages, update=True)
    yield ReduceConfig(bt=32, by_rows=by_rows)
    if m <= 1024:
        yield ReduceConfig(bt=32, visit=8, by_rows=by_rows)
        yield ReduceConfig(bn=128, stages=4, bt=32, by_rows=by_rows)
    elif everywhere:
        yield ReduceConfig(visit=1, by_rows=by_rows)
        yield ReduceConfig(br=64, communicating=24, by_rows=by_rows)


def _words_configs(problem: Problem) -> Iterator[Config]:
    """Those with which tiles keep most programs busy."""
    for bn in (64, 128):
        for split in (1, 2, 4):
            blocks = cdiv(problem.n, bn) * split
            few = split == 1 or blocks <= problem.programs
            if few and blocks > problem.programs // 2 and problem.k >= 64 * split:
                yield WordsConfig(bn, split)
                if problem.op == "matmul_all_reduce" and problem.m <= 16:
                    yield WordsConfig(bn, split, once=True)
                break


def _cluster_reduce_configs(m: int) -> Iterator[Config]:
    yield ClusterReduceConfig(bn=128, stages=5)
    yield ClusterReduceConfig()
    if m > 1024:
        yield ClusterReduceConfig(visit=8)
        yield ClusterReduceConfig(visit=128)
        yield ClusterReduceConfig(copied=True)
        yield ClusterReduceConfig(visit=128, copied=True)
        yield ClusterReduceConfig(across=1, along=2, visit=128, copied=True)
    else:
        yield ClusterReduceConfig(bn=128, stages=5, part=32)


def _gather_configs(problem: Problem) -> Iterator[Config]:
    if problem.m <= gather_words.MOST_ROWS and problem.outer == 1:
        yield from _words_gather_configs(problem)
    if problem.m <= 128 and problem.outer == 1:
        bk, stages, warps = (128, 4, 4) if problem.m <= 64 else (64, 4, 8)
        for bn in (64, 128):
            for pieces in (1, 2, 4, 8):
                if problem.programs // 2 < cdiv(problem.n, bn) * pieces <= problem.programs:
                    for movers in (16, 64):
                        yield FewConfig(bn, bk, warps, stages, pieces, movers)
    if 64 <= problem.m <= 1024:
        yield GatherConfig(bn=64, warps=4, stages=5, movers=96, shared=True)
        yield GatherConfig(bn=128, stages=3, pieces=2, movers=64, shared=True)
        yield GatherConfig(bn=128, stages=4, movers=128, shared=True)
        yield GatherConfig(movers=128, shared=True)
    if 64 <= problem.m <= 512:
        for k_slices in (1, 4, 8):
            yield ClusterGatherConfig(bn=64, across=1, along=2, stages=7, k_slices=k_slices)
    if problem.m >= 512:
        yield from _cluster_gather_configs(problem)
        yield GatherConfig()
        yield GatherConfig(bn=128, stages=4)
        yield GatherConfig(bn=64, warps=4, stages=5)
        yield GatherConfig(bn=128, stages=4, movers=16, slices=4)


def _words_gather_configs(problem: Problem) -> Iterator[Config]:
    """Those that keep most programs busy."""
    for groups in (1, 2):
        for pieces in (1, 2, 4, 8):
            blocks = WordsGatherConfig(groups).tiles(problem.n) * pieces
            if problem.programs // 2 < blocks <= problem.programs and problem.k >= 64 * pieces:
                yield WordsGatherConfig(groups, pieces)
                yield WordsGatherConfig(groups, pieces, ahead=32 if pieces > 2 else 64)


def _cluster_gather_configs(problem: Problem) -> Iterator[Config]:
    """Sent by the kernel, in slices of K, where all parts are multiplied at once; else by copy engines."""
    if problem.m <= 4096:
        for k_slices in (8, 16):
            yield ClusterGatherConfig(k_slices=k_slices)
            if problem.world % 4 == 0:
                yield ClusterGatherConfig(across=4, k_slices=k_slices)
        yield ClusterGatherConfig(bn=128, stages=5, k_slices=4)
        yield ClusterGatherConfig(bn=128, within=True, stages=5, copied=True)
    if problem.m >= 2048:
        yield ClusterGatherConfig(within=True, copied=True)
    if problem.m >= 4096:
        yield ClusterGatherConfig(within=True, slices=2, copied=True)


def _fits(config: Config, problem: Problem) -> bool:
    need = needs(config, problem)
    sizes = asdict(need) | {"pieces": 4 * need.pieces}
    if max(sizes.values()) > MOST_BYTES:
        return False
    if isinstance(config, ReduceConfig) and not config.by_rows and problem.op == "matmul_reduce_scatter":
        return problem.outer == 1 and problem.n % (8 * problem.world) == 0
    if need.copy_signals > 4 * FIRST_CREDIT:
        return False
    if isinstance(config, ClusterReduceConfig | ClusterGatherConfig):
        within = isinstance(config, ClusterGatherConfig) and config.within
        return within or problem.world % config.across == 0
    return True


def needs(config: Config, problem: Problem) -> Need:
    """The memory that a fused way uses."""
    m, n, k, world = problem.m, problem.n, problem.k, problem.world
    everywhere = problem.op == "matmul_all_reduce"
    if isinstance(config, ReduceConfig):
        return reduce_needs(m, n, problem.outer, 2, world, everywhere, config)
    if isinstance(config, ClusterReduceConfig):
        return cluster_reduce_needs(m, n, problem.outer, 2, world, everywhere, config)
    if isinstance(config, ClusterGatherConfig):
        return cluster_gather_needs(m // world, k, 2, world, config)
    if isinstance(config, WordsGatherConfig):
        return words_gather_needs(m, k, n, 2, world, config)
    if isinstance(config, WordsConfig):
        return words_needs(m, n, 2, world, everywhere, config)
    if isinstance(config, PacketsConfig):
        return packets_needs(m, n, world, config)
    if isinstance(config, FewConfig):
        return few_needs(m // world, k, n, 2, world, config)
    return gather_needs(m // world, k, n, problem.outer, 2, world, config)
