"""The kernels of embedding bags. A kernel pools rows and exchanges them, or only pools them for a collective.

Launches of the forward: `launch(at, config, descriptors, tables, places, out)`. Launches of the backward and
of updates: `launch(at, config, descriptors, tables, places, entries, grad, exchanged)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, only_kernels
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.embedding_backward import launch_embedding_backward
from autofuse.native_kernels.triton.embedding_entries import sorted_entries
from autofuse.native_kernels.triton.embedding_exchange import launch_embedding_exchange
from autofuse.native_kernels.triton.embedding_tables import (
    BackwardConfig,
    BagsConfig,
    Places,
    Tables,
    backward_needs,
    exchange_needs,
)

from .places import places_of
from .work import kernel_work, merged_work

if TYPE_CHECKING:
    from .ways import ExchangeProblem

MERGED_NCCL = "merged+nccl"
"""Name of the way in which one kernel of ours pools all tables, and NCCL exchanges the rows."""


def _bags_configs(problem: ExchangeProblem) -> Iterator[BagsConfig]:
    """Configurations with different numbers of rows, and of threads, that a multiprocessor loads at a
    time."""
    yield BagsConfig()
    yield BagsConfig(tile=256, unroll=8, warps=1, per_sm=32)
    yield BagsConfig(tile=2048, unroll=2, per_sm=6)
    yield BagsConfig(slice_kib=2048)
    # Where the link is what is slow, what needs none goes on beside it.
    yield BagsConfig(tile=2048, unroll=2, per_sm=6, mixed=True)
    yield BagsConfig(tile=2048, unroll=2, per_sm=6, copying=1, mixed=True)


def _bags_needs(config: BagsConfig, problem: ExchangeProblem) -> Need:
    # Of dims only their sum matters, and it is the same on all ranks where the layout has more than columns.
    places = places_of("bsc", 0, problem.b, problem.columns, [problem.columns[0]])
    return exchange_needs(places, problem.dtype.itemsize, problem.world, config)


def _launch_bags(
    at: Launch, config: BagsConfig, descriptors: Tensor, tables: Tables, places: Places, out: Tensor
) -> None:
    launch_embedding_exchange(
        at.memory, descriptors, tables, places, out, config, False, at.site, at.trace, at.compile_only
    )


BAGS: Kernel[ExchangeProblem, BagsConfig] = Kernel(
    "bags",
    _bags_configs,
    needs=_bags_needs,
    launch=_launch_bags,
    only_launches=only_kernels,
    work=kernel_work,
    source="triton/embedding_exchange.py",
)


def _launch_merged(
    at: Launch, config: BagsConfig, descriptors: Tensor, tables: Tables, places: Places, out: Tensor
) -> None:
    launch_embedding_exchange(
        at.memory, descriptors, tables, places, out, config, True, at.site, at.trace, at.compile_only
    )


MERGED_BAGS: Kernel[ExchangeProblem, BagsConfig] = Kernel(
    MERGED_NCCL,
    configs=lambda problem: [BagsConfig()],
    needs=lambda config, problem: Need(),
    launch=_launch_merged,
    work=merged_work,
    source="triton/embedding_exchange.py",
)


def _strips_configs(problem: ExchangeProblem) -> Iterator[BackwardConfig]:
    """Configurations with different numbers of rows that are loaded at a time, and of rows of one index that
    are added one after another."""
    yield BackwardConfig()
    yield BackwardConfig(strip=16)
    yield BackwardConfig(tile=512, warps=2, per_sm=8)
    yield BackwardConfig(tile=512, strip=16, warps=2, per_sm=8)
    yield BackwardConfig(tile=2048, strip=32, warps=8, per_sm=2)


def _launch_strips(
    at: Launch, config: BackwardConfig, descriptors: Tensor, tables: Tables, places: Places, bags: int,
    grad: Tensor | None, exchanged: Tensor | None,
) -> None:  # fmt: skip
    entries = sorted_entries(at.memory, descriptors, tables, bags, at.site, at.compile_only)
    launch_embedding_backward(
        at.memory, descriptors, tables, places, entries, grad, exchanged, config, at.site, at.trace,
        at.compile_only,
    )  # fmt: skip


STRIPS: Kernel[ExchangeProblem, BackwardConfig] = Kernel(
    "strips",
    _strips_configs,
    needs=lambda config, p: backward_needs(p.b, p.columns, p.dtype.itemsize),
    launch=_launch_strips,
    work=kernel_work,
    source="triton/embedding_backward.py",
)

MERGED_STRIPS: Kernel[ExchangeProblem, BackwardConfig] = Kernel(
    MERGED_NCCL,
    configs=lambda problem: [BackwardConfig()],
    needs=lambda config, problem: Need(),
    launch=_launch_strips,
    work=merged_work,
    source="triton/embedding_backward.py",
)
