"""The kernels of all_gather_matmul: `launch(at, config, part, w, out, bias, outer, more)`.

w, out, bias: a list each, with an entry a weight; bias may be empty. Kernels of few rows take one weight.
They return memory that holds the gathered rows where these are asked for (`more`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, one_launch
from autofuse.native_kernels.cuda.kernels import gather_words
from autofuse.native_kernels.cuda.kernels.gather_matmul import (
    ClusterGatherConfig,
    cluster_gather_needs,
    launch_cluster_gather,
)
from autofuse.native_kernels.cuda.kernels.gather_words import (
    WordsGatherConfig,
    launch_gather_words,
    words_gather_needs,
)
from autofuse.native_kernels.gpu.memory import cdiv
from autofuse.native_kernels.triton.gather_matmul import GatherConfig, gather_needs, launch_gather_matmul
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig, few_needs, launch_gather_matmul_few

from .work import clusters_gather_work, few_work, parts_work, words_gather_work

if TYPE_CHECKING:
    from .ways import DenseProblem


def _words_gather_configs(problem: DenseProblem) -> Iterator[WordsGatherConfig]:
    """Those that keep most programs busy."""
    if problem.m > gather_words.MOST_ROWS or problem.outer != 1:
        return
    for groups in (1, 2):
        for pieces in (1, 2, 4, 8):
            blocks = WordsGatherConfig(groups).tiles(problem.n) * pieces
            if problem.programs // 2 < blocks <= problem.programs and problem.k >= 64 * pieces:
                yield WordsGatherConfig(groups, pieces)
                yield WordsGatherConfig(groups, pieces, ahead=32 if pieces > 2 else 64)


def _launch_words_gather(
    at: Launch, config: WordsGatherConfig, part: Tensor, w: Sequence[Tensor], out: Sequence[Tensor],
    bias: Sequence[Tensor], outer: int, more: bool,
) -> Tensor:  # fmt: skip
    return launch_gather_words(
        at.memory,
        part,
        w[0],
        out[0],
        config,
        at.site,
        at.trace,
        at.compile_only,
        bias[0] if bias else None,
        more,
    )


WORDS_GATHER: Kernel[DenseProblem, WordsGatherConfig] = Kernel(
    "words",
    _words_gather_configs,
    needs=lambda config, p: words_gather_needs(p.m, p.k, p.n, 2, p.world, config),
    launch=_launch_words_gather,
    is_one_launch=one_launch,
    work=words_gather_work,
    source="cuda/kernels/gather_words.cu",
)


def _few_configs(problem: DenseProblem) -> Iterator[FewConfig]:
    if problem.m > 128 or problem.outer != 1:
        return
    bk, stages, warps = (128, 4, 4) if problem.m <= 64 else (64, 4, 8)
    for bn in (64, 128):
        for pieces in (1, 2, 4, 8):
            if problem.programs // 2 < cdiv(problem.n, bn) * pieces <= problem.programs:
                for movers in (16, 64):
                    yield FewConfig(bn, bk, warps, stages, pieces, movers)


def _launch_few(
    at: Launch, config: FewConfig, part: Tensor, w: Sequence[Tensor], out: Sequence[Tensor],
    bias: Sequence[Tensor], outer: int, more: bool,
) -> Tensor:  # fmt: skip
    return launch_gather_matmul_few(
        at.memory, part, w[0], out[0], config, at.site, at.trace, at.compile_only, bias[0] if bias else None
    )


FEW: Kernel[DenseProblem, FewConfig] = Kernel(
    "few",
    _few_configs,
    needs=lambda config, p: few_needs(p.chunk, p.k, p.n, 2, p.world, config),
    launch=_launch_few,
    is_one_launch=one_launch,
    work=few_work,
    source="triton/gather_matmul_few.py",
)


def _parts_configs(problem: DenseProblem) -> Iterator[GatherConfig]:
    if 64 <= problem.m <= 1024:
        yield GatherConfig(bn=64, warps=4, stages=5, movers=96, shared=True)
        yield GatherConfig(bn=128, stages=3, pieces=2, movers=64, shared=True)
        yield GatherConfig(bn=128, stages=4, movers=128, shared=True)
        yield GatherConfig(movers=128, shared=True)
    if problem.m >= 512:
        yield GatherConfig()
        yield GatherConfig(bn=128, stages=4)
        yield GatherConfig(bn=64, warps=4, stages=5)
        yield GatherConfig(bn=128, stages=4, movers=16, slices=4)


def _launch_parts(
    at: Launch, config: GatherConfig, part: Tensor, w: Sequence[Tensor], out: Sequence[Tensor],
    bias: Sequence[Tensor], outer: int, more: bool,
) -> Tensor:  # fmt: skip
    return launch_gather_matmul(
        at.memory, part, w, out, outer, config, at.engine, not more, at.site, at.trace, at.compile_only, bias
    )


PARTS: Kernel[DenseProblem, GatherConfig] = Kernel(
    "parts",
    _parts_configs,
    needs=lambda config, p: gather_needs(p.chunk, p.k, p.columns, p.outer, 2, p.world, config),
    launch=_launch_parts,
    work=parts_work,
    source="triton/gather_matmul.py",
    is_copied=lambda config: config.copied,
    is_one_launch=lambda config: not config.copied,
)


def _clusters_gather_configs(problem: DenseProblem) -> Iterator[ClusterGatherConfig]:
    """Sent by the kernel, in slices of K, where all parts are multiplied at once; else by copy engines."""
    if 64 <= problem.m <= 512:
        for k_slices in (1, 4, 8):
            yield ClusterGatherConfig(bn=64, across=1, along=2, stages=7, k_slices=k_slices)
    if 512 <= problem.m <= 4096:
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


def _launch_clusters_gather(
    at: Launch, config: ClusterGatherConfig, part: Tensor, w: Sequence[Tensor], out: Sequence[Tensor],
    bias: Sequence[Tensor], outer: int, more: bool,
) -> Tensor:  # fmt: skip
    return launch_cluster_gather(
        at.memory, part, w, out, outer, config, at.engine, not more, at.site, at.trace, at.compile_only, bias
    )


CLUSTERS_GATHER: Kernel[DenseProblem, ClusterGatherConfig] = Kernel(
    "clusters",
    _clusters_gather_configs,
    needs=lambda config, p: cluster_gather_needs(p.chunk, p.k, 2, p.world, config),
    launch=_launch_clusters_gather,
    work=clusters_gather_work,
    source="cuda/kernels/gather_matmul.cu",
    fits=lambda config, p: config.within or p.world % config.across == 0,
    is_copied=lambda config: config.copied,
    is_one_launch=lambda config: not config.copied,
)

GATHERS: tuple[Kernel[DenseProblem, Any], ...] = (WORDS_GATHER, FEW, PARTS, CLUSTERS_GATHER)
