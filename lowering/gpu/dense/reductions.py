"""The kernels of matmul_all_reduce and matmul_reduce_scatter: `launch(at, config, x, w, out, how)`.

x, w: lists, with the operands of all terms of a sum. A kernel that exchanges a product which torch has
computed (`EXCHANGES`) gets the product as the only entry of x, and an empty w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, Way, only_kernels
from autofuse.native_kernels.cuda.host.gemm import BK, BM
from autofuse.native_kernels.cuda.kernels.matmul_reduce import (
    ClusterReduceConfig,
    cluster_reduce_needs,
    launch_cluster_reduce,
)
from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig, launch_matmul_words, words_needs
from autofuse.native_kernels.gpu.memory import cdiv
from autofuse.native_kernels.triton.exchange_row_packets import (
    RowPacketsConfig,
    launch_exchange_row_packets,
    row_packets_fit,
    row_packets_needs,
)
from autofuse.native_kernels.triton.exchange_rows import RowsConfig, launch_exchange_rows, rows_needs
from autofuse.native_kernels.triton.exchange_sums import SumsConfig, launch_exchange_sums, sums_needs
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig, launch_matmul_packets, packets_needs
from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig, launch_matmul_reduce, reduce_needs
from autofuse.native_kernels.triton.tails import NO_TAIL, TailSpec, rows_fit

from .factors import MULTIPLIED
from .widths import CLUSTER_WIDTHS, columns_each, fullest
from .work import clusters_work, packets_work, row_packets_work, rows_work, sums_work, tiles_work, words_work

if TYPE_CHECKING:
    from .ways import DenseProblem


MOST_PACKET_ROWS = 64
"""Packets are sent for at most so many rows. They have twice the bytes; with more rows, sending these takes
longer than a signal."""
WORDS_WIDTHS = 192, 160, 128, 96, 64
"""Columns of a tile whose product is sent as words. Wide tiles load less."""
MOST_WORDS_COLUMNS = 4 * 128
"""Most columns that a program multiplies one after another."""
MOST_ONCE_ROWS = 128
"""At most so many rows are exchanged once, with `W` times the bytes. With more rows and more than two ranks,
a second exchange takes less time than these bytes."""


class Reduce(NamedTuple):
    """How a product is reduced.

    mean: the sum is divided by the number of ranks; order: as `ORDERS` numbers them; bias, scale: each rank
    first adds this row to its product, or multiplies the product by this number; added: a matrix that each
    rank adds to the rounded sums, for kernels that can (`Kernel.adds`).
    """

    mean: bool
    everywhere: bool
    outer: int
    order: int
    bias: Tensor | None = None
    scale: float | None = None
    added: Tensor | None = None


def _is_of_rows(problem: DenseProblem) -> bool:
    """Whether each rank owns a contiguous range of rows."""
    return problem.by_rows and problem.outer == 1


def _packets_configs(problem: DenseProblem) -> Iterator[PacketsConfig]:
    if problem.m > 32 or not _is_of_rows(problem):
        return
    if problem.everywhere and problem.m <= 16:
        yield PacketsConfig(once=True)
    yield PacketsConfig()
    yield PacketsConfig(bk=256, stages=4)
    yield PacketsConfig(bn=32, bk=256, stages=4)
    if problem.n >= 128 * problem.programs // 2:
        yield PacketsConfig(bn=128)


def _launch_packets(
    at: Launch, config: PacketsConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor, how: Reduce
) -> None:
    launch_matmul_packets(
        at.memory, x, w, out, how.mean, how.everywhere, config, at.site, at.trace, at.compile_only
    )


PACKETS: Kernel[DenseProblem, PacketsConfig] = Kernel(
    "packets",
    _packets_configs,
    needs=lambda config, p: packets_needs(p.m, p.n, p.world, config),
    launch=_launch_packets,
    only_launches=only_kernels,
    work=packets_work,
    source="triton/matmul_packets.py",
    fits=lambda config, p: p.product == MULTIPLIED,
)


def _words_configs(problem: DenseProblem) -> Iterator[WordsConfig]:
    """For one row of tiles: the configurations that keep most programs busy."""
    if not _is_of_rows(problem):
        return
    if problem.m > BM:
        yield from _high_words_configs(problem)
        return
    for bn in (64, 128):
        for split in (1, 2, 4):
            blocks = cdiv(problem.n, bn) * split
            few = split == 1 or blocks <= problem.programs
            # With more rows, four blocks that share 128 columns took twice as long as two that share 64.
            if bn == 128 and split == 4 and problem.m > 32:
                continue
            if few and blocks > problem.programs // 2 and problem.k >= 64 * split:
                yield from _words(problem, bn, split=split)
                break
    if cdiv(problem.n, 128) > problem.programs:
        yield from _words(problem, 192)


def _words(problem: DenseProblem, bn: int, split: int = 1) -> Iterator[WordsConfig]:
    yield WordsConfig(bn, split)
    if problem.everywhere and problem.m <= 16:
        yield WordsConfig(bn, split, once=True)


def _high_words_configs(problem: DenseProblem) -> Iterator[WordsConfig]:
    """For several rows of tiles. Words are sent during the matmul and added up after it, so there should be
    few waves of tiles."""
    rows = cdiv(problem.m, BM)
    once = problem.everywhere and problem.world == 2  # as many bytes as two exchanges
    exchanges = (True, False) if once and problem.m > 512 else (once,)
    small, wide = rows * cdiv(problem.n, 64), rows * cdiv(problem.n, 128)
    if small <= 2 * problem.programs:
        yield WordsConfig(once=once)
    if 2 * small <= problem.programs and problem.k >= 2 * BK:
        yield WordsConfig(split=2, once=once)
    if wide <= problem.programs:
        yield WordsConfig(bn=128, once=once)
    if wide <= 4 * problem.programs:
        for at_once in exchanges:
            yield WordsConfig(bn=128, across=2, once=at_once)
    across = 1 if rows % 2 else 2
    of_tiles = rows, (problem.n,), problem.programs // across * across
    best = fullest(WORDS_WIDTHS, *of_tiles)
    if best not in (64, 128) and columns_each(best, *of_tiles) <= MOST_WORDS_COLUMNS:
        for at_once in exchanges:
            yield WordsConfig(best, once=at_once, across=across)


def _launch_words(
    at: Launch, config: WordsConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor, how: Reduce
) -> None:
    launch_matmul_words(
        at.memory, x, w, out, how.mean, how.everywhere, config, at.site, at.trace, at.compile_only,
        how.bias, how.scale, how.added,
    )  # fmt: skip


WORDS: Kernel[DenseProblem, WordsConfig] = Kernel(
    "words",
    _words_configs,
    needs=lambda config, p: words_needs(p.m, p.n, 2, p.world, p.everywhere, config),
    launch=_launch_words,
    only_launches=only_kernels,
    work=words_work,
    source="cuda/kernels/matmul_words.cu",
    adds=True,
)


def _clusters_configs(problem: DenseProblem) -> Iterator[ClusterReduceConfig]:
    m = problem.m
    if not problem.by_rows or m <= BM or m < 64 * problem.world:
        return
    # The blocks of a cluster share a block of the weight, for two owners. With an odd number of owners they
    # share a block of x.
    config = partial(ClusterReduceConfig, across=1, along=2) if problem.world % 2 else ClusterReduceConfig
    yield config(bn=128, stages=5)
    yield config()
    if fullest(CLUSTER_WIDTHS, cdiv(m, BM), (problem.n,), problem.programs) == 192:
        yield config(bn=192, stages=4)
    if m > 1024:
        yield config(visit=8)
        yield config(visit=128)
        yield config(copied=True)
        yield config(visit=128, copied=True)
        if problem.world % 2 == 0:
            yield config(across=1, along=2, visit=128, copied=True)
    else:
        yield config(bn=128, stages=5, part=32)
    if problem.update:
        bn, stages = (256, 3) if m > 1024 else (128, 5)
        yield config(bn=bn, stages=stages, update=True)


def _launch_clusters(
    at: Launch, config: ClusterReduceConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor,
    how: Reduce,
) -> None:  # fmt: skip
    launch_cluster_reduce(
        at.memory, x, w, out, how.mean, how.everywhere, how.outer, how.order, config, at.site, at.trace,
        at.compile_only, at.engine, how.bias, how.scale, how.added,
    )  # fmt: skip


CLUSTERS: Kernel[DenseProblem, ClusterReduceConfig] = Kernel(
    "clusters",
    _clusters_configs,
    needs=lambda config, p: cluster_reduce_needs(p.m, p.n, p.outer, 2, p.world, p.everywhere, config),
    # Copies were not measured: four calls of the driver for each slice and peer.
    launch=_launch_clusters,
    work=clusters_work,
    source="cuda/kernels/matmul_reduce.cu",
    adds=True,
    fits=lambda config, p: p.world % config.across == 0,
    is_copied=lambda config: config.copied,
    only_launches=only_kernels,
    is_update=lambda config: config.update,
)


def _tiles_configs(problem: DenseProblem) -> Iterator[ReduceConfig]:
    everywhere, by_rows, m = problem.everywhere, problem.by_rows, problem.m
    if everywhere and 32 < m <= 512:
        for bt in (32, 128):
            yield ReduceConfig(bn=64, bk=128, warps=4, stages=4, bt=bt, by_rows=False)
    if by_rows and m < 64 * problem.world:
        return
    yield ReduceConfig(bt=32, by_rows=by_rows)
    if m <= 1024:
        yield ReduceConfig(bt=32, visit=8, by_rows=by_rows)
        yield ReduceConfig(bn=128, stages=4, bt=32, by_rows=by_rows)
    elif everywhere:
        yield ReduceConfig(visit=1, by_rows=by_rows)
        yield ReduceConfig(br=64, communicating=24, by_rows=by_rows)


def _tiles_fit(config: ReduceConfig, problem: DenseProblem) -> bool:
    if problem.product != MULTIPLIED:
        return False
    if config.by_rows or problem.everywhere:
        return True
    return problem.outer == 1 and problem.n % (8 * problem.world) == 0


def _launch_tiles(
    at: Launch, config: ReduceConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor, how: Reduce
) -> None:
    launch_matmul_reduce(
        at.memory, x, w, out, how.mean, how.everywhere, how.outer, how.order, config, at.site, at.trace,
        at.compile_only,
    )  # fmt: skip


TILES: Kernel[DenseProblem, ReduceConfig] = Kernel(
    "tiles",
    _tiles_configs,
    needs=lambda config, p: reduce_needs(p.m, p.n, p.outer, 2, p.world, p.everywhere, config),
    launch=_launch_tiles,
    only_launches=only_kernels,
    work=tiles_work,
    source="triton/matmul_reduce.py",
    fits=_tiles_fit,
)


def _sums_configs(problem: DenseProblem) -> Iterator[SumsConfig]:
    if problem.m * problem.n % 8 or not (problem.everywhere or _is_chunked(problem)):
        return
    configs = [SumsConfig(), SumsConfig(length=1024)]
    # In one exchange a rank receives W / 2 times the bytes of two exchanges.
    if problem.everywhere and (problem.world == 2 or problem.m <= MOST_ONCE_ROWS):
        yield from (replace(config, once=True) for config in configs)
    if not problem.everywhere or problem.world > 2:
        yield from configs


def _is_chunked(problem: DenseProblem) -> bool:
    """Whether each rank owns a contiguous range of elements that begins at a multiple of 16 bytes."""
    rows = _is_of_rows(problem) and problem.m % problem.world == 0
    return rows and problem.m // problem.world * problem.n % 8 == 0


def _launch_sums(
    at: Launch, config: SumsConfig, x: Sequence[Tensor], w: Sequence[Tensor], out: Tensor, how: Reduce
) -> None:
    launch_exchange_sums(at.memory, x[0], out, how.mean, how.everywhere, config, at.site, at.compile_only)


SUMS: Kernel[DenseProblem, SumsConfig] = Kernel(
    "sums",
    _sums_configs,
    needs=lambda config, p: sums_needs(p.m * p.n, p.dtype.itemsize, p.world, p.everywhere, config),
    launch=_launch_sums,
    only_launches=only_kernels,
    takes_product=True,
    work=sums_work,
    source="triton/exchange_sums.py",
)


def _rows_configs(problem: DenseProblem) -> Iterator[RowsConfig]:
    if not (_is_of_rows(problem) and rows_fit(problem.n)):
        return
    if problem.everywhere and (problem.world == 2 or problem.m <= MOST_ONCE_ROWS):
        yield RowsConfig(once=True)
    if not problem.everywhere or problem.world > 2 or problem.written:
        yield RowsConfig()


def _launch_rows(
    exchange: Callable[..., None],
    at: Launch,
    config: RowsConfig,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor | Sequence[Tensor],
    how: Reduce,
    operands: Sequence[Tensor] = (),
    tail: TailSpec = NO_TAIL,
) -> None:
    """exchange: the launch of a kernel that can apply a tail; out: the sum or, with a tail, its results."""
    results = [out] if isinstance(out, Tensor) else out
    exchange(
        at.memory, x[0], results, how.mean, how.everywhere, config, at.site, at.compile_only,
        operands, tail,
    )  # fmt: skip


ROWS: Kernel[DenseProblem, RowsConfig] = Kernel(
    "rows",
    _rows_configs,
    needs=lambda config, p: rows_needs(p.m, p.n, p.dtype.itemsize, p.world, p.everywhere, config, p.written),
    launch=partial(_launch_rows, launch_exchange_rows),
    only_launches=only_kernels,
    takes_product=True,
    work=rows_work,
    source="triton/exchange_rows.py",
)


def _row_packets_configs(problem: DenseProblem) -> Iterator[RowPacketsConfig]:
    few = problem.m <= MOST_PACKET_ROWS and _is_of_rows(problem)
    if few and problem.dtype.itemsize == 2 and row_packets_fit(problem.n, problem.world):
        yield RowPacketsConfig()


ROW_PACKETS: Kernel[DenseProblem, RowPacketsConfig] = Kernel(
    "row_packets",
    _row_packets_configs,
    needs=lambda config, p: row_packets_needs(p.m, p.n, p.world, p.everywhere),
    launch=partial(_launch_rows, launch_exchange_row_packets),
    only_launches=only_kernels,
    takes_product=True,
    work=row_packets_work,
    source="triton/exchange_row_packets.py",
)


def reads_x(way: Way) -> bool:
    """Whether a kernel of ours reads x. If not, torch multiplies."""
    return way.kernel is not None and not way.kernel.takes_product


def applies_tails(way: Way, problem: DenseProblem) -> bool:
    """Whether the kernel of a way applies the tail; if not, another kernel does behind it. The owner of a row
    may apply the tail for all ranks only where they have agreed that it is the same (`written`)."""
    if way.kernel is ROW_PACKETS:
        return True
    if way.kernel is not ROWS:
        return False
    return not problem.everywhere or way.config.once or problem.written > 0


REDUCTIONS: tuple[Kernel[DenseProblem, Any], ...] = (
    PACKETS, WORDS, CLUSTERS, TILES, SUMS, ROWS, ROW_PACKETS,
)  # fmt: skip

EXCHANGES = tuple(kernel for kernel in REDUCTIONS if kernel.takes_product)
"""The kernels that exchange a product of cuBLAS: its operands may have any layout, and K any length."""
