"""The kernels of the expert ops.

Of combines `launch(at, config, x, w, out, bias, how)`; of dispatches, with lists of weights, outputs and
biases, `launch(at, config, x, w, out, biases, how)`. `how` is a `Fixed` or, of dropless calls, `Rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, only_kernels
from autofuse.native_kernels.cuda.host.gemm import BM
from autofuse.native_kernels.cuda.kernels.dropless_combine import DroplessConfig, launch_dropless_combine
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import launch_dropless_dispatch
from autofuse.native_kernels.cuda.kernels.expert_combine import (
    CombineConfig,
    combine_needs,
    launch_expert_combine,
)
from autofuse.native_kernels.cuda.kernels.expert_dispatch import (
    DispatchConfig,
    dispatch_needs,
    launch_expert_dispatch,
)
from autofuse.native_kernels.gpu.memory import Need, cdiv

from .work import dropless_work, fixed_work

if TYPE_CHECKING:
    from .ways import DroplessProblem, ExpertProblem

FEW_ROWS = 256
"""Up to so many rows of an expert there are so few tiles that narrow ones keep more multiprocessors busy."""

MOST_RUNS = 32
"""Stores of a tile that spans runs, one after another."""


class Fixed(NamedTuple):
    """How rows of fixed capacity are exchanged. order: as `ORDERS` numbers them; keep: X is asked for."""

    outer: int
    order: int = 0
    keep: bool = False


class Rows(NamedTuple):
    """Which rows a dropless call sends and receives: see the ops. Splits are those of this rank."""

    offsets: Tensor | None
    positions: Tensor | None
    received: Sequence[int]
    sent: Sequence[int]


def _combine_configs(problem: ExpertProblem) -> Iterator[CombineConfig]:
    if problem.rows <= FEW_ROWS:
        yield CombineConfig(bn=64, across=1, along=2)
        yield CombineConfig(bn=64, across=1)
    yield CombineConfig()
    yield CombineConfig(bn=128)
    yield CombineConfig(bn=128, across=1, along=2)
    yield CombineConfig(across=1)
    yield CombineConfig(across=1, along=2)
    yield CombineConfig(bn=128, across=1)


def _combine_fits(config: CombineConfig, problem: ExpertProblem) -> bool:
    rows, run = problem.rows, problem.run
    if run >= BM:
        return problem.world % config.across == 0
    if cdiv(rows, BM) < config.across:
        return False  # half of a cluster has no rows
    return cdiv(BM, run) <= MOST_RUNS or cdiv(rows, run) <= MOST_RUNS


def _launch_combine(
    at: Launch, config: CombineConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor,
    bias: Tensor | None, how: Fixed,
) -> None:  # fmt: skip
    launch_expert_combine(
        at.memory, x, w, out, how.outer, how.order, config, at.site, at.trace, at.compile_only, bias
    )


COMBINE_CLUSTERS: Kernel[ExpertProblem, CombineConfig] = Kernel(
    "clusters",
    _combine_configs,
    needs=lambda config, p: combine_needs(p.experts, p.rows, p.columns, p.outer, p.world, config),
    launch=_launch_combine,
    only_launches=only_kernels,
    work=fixed_work,
    source="cuda/kernels/expert_combine.cu",
    fits=_combine_fits,
)


def _dispatch_configs(problem: ExpertProblem) -> Iterator[DispatchConfig]:
    if problem.rows <= FEW_ROWS:
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


def _dispatch_fits(config: DispatchConfig, problem: ExpertProblem) -> bool:
    if problem.run < BM:
        if cdiv(problem.rows, BM) < config.across:
            return False  # half of a cluster has no rows
        return not config.copied and (not config.within or config.across == 1)
    if config.within:
        return cdiv(problem.run, BM) % config.across == 0
    return problem.world % config.across == 0


def _launch_dispatch(
    at: Launch, config: DispatchConfig, x: Tensor, w: Sequence[Tensor], out: Sequence[Tensor],
    biases: Sequence[Tensor], how: Fixed,
) -> None:  # fmt: skip
    launch_expert_dispatch(
        at.memory, x, w, out, how.outer, config, at.engine, how.keep, at.site, at.trace, at.compile_only,
        biases,
    )  # fmt: skip


DISPATCH_CLUSTERS: Kernel[ExpertProblem, DispatchConfig] = Kernel(
    "clusters",
    _dispatch_configs,
    needs=lambda config, p: dispatch_needs(p.experts, p.rows, p.k, p.world, config),
    launch=_launch_dispatch,
    work=fixed_work,
    source="cuda/kernels/expert_dispatch.cu",
    fits=_dispatch_fits,
    is_copied=lambda config: config.copied,
    only_launches=only_kernels,
)


def _dropless_configs(problem: DroplessProblem) -> Iterator[DroplessConfig]:
    for bn in (256, 128) if problem.gated else (256, 192, 128):  # half a gated tile is whole boxes
        yield DroplessConfig(bn)
        yield DroplessConfig(bn, across=2)
        yield DroplessConfig(bn, along=2)


def _launch_dropless_combine(
    at: Launch, config: DroplessConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor,
    bias: Tensor | None, rows: Rows,
) -> None:  # fmt: skip
    launch_dropless_combine(at.memory, x, w, out, *rows, config, at.site, at.trace, at.compile_only, bias)


DROPLESS_COMBINE: Kernel[DroplessProblem, DroplessConfig] = Kernel(
    "clusters",
    _dropless_configs,
    needs=lambda config, p: Need(),
    launch=_launch_dropless_combine,
    work=dropless_work,
    source="cuda/kernels/dropless_combine.cu",
)


def _launch_dropless_dispatch(
    at: Launch, config: DroplessConfig, x: Tensor, w: Sequence[Tensor], out: Sequence[Tensor],
    biases: Sequence[Tensor], rows: Rows,
) -> None:  # fmt: skip
    gated = len(out) != len(w)
    launch_dropless_dispatch(
        at.memory, x, w, out, *rows, config, at.site, at.trace, at.compile_only, biases, gated
    )


DROPLESS_DISPATCH: Kernel[DroplessProblem, DroplessConfig] = Kernel(
    "clusters",
    _dropless_configs,
    needs=lambda config, p: Need(),
    launch=_launch_dropless_dispatch,
    only_launches=only_kernels,
    work=dropless_work,
    source="cuda/kernels/dropless_dispatch.cu",
)
