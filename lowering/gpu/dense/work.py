"""The work of the ways of the dense ops: sizes of kernels, and of the ops that torch has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autofuse.lowering.gpu.choice.work import (
    LEAST,
    Chunks,
    Collective,
    Exchange,
    Product,
    Rows,
    Shots,
    Sliced,
    Then,
    Tiles,
    Work,
)
from autofuse.native_kernels.cuda.host.gemm import BM
from autofuse.native_kernels.cuda.kernels.gather_matmul import ClusterGatherConfig
from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig
from autofuse.native_kernels.cuda.kernels.matmul_reduce import ClusterReduceConfig
from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig
from autofuse.native_kernels.gpu.memory import cdiv
from autofuse.native_kernels.triton.exchange_row_packets import RowPacketsConfig
from autofuse.native_kernels.triton.exchange_rows import RowsConfig
from autofuse.native_kernels.triton.exchange_sums import SumsConfig
from autofuse.native_kernels.triton.gather_matmul import GatherConfig
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig
from autofuse.native_kernels.triton.matmul_gather import PublishConfig
from autofuse.native_kernels.triton.matmul_gather_packets import PublishPacketsConfig
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig
from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig

from .widths import tiles_across

if TYPE_CHECKING:
    from .ways import DenseProblem

SUM = 4
"""Bytes of a partial sum."""

TAIL, INDUCTOR_TAIL = "tail", "inductor tail"
"""A kernel that applies a tail: ours behind a way, and the one that Inductor generates."""


def tail_work(nbytes: float, model: str = TAIL) -> Rows:
    """The kernel that applies a tail behind a sum. nbytes: that it reads and writes."""
    return Rows(model, nbytes, 0.0, False)


def _operands(p: DenseProblem) -> float:
    """Bytes that a tail of owners reads besides the sum: one operand of full size, as far as is known."""
    return 2.0 * p.m * p.n


def _behind(p: DenseProblem) -> tuple[Work, ...]:
    """What follows a way that does not apply the tail itself, where owners may apply it."""
    if not p.written:
        return ()
    return (tail_work(_product(p) + _operands(p) + p.m * p.written),)


def _with_behind(p: DenseProblem, work: Work) -> Work:
    return Then(work, *_behind(p)) if p.written else work


def _tiles(
    p: DenseProblem, model: str, rows: int, columns: int, sent: float, *, high: int = 0, wide: int = 0,
    pieces: int = 1, hops: int = 1, copies: int = 0, added: float = 0.0,
    load: tuple[float, float] = (1.0, 1.0), cluster: int = 1, slices: int = 1,
) -> Work:  # fmt: skip
    """Tiles of the product: `rows * columns`, of `high` rows and `wide` columns, in pieces of K.

    load: parts of rows and columns that a program loads itself.
    """
    loaded = (high * load[0] + wide * load[1]) * p.k * 2 / pieces
    tiles = Tiles(
        f"{p.op} {model}", rows * columns * pieces, 2 * max(high, LEAST) * wide * p.k / pieces, loaded,
        _matrices(p), sent, added, hops, copies, cluster, slices,
    )  # fmt: skip
    return _with_behind(p, tiles)


def _matrices(p: DenseProblem) -> float:
    """Bytes of all operands and of the result."""
    return 2.0 * (p.k * p.n + p.m * (p.k + p.n))


def _product(p: DenseProblem) -> float:
    """Bytes of the product."""
    return float(p.dtype.itemsize * p.m * p.n)


def _reduced(p: DenseProblem, once: bool = False) -> tuple[float, int]:
    """Bytes that a rank sends to reduce the product, and exchanges that follow one another."""
    product = _product(p)
    if once:
        return product * (p.world - 1), 1
    hops = 2 if p.everywhere else 1
    return hops * product * (p.world - 1) / p.world, hops


def packets_work(config: PacketsConfig, p: DenseProblem) -> Work:
    sent, hops = _reduced(p, config.once)
    high = 16 if p.m <= 16 else 32
    return _tiles(
        p, "packets", 1, cdiv(p.n, config.bn), 2 * sent, high=high, wide=config.bn, hops=hops,
        added=2 * sent / p.world,
    )  # fmt: skip


def words_work(config: WordsConfig, p: DenseProblem) -> Work:
    sent, hops = _reduced(p, config.once)
    rows, columns = cdiv(p.m, BM), cdiv(p.n, config.bn)
    if rows == 1:
        return _tiles(
            p, "words", 1, columns, sent, high=64 if p.m <= 64 else BM, wide=config.bn, pieces=config.split,
            hops=hops, added=sent / p.world,
        )  # fmt: skip
    received = 2.0 * p.m * p.n * (p.world if config.once else hops)
    return _tiles(
        p, "high words", rows, columns, sent, high=BM, wide=config.bn, pieces=config.split, hops=hops,
        added=received, load=(1.0, 1 / config.across), cluster=config.cluster,
    )  # fmt: skip


def clusters_work(config: ClusterReduceConfig, p: DenseProblem) -> Work:
    sent, hops = _reduced(p)
    rows, columns = cdiv(p.m, BM), cdiv(p.n, config.bn)
    copies = cdiv(rows * columns * (p.world - 1), p.world * config.slice) if config.copied else 0
    return _tiles(
        p, "clusters copied" if config.copied else "clusters", rows, columns, sent, high=BM, wide=config.bn,
        hops=hops, added=2.0 * p.m * p.n * (1 + 1 / p.world), load=(1 / config.along, 1 / config.across),
        copies=copies, cluster=config.cluster,
    )  # fmt: skip


def tiles_work(config: ReduceConfig, p: DenseProblem) -> Work:
    sent, hops = _reduced(p)
    return _tiles(
        p, "tiles", cdiv(p.m, config.bm), cdiv(p.n, config.bn), sent, high=config.bm, wide=config.bn,
        hops=hops, added=2.0 * p.m * p.n * (1 + 1 / p.world),
    )  # fmt: skip


def _exchange(p: DenseProblem, model: str, sent: float, hops: int, applies: bool = False) -> Work:
    """cuBLAS, then the exchange. applies: the kernel applies the tail of owners, if there is one."""
    summed = _product(p) * (1 if p.everywhere else 1 / p.world)
    if applies and p.written:
        summed = _operands(p) + p.m * p.written
    work = Exchange(f"{p.op} {model}", _products(p), sent, 2 * sent + summed, hops)
    return work if applies else _with_behind(p, work)


def sums_work(config: SumsConfig, p: DenseProblem) -> Work:
    return _exchange(p, "sums", *_reduced(p, config.once))


def rows_work(config: RowsConfig, p: DenseProblem) -> Work:
    """Owners send what their tail returns."""
    sent, hops = _reduced(p, config.once)
    if p.written and not config.once:
        sent = (p.world - 1) * (_product(p) + p.m * p.written) / p.world
    return _exchange(p, "rows", sent, hops, applies=True)


def row_packets_work(config: RowPacketsConfig, p: DenseProblem) -> Work:
    """One exchange of packets, which are twice the bytes."""
    return _exchange(p, "row_packets", 2 * _reduced(p, once=p.everywhere)[0], 1, applies=True)


def _gathered(p: DenseProblem) -> float:
    """Bytes that a rank sends of its part."""
    return 2.0 * p.m * p.k * (p.world - 1) / p.world


def words_gather_work(config: WordsGatherConfig, p: DenseProblem) -> Work:
    return _tiles(
        p, "words", 1, config.tiles(p.n), _gathered(p), high=p.m, wide=64 * config.groups,
        pieces=config.pieces, added=SUM * p.m * p.n * (config.pieces - 1) / config.pieces,
    )  # fmt: skip


def few_work(config: FewConfig, p: DenseProblem) -> Work:
    return _tiles(
        p, "few", 1, cdiv(p.n, config.bn), _gathered(p), high=p.m, wide=config.bn, pieces=config.pieces,
        added=SUM * p.m * p.n * (config.pieces - 1),
    )  # fmt: skip


def parts_work(config: GatherConfig, p: DenseProblem) -> Work:
    rows, columns = p.world * cdiv(p.chunk, config.bm), tiles_across(config.bn, p.columns)
    return _tiles(
        p, "parts copied" if config.copied else "parts", rows, columns, _gathered(p), high=config.bm,
        wide=config.bn, pieces=config.pieces,
        added=SUM * p.m * p.n * (config.pieces - 1), copies=_copies(p, config.slices) if config.copied else 0,
    )  # fmt: skip


def clusters_gather_work(config: ClusterGatherConfig, p: DenseProblem) -> Work:
    rows = p.world * cdiv(p.chunk, BM) if p.m > BM else 1  # few rows share a tile
    columns = tiles_across(config.bn, p.columns)
    if config.across > 1 and not config.within:
        return Sliced(
            f"{p.op} clusters", rows * columns, 2 * BM * config.bn * p.k,
            (BM + config.bn / config.across) * p.k * 2, _matrices(p), _gathered(p), config.k_slices,
            config.cluster,
        )  # fmt: skip
    # Tiles of one wave begin together, those of the last slice, too.
    waits = config.copied or (config.within and rows * columns <= p.programs)
    kind = "copied" if config.copied else "within"
    return _tiles(
        p, f"clusters {kind}", rows, columns, _gathered(p), high=BM, wide=config.bn,
        load=(1 / config.along, 1 / config.across), copies=_copies(p, config.slices) if config.copied else 0,
        cluster=config.cluster, slices=1 if waits else config.slices * config.k_slices,
    )  # fmt: skip


def _copies(p: DenseProblem, slices: int) -> int:
    """Of a rank's part, in slices, to all peers."""
    return slices * (p.world - 1)


def _published(p: DenseProblem) -> float:
    """Bytes that a rank sends of its product."""
    return 2.0 * p.m * p.n * (p.world - 1)


def publish_packets_work(config: PublishPacketsConfig, p: DenseProblem) -> Work:
    sent = 2 * _published(p)
    high = max(16, 1 << (p.m - 1).bit_length())
    return _tiles(p, "packets", 1, cdiv(p.n, config.bn), sent, high=high, wide=config.bn, added=sent)


def publish_work(config: PublishConfig, p: DenseProblem) -> Work:
    sent = _published(p)
    return _tiles(
        p, "tiles", cdiv(p.m, config.bm), cdiv(p.n, config.bn), sent, high=config.bm, wide=config.bn,
        added=2 * sent,
    )  # fmt: skip


# --- What torch has --------------------------------------------------------------------------------------


def _products(p: DenseProblem) -> tuple[Product, ...]:
    """One for each term of a sum, or weight of a gather."""
    return tuple(Product(p.m, k, n) for k in p.terms or (p.k,) for n in p.columns)


def collective_work(kind: str, nbytes: float, world: int) -> Collective:
    """A collective of NCCL. nbytes: of what it sums or gathers, in all."""
    sent = nbytes * (world - 1) / world * (2 if kind == "all_reduce" else 1)
    return Collective(f"nccl {kind}", sent, world)


def nccl_work(p: DenseProblem) -> tuple[Work, ...]:
    """cuBLAS, and the collective before or behind it."""
    product = _product(p)
    if p.op == "all_gather_matmul":
        collective = collective_work("all_gather", 2.0 * p.m * p.k, p.world)
    elif p.op == "matmul_all_gather":
        collective = collective_work("all_gather", product * p.world, p.world)
    else:
        collective = collective_work("all_reduce" if p.everywhere else "reduce_scatter", product, p.world)
    # Columns, and stretches of rows, are brought into order by copies.
    in_order = p.by_rows and p.outer == 1
    copied = 0.0 if in_order else 2 * collective.sent * p.world / max(1, p.world - 1)
    return *_products(p), replace(collective, copied=copied), *_behind(p)


def one_shot_work(p: DenseProblem) -> tuple[Work, ...]:
    shots = Shots("one_shot", _reduced(p, once=True)[0], 2 * _product(p), p.world)
    return *_products(p), shots, *_behind(p)


def two_shot_work(p: DenseProblem) -> tuple[Work, ...]:
    return *_products(p), Shots("two_shot", _reduced(p)[0], 2 * _product(p), p.world), *_behind(p)


def async_tp_work(p: DenseProblem) -> tuple[Work, ...]:
    sent = _gathered(p) if p.op == "all_gather_matmul" else _reduced(p)[0]
    return (Chunks(f"async_tp {p.op}", Product(cdiv(p.m, p.world), p.k, p.n), sent, p.world),)
