"""matmul_all_reduce and matmul_reduce_scatter of many tokens: one persistent kernel.

    P = x @ w: [M, N] on every rank, chunk c of it belongs to rank c     Y = sum over ranks of P, in rank order, fp32

Tiles of P are stored by TMA straight into the inbox of their owner (own tiles too) and signalled one tile later, when
the store has long completed, so that neither NVLink nor a fence ever stops the tensor cores. Programs that
only communicate, and all others once they are out of tiles, take tickets in the order in which tiles are complete: a
ticket is one tile of the own chunk, whose W parts are added and, for all_reduce, sent to all; then for all_reduce
one tile of a peer's chunk, copied from where it arrived to the output.

Memory of a rank, by the parity of the epoch: inbox [2, W, rows * BM, pitch], finished [2, W, rows * BM, pitch]
(all_reduce), and counters arrived [2, W, rows * cols], finished [2, W, rows * cols].
"""

import triton
import triton.language as tl

from .comm import begin, finish, peer, signal, signal_stored, wait, wait_all
from .gemm import chunk_tile_at, load_operands, tile_at

REDUCING = tl.constexpr(1)
COPYING = tl.constexpr(2)


@triton.jit
def matmul_reduce(
    x, w, inboxes, out, inbox, finished, signals, state,
    M, N, K, rank, chunk_rows, chunk_cols, rows, cols, width, pitch, out_stride,
    COMPUTING: tl.constexpr, PROGRAMS: tl.constexpr, W: tl.constexpr, ORDER: tl.constexpr,
    BY_ROWS: tl.constexpr, ALL: tl.constexpr, TRANSPOSED: tl.constexpr, MEAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the first COMPUTING multiply.

    x, w: descriptors; inboxes: W descriptors `[2 * rows * BM, pitch]` of the slot for this rank in the inbox of each
    rank; inbox: address of the own inbox; finished, signals: int64 [W], addresses of those of all ranks.
    """
    program = tl.program_id(0)
    epoch = begin(state)
    parity = epoch % 2
    tiles = rows * cols
    counters = W * tiles  # of one kind and parity
    if program < COMPUTING:
        compute(
            x, w, inboxes, signals, K, rank, chunk_rows, chunk_cols, rows, cols, width, parity, program,
            COMPUTING, W, ORDER, BY_ROWS, TRANSPOSED, BM, BN, BK,
        )  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    arrived = peer(signals, rank, tl.int32) + parity * counters
    extent_r = tl.minimum(chunk_rows, M - rank * chunk_rows) if BY_ROWS else M
    extent_c = N if BY_ROWS else tl.minimum(chunk_cols, N - rank * chunk_cols)
    at = rank * chunk_rows * out_stride if BY_ROWS else rank * chunk_cols
    own_out = out + at if ALL else out
    ticket = tl.atomic_add(state + 5, 1).to(tl.int32)
    while ticket < tiles:
        row, col = chunk_tile_at(ticket, rows, cols, width)
        tile = row * cols + col
        wait_all(arrived + tile, tiles, W, 1, state, REDUCING, 0, tile, epoch)
        for s in tl.static_range(W):
            tl.store(arrived + s * tiles + tile, 0)
        for sub in range(BM // BR):
            r = row * BM + sub * BR + tl.arange(0, BR)
            c = tl.max_contiguous(tl.multiple_of(col * BN + tl.arange(0, BN), BN), BN)
            part = inbox.to(tl.pointer_type(dtype)) + (parity * W * rows * BM + r[:, None]) * pitch + c[None, :]
            total = tl.zeros((BR, BN), tl.float32)
            for s in tl.static_range(W):
                total += tl.load(part + s * rows * BM * pitch).to(tl.float32)
            if MEAN:
                total /= W
            value = total.to(dtype)
            inside = (r[:, None] < extent_r) & (c[None, :] < extent_c)
            tl.store(own_out + r[:, None].to(tl.int64) * out_stride + c[None, :], value, mask=inside)
            if ALL:
                where = ((parity * W + rank) * rows * BM + r[:, None]) * pitch + c[None, :]
                for i in tl.static_range(1, W):
                    tl.store(peer(finished, (rank + i) % W, dtype) + where, value)
        if ALL:
            tl.debug_barrier()
            for i in tl.static_range(1, W):
                p = (rank + i) % W
                signal(peer(signals, p, tl.int32) + (2 + parity) * counters + rank * tiles + tile)
        ticket = tl.atomic_add(state + 5, 1).to(tl.int32)
    if ALL:
        ticket -= tiles
        mine = peer(finished, rank, dtype)
        ready = peer(signals, rank, tl.int32) + (2 + parity) * counters
        while ticket < (W - 1) * tiles:
            # All owners finish their first tiles at about the same time.
            source = (rank + 1 + ticket % (W - 1)) % W
            row, col = chunk_tile_at(ticket // (W - 1), rows, cols, width)
            tile = row * cols + col
            wait(ready + source * tiles + tile, 1, state, COPYING, source, tile, epoch)
            tl.store(ready + source * tiles + tile, 0)
            last_r = tl.minimum(chunk_rows, M - source * chunk_rows) if BY_ROWS else M
            last_c = N if BY_ROWS else tl.minimum(chunk_cols, N - source * chunk_cols)
            start = source * chunk_rows * out_stride if BY_ROWS else source * chunk_cols
            for sub in range(BM // BR):
                r = row * BM + sub * BR + tl.arange(0, BR)
                c = tl.max_contiguous(tl.multiple_of(col * BN + tl.arange(0, BN), BN), BN)
                value = tl.load(mine + ((parity * W + source) * rows * BM + r[:, None]) * pitch + c[None, :])
                inside = (r[:, None] < last_r) & (c[None, :] < last_c)
                tl.store(out + start + r[:, None].to(tl.int64) * out_stride + c[None, :], value, mask=inside)
            ticket = tl.atomic_add(state + 5, 1).to(tl.int32) - tiles
    finish(state, epoch, PROGRAMS)


@triton.jit
def compute(
    x, w, inboxes, signals, K, rank, chunk_rows, chunk_cols, rows, cols, width, parity, program,
    COMPUTING: tl.constexpr, W: tl.constexpr, ORDER: tl.constexpr, BY_ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The tiles `program, program + COMPUTING, ...`, as one loop over their blocks of K, so that loads never pause."""
    dtype: tl.constexpr = x.dtype
    tiles = rows * cols
    blocks = tl.cdiv(K, BK)
    mine = tl.cdiv(W * tiles - program, COMPUTING)
    acc = tl.zeros((BM, BN), tl.float32)
    t = program - COMPUTING
    block = blocks - 1
    owner = 0
    row = 0
    col = 0
    unsignalled = tl.full((), 0, tl.int64)
    for _ in range(mine * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            t += COMPUTING
            owner, row, col = tile_at(t, rank, W, rows, cols, width, ORDER)
        first_row = owner * chunk_rows + row * BM if BY_ROWS else row * BM
        first_col = col * BN if BY_ROWS else owner * chunk_cols + col * BN
        a, b = load_operands(x, w, first_row, first_col, block * BK, TRANSPOSED)
        acc = tl.dot(a, b, acc)
        if block == blocks - 1:
            signal_stored(unsignalled)
            value = acc.to(dtype)
            for p in tl.static_range(W):
                if owner == p:
                    inboxes[p].store([(parity * W * rows + row) * BM, col * BN], value)
            flag = ((parity * W + rank) * rows + row) * cols + col
            unsignalled = tl.load(signals + owner) + flag * 4
            acc = tl.zeros((BM, BN), tl.float32)
    signal_stored(unsignalled)
