"""matmul_all_reduce and matmul_reduce_scatter of many tokens: one persistent kernel.

    P = sum of x[i] @ w[i]: [M, N] on every rank, rounded once; chunk c belongs to rank c
    Y = sum over ranks of P, fp32, in rank order, rounded once

TMA stores each tile of P into the inbox of its owner, which may be this rank. The program signals a tile
after it has computed the next one: the store has completed by then, and neither NVLink nor a fence stops the
tensor cores. Programs that only communicate, and the others once they have no tiles left, draw tickets in the
order in which data is complete. A ticket is BT rows of a tile: rows of the own chunk are added up and, for
all_reduce, sent to all ranks; rows of a peer's chunk are copied from where they arrived to the output.

A rank has two halves each of inbox [W, rows * BM, pitch], finished [W, rows * BM, pitch] (all_reduce) and the
counters arrived [W, rows * cols], then ready [W, rows * cols * BM / BT].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import (
    EVENTS,
    LONGEST_ROW,
    Need,
    PeerMemory,
    cdiv,
    describe,
    describe_terms,
    launch,
)

from .comm import (
    BEGUN,
    CODES_PER_SITE,
    COMPUTED,
    COPIED,
    COPYING,
    DRAINED,
    ENDED,
    REDUCED,
    REDUCING,
    STATE_TICKETS,
    WAITED,
    begin,
    half_of,
    is_last,
    peer,
    signal_all,
    signal_stored,
    stamp,
    wait,
    wait_all,
)
from .dependent import grid_wait
from .gemm import blocks_of, chunk_tile_at, load_term, tile_at
from .shares import (
    STATE_STARTED,
    A,
    announce,
    claim,
    end_shares,
    first_share,
    further,
    look,
    start,
    stays,
)


@triton.jit(do_not_specialize=["rank", "site"])
def matmul_reduce(
    x, w, x1, w1, x2, w2, x3, w3,
    inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7, out, inbox, finished, signals,
    state, trace,
    M, N, K, K1, K2, K3, rank, site, chunk_rows, chunk_cols, rows, cols, stretch, visit, lag, pitch,
    out_stride, inbox_half, finished_half, signals_half,
    COMPUTING: tl.constexpr, PROGRAMS: tl.constexpr, W: tl.constexpr, ORDER: tl.constexpr,
    BY_ROWS: tl.constexpr, ALL: tl.constexpr, TRANSPOSED: tl.constexpr, MEAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    TERMS: tl.constexpr, TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the first COMPUTING multiply.

    x, w: descriptors; x1, w1, K1 and so on: of further TERMS of P, else None; inbox0 to inbox7: W
    descriptors of the slot for this rank in the inbox of each rank; inbox: address of the own inbox;
    finished, signals: int64 [W], addresses of those of all ranks; rows, cols: tiles of a chunk; stretch:
    rows of tiles in a stretch of `outer`; visit: as in `tile_at`; lag: by how many parts copying is
    behind reducing; pitch: elements of a row in inbox and finished; inbox_half (rows), finished_half,
    signals_half (elements): where the other half begins.
    """
    program = tl.program_id(0)
    grid_wait()
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    parity = half_of(epoch)
    tiles = rows * cols
    counters = W * tiles  # of one kind and parity
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    share = first_share(asked, state, A, COMPUTING, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, epoch)
        event, started = compute(
            (x, x1, x2, x3), (w, w1, w2, w3),
            (inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7), signals, (K, K1, K2, K3),
            rank, chunk_rows, chunk_cols, rows, cols, stretch, visit, parity * inbox_half,
            parity * signals_half, share, state, event, trace, COMPUTING, W, ORDER, BY_ROWS, TRANSPOSED,
            BM, BN, BK, TERMS, TRACE, EVENTS,
        )  # fmt: skip
        share = further(started, PROGRAMS, state, A, COMPUTING, program)
    dtype: tl.constexpr = out.dtype.element_ty
    PARTS: tl.constexpr = BM // BT
    parts = tiles * PARTS
    arrived = peer(signals, rank, tl.int32) + parity * signals_half
    ready = arrived + counters
    arriving = inbox.to(tl.pointer_type(dtype)) + (parity * inbox_half).to(tl.int64) * pitch
    mine = peer(finished, rank, dtype) + parity * finished_half
    r = tl.arange(0, BR)[:, None]
    c = tl.max_contiguous(tl.multiple_of(tl.arange(0, BN), BN), BN)[None, :]
    SOURCES: tl.constexpr = W if ALL else 1
    # With few parts, all are reduced first. With many, a peer's part is copied `lag` tickets after ours.
    mixed = lag < parts
    tickets = (parts + lag) * SOURCES if mixed else parts * SOURCES
    # A program draws its next ticket ahead if there are enough tickets for the others.
    ahead = tickets > 8 * PROGRAMS
    ticket = tl.cast(tickets, tl.int32)
    if stays(state, program, 1, rank, W, epoch):
        # As `draw`, which was no faster here.
        ticket = tl.atomic_add(state + STATE_TICKETS, 1, sem="relaxed").to(tl.int32)
    following = ticket
    while ticket < tickets:
        if ahead:
            following = tl.atomic_add(state + STATE_TICKETS, 1, sem="relaxed").to(tl.int32)
        # Part i of our own chunk, or part i - lag of a peer's: they are complete at about the same time.
        away = ticket % SOURCES
        i = ticket // SOURCES - (lag if away else 0)
        if not mixed:
            copied = ticket - parts
            away = 1 + copied % max(SOURCES - 1, 1) if copied >= 0 else 0
            i = copied // max(SOURCES - 1, 1) if copied >= 0 else ticket
        source = (rank + away) % W
        if (i >= 0) & (i < parts):
            row, col = chunk_tile_at(i // PARTS, rows, cols)
            tile = row * cols + col
            part = tile * PARTS + i % PARTS
            if away == 0:
                wait_all(arrived + tile, tiles, W, 1, state, site * CODES_PER_SITE + REDUCING, 0, tile, epoch)
            else:
                code = site * CODES_PER_SITE + COPYING
                wait(ready + source * parts + part, 1, state, code, source, part, epoch)
                tl.store(ready + source * parts + part, 0)
            event = stamp(trace, program, event, WAITED, source if away else -1, part, TRACE, EVENTS)
            for sub in range(BT // BR):
                in_tile = (i % PARTS) * BT + sub * BR + r
                here = (row * BM + in_tile) * pitch + col * BN + c
                if away == 0:
                    total = tl.zeros((BR, BN), tl.float32)
                    for s in tl.static_range(W):
                        total += tl.load(arriving + s * rows * BM * pitch + here).to(tl.float32)
                    if MEAN:
                        total /= W
                    value = total.to(dtype)
                    if ALL:
                        there = parity * finished_half + rank * rows * BM * pitch + here
                        for p in tl.static_range(1, W):
                            tl.store(peer(finished, (rank + p) % W, dtype) + there, value)
                else:
                    value = tl.load(mine + source * rows * BM * pitch + here)
                to, inside = place(
                    source, row // stretch, row % stretch * BM + in_tile, col * BN + c, M, N, chunk_rows,
                    chunk_cols, out_stride, BY_ROWS, ALL,
                )  # fmt: skip
                tl.store(out + to, value, mask=inside)
            if ALL:
                if away == 0:
                    signal_all(signals, W, parity * signals_half + counters + rank * parts + part, rank)
            event = stamp(
                trace, program, event, REDUCED if away == 0 else COPIED, source, part, TRACE, EVENTS
            )
        if not ahead:
            following = tl.atomic_add(state + STATE_TICKETS, 1, sem="relaxed").to(tl.int32)
        ticket = following
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        for at in range(0, counters, 1024):
            o = at + tl.arange(0, 1024)
            tl.store(arrived + o, 0, mask=o < counters)
        end_shares(state, epoch, PROGRAMS)


@triton.jit
def place(
    owner, stretch, row, col, M, N, chunk_rows, chunk_cols, out_stride,
    BY_ROWS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The offset in the output of a row and column of the chunk of `owner`, and whether it is inside."""
    if BY_ROWS:
        inside = (row < chunk_rows) & (col < N)
        row += (owner if ALL else stretch) * chunk_rows
        inside = inside & (row < M)
    else:
        inside = (row < M) & (col < tl.minimum(chunk_cols, N - owner * chunk_cols))
        col += owner * chunk_cols if ALL else 0
    return row.to(tl.int64) * out_stride + col, inside


@triton.jit
def compute(
    x, w, inboxes, signals, K, rank, chunk_rows, chunk_cols, rows, cols, stretch, visit,
    first_row_there, first_signal, share, state, event, trace,
    COMPUTING: tl.constexpr, W: tl.constexpr, ORDER: tl.constexpr, BY_ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TERMS: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Multiply tiles `share, share + COMPUTING, ...`; flattened, so that loads go on between tiles."""
    program = tl.program_id(0)
    dtype: tl.constexpr = x[0].dtype
    tiles = rows * cols
    unsignalled = tl.full((), 0, tl.int64)
    for t in tl.range(share, W * tiles, COMPUTING, flatten=True):
        owner, row, col = tile_at(t, rank, W, rows, cols, visit, ORDER)
        first_row = row * BM
        if BY_ROWS:
            first_row = (row // stretch * W + owner) * chunk_rows + row % stretch * BM
        first_col = col * BN if BY_ROWS else owner * chunk_cols + col * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for block in range(blocks_of(K, BK, TERMS)):
            a, b = load_term(x, w, first_row, first_col, block, K, TRANSPOSED, BK, TERMS)
            acc = tl.dot(a, b, acc)
        signal_stored(unsignalled)
        value = acc.to(dtype)
        for p in tl.static_range(W):
            if owner == p:
                inboxes[p].store([first_row_there + row * BM, col * BN], value)
        flag = first_signal + (rank * rows + row) * cols + col
        unsignalled = tl.load(signals + owner) + flag * 4
        event = stamp(trace, program, event, COMPUTED, owner, t, TRACE, EVENTS)
    started = look(state, STATE_STARTED)
    signal_stored(unsignalled)
    return stamp(trace, program, event, DRAINED, -1, 0, TRACE, EVENTS), started


@dataclass(frozen=True)
class ReduceConfig:
    """The configuration of `matmul_reduce`; `lowering/gpu/dense/reductions.py` has the measured ones.

    bm, bn, bk: sizes of a tile; communicating: programs that multiply nothing; visit: tiles for one owner
    before those for the next (0: a share of the programs); bt: rows of a ticket; br: rows that are reduced at
    a time; by_rows: whether the chunks of an all_reduce are rows or columns.
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    warps: int = 8
    stages: int = 3
    communicating: int = 0
    visit: int = 0
    bt: int = 128
    br: int = 32
    by_rows: bool = True


@dataclass(frozen=True)
class _Cut:
    """Tiles of a chunk. By rows, the product has rows (outer, W, inner), and a chunk is an index of W."""

    inner: int
    chunk_cols: int
    stretch: int
    rows: int
    cols: int

    @classmethod
    def of(cls, m: int, n: int, outer: int, world: int, config: ReduceConfig) -> "_Cut":
        inner = cdiv(m, world * outer) if config.by_rows else m
        chunk_cols = n if config.by_rows else cdiv(cdiv(n, world), 8) * 8
        stretch = cdiv(inner, config.bm)
        return cls(inner, chunk_cols, stretch, outer * stretch, cdiv(chunk_cols, config.bn))


def reduce_needs(
    m: int, n: int, outer: int, itemsize: int, world: int, all_ranks: bool, config: ReduceConfig
) -> Need:
    """The memory that a call of `matmul_reduce` needs."""
    cut = _Cut.of(m, n, outer, world, config)
    chunk = cut.rows * config.bm * cut.cols * config.bn * itemsize
    counters = world * cut.rows * cut.cols * (1 + (config.bm // config.bt if all_ranks else 0))
    return Need(
        inbox=2 * (world * chunk + LONGEST_ROW),
        finished=2 * world * chunk * all_ranks,
        signals=2 * 4 * counters,
    )


def launch_matmul_reduce(
    memory: PeerMemory,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    outer: int,
    order: int,
    config: ReduceConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """`out = sum (mean) over ranks of sum of x[i] @ w[i]`: all of it, `[M, N]`, or the rows (columns) of this
    rank.

    x[i]: [M, K_i], row-major; w[i]: [K_i, N], all row-major or all transposed; 16-bit floats that `is_tma`
    accepts. Rows are (outer, W, inner), and rank r has index r of W. Without `config.by_rows` columns are
    cut, and outer is 1. memory: at least what `reduce_needs` says. Every rank of the group makes the same
    calls.
    """
    m, n, world, rank, dtype = x[0].shape[0], w[0].shape[1], memory.world, memory.rank, x[0].dtype
    cut = _Cut.of(m, n, outer, world, config)
    pitch, height = cut.cols * config.bn, cut.rows * config.bm
    half = memory.inbox.half(dtype, pitch) // pitch
    boxes = [
        describe(
            memory.inbox.matrix(p, dtype, rank * height * pitch, half + height, pitch), config.bm, config.bn
        )
        for p in range(world)
    ]
    terms, lengths, transposed = describe_terms(x, w, config.bm, config.bk, config.bn)
    programs = memory.programs
    parts = cut.rows * cut.cols * (config.bm // config.bt)
    launch(
        matmul_reduce, programs, compile_only,
        *terms, *boxes, *boxes[:1] * (8 - world), out,
        memory.inbox.views[rank].data_ptr(), memory.finished.addresses, memory.signals.addresses,
        memory.state, memory.state if trace is None else trace,
        m, n, *lengths, rank, site, cut.inner, cut.chunk_cols, cut.rows, cut.cols, cut.stretch,
        config.visit or max(1, programs // world), parts if parts < 3 * programs else programs // world + 1,
        pitch, out.stride(0),
        half, memory.finished.half(dtype), memory.signals.half(torch.int32),
        COMPUTING=programs - config.communicating, PROGRAMS=programs, W=world, ORDER=order,
        BY_ROWS=config.by_rows, ALL=all_ranks, TRANSPOSED=transposed, MEAN=mean,
        BM=config.bm, BN=config.bn, BK=config.bk, BT=config.bt, BR=config.br,
        TERMS=len(x), TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
