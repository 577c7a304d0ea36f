"""The kernels of all_gather_matmul: `launch(at, config, part, w, out, kept, bias, outer)`.

`w`, `out` and `bias` are lists with one entry for each weight; `bias` may be empty. Kernels of few rows take
one weight. `kept` is the tensor in which X is stored for the caller, or None if the call does not return X.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, only_kernels
from autofuse.native_kernels.cuda.host.gemm import BM
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
from autofuse.native_kernels.triton.kept_rows import launch_kept_rows

from .widths import GATHER_WIDTHS, fullest
from .work import clusters_gather_work, few_work, parts_work, words_gather_work

if TYPE_CHECKING:
    from .ways import DenseProblem


def _keep(at: Launch, gathered: Tensor, part: Tensor, kept: Tensor | None, outer: int) -> None:
    """Copies X out of the memory where its parts have arrived."""
    if kept is not None:
        launch_kept_rows(at.memory, gathered, part, outer, kept, at.compile_only)


def _of_many_rows(launch: Callable[..., Tensor]) -> Callable[..., None]:
    """The launch of a kernel that takes several weights. The kernel gives credit to its peers, unless X still
    has to be copied out of the memory where its parts have arrived."""

    def start(
        at: Launch, config: GatherConfig | ClusterGatherConfig, part: Tensor, w: Sequence[Tensor],
        out: Sequence[Tensor], kept: Tensor | None, bias: Sequence[Tensor], outer: int,
    ) -> None:  # fmt: skip
        credit = kept is None
        gathered = launch(
            at.memory, part, w, out, outer, config, at.engine, credit, at.site, at.trace, at.compile_only,
            bias,
        )  # fmt: skip
        _keep(at, gathered, part, kept, outer)
        if not credit and config.copied and not at.compile_only:
            at.engine.give_credit()

    return start


def _words_gather_configs(problem: DenseProblem) -> Iterator[WordsGatherConfig]:
    """The configurations that keep most programs busy."""
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
    kept: Tensor | None, bias: Sequence[Tensor], outer: int,
) -> None:  # fmt: skip
    only = bias[0] if bias else None
    launch_gather_words(at.memory, part, w[0], out[0], config, at.site, at.trace, at.compile_only, only, kept)


WORDS_GATHER: Kernel[DenseProblem, WordsGatherConfig] = Kernel(
    "words",
    _words_gather_configs,
    needs=lambda config, p: words_gather_needs(p.m, p.k, p.n, 2, p.world, config),
    launch=_launch_words_gather,
    only_launches=only_kernels,
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
    kept: Tensor | None, bias: Sequence[Tensor], outer: int,
) -> None:  # fmt: skip
    only = bias[0] if bias else None
    gathered = launch_gather_matmul_few(
        at.memory, part, w[0], out[0], config, at.site, at.trace, at.compile_only, only
    )
    _keep(at, gathered, part, kept, outer)


FEW: Kernel[DenseProblem, FewConfig] = Kernel(
    "few",
    _few_configs,
    needs=lambda config, p: few_needs(p.chunk, p.k, p.n, 2, p.world, config),
    launch=_launch_few,
    only_launches=only_kernels,
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


PARTS: Kernel[DenseProblem, GatherConfig] = Kernel(
    "parts",
    _parts_configs,
    needs=lambda config, p: gather_needs(p.chunk, p.k, p.columns, p.outer, 2, p.world, config),
    launch=_of_many_rows(launch_gather_matmul),
    work=parts_work,
    source="triton/gather_matmul.py",
    is_copied=lambda config: config.copied,
    only_launches=only_kernels,
)


def _clusters_gather_configs(problem: DenseProblem) -> Iterator[ClusterGatherConfig]:
    """The kernel or copy engines send. The kernel sends slices of K if a cluster multiplies rows of several
    parts, and four slices of rows and K if it multiplies rows of one part (`within`)."""
    if 64 <= problem.m <= 1024:
        for k_slices in (1, 4, 8):
            yield ClusterGatherConfig(bn=64, across=1, along=2, stages=7, k_slices=k_slices)
    if 512 <= problem.m <= 4096:
        for k_slices in (8, 16):
            yield ClusterGatherConfig(k_slices=k_slices)
            if problem.world % 4 == 0:
                yield ClusterGatherConfig(across=4, k_slices=k_slices)
        for k_slices in (4, 8):
            yield ClusterGatherConfig(bn=128, stages=5, k_slices=k_slices)
        yield ClusterGatherConfig(bn=128, within=True, stages=5, copied=True)
        stages_of = {256: 3, 128: 5}  # by columns of a tile
        rows = problem.world * cdiv(problem.chunk, BM)
        best = fullest(GATHER_WIDTHS, rows, problem.columns, problem.programs)
        if best not in stages_of:
            stages_of[best] = 3 if best > 192 else 4
            for k_slices in (8, 16):
                yield ClusterGatherConfig(bn=best, stages=stages_of[best], k_slices=k_slices)
            yield ClusterGatherConfig(bn=best, within=True, stages=stages_of[best], copied=True)
        if problem.chunk > BM:  # a part has rows for both blocks of a cluster
            for bn, stages in stages_of.items():
                yield ClusterGatherConfig(bn=bn, within=True, stages=stages, slices=2, k_slices=2)
    if problem.m >= 2048:
        yield ClusterGatherConfig(within=True, copied=True)
    if problem.m >= 4096:
        yield ClusterGatherConfig(within=True, slices=2, copied=True)


CLUSTERS_GATHER: Kernel[DenseProblem, ClusterGatherConfig] = Kernel(
    "clusters",
    _clusters_gather_configs,
    needs=lambda config, p: cluster_gather_needs(p.chunk, p.k, 2, p.world, config),
    launch=_of_many_rows(launch_cluster_gather),
    work=clusters_gather_work,
    source="cuda/kernels/gather_matmul.cu",
    fits=lambda config, p: config.within or p.world % config.across == 0,
    is_copied=lambda config: config.copied,
    only_launches=only_kernels,
)

GATHERS: tuple[Kernel[DenseProblem, Any], ...] = (WORDS_GATHER, FEW, PARTS, CLUSTERS_GATHER)
