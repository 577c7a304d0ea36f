"""all_gather_matmul: one persistent kernel that multiplies the parts of X in the order in which they arrive.

    X = all_gather(x): [W * C, K], part c from rank c        Y = X @ w: [W * C, N]

Parts are stored into the memory of all peers, r + 1 first, in slices of a few rows of tiles, each with one counter.
Who moves them: every program its share, before it multiplies (SHARED, few tokens); programs of their own, which
come first in the grid; or copy engines that the host has set going (PUSHING = 0). The own part is multiplied first,
from where it lies, then those of r - 1, r - 2, ..., whose slices arrive in that order.

`gather_matmul_few`: all rows fit in one tile, and a program multiplies a piece of K of one tile; the pieces of a tile
are added, in order, by the program that comes last.

Memory of a rank, by the parity of the epoch: gathered [2, W, C, K] and counters arrived [2, W, slices].
"""

import triton
import triton.language as tl

from .comm import begin, fence_copies, finish, peer, signal, wait, wait_all
from .gemm import load_operands

GATHERING = tl.constexpr(3)


@triton.jit
def push(
    part, gathered, signals, rank, elements, slices, slice_elements, parity, mover,
    MOVERS: tl.constexpr, W: tl.constexpr, SELF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store this rank's part (`elements` elements, contiguous) into the memory of all peers, with SELF our own too.

    Mover number `mover` of MOVERS moves every MOVERS-th block of a slice and signals once a slice.
    """
    dtype: tl.constexpr = part.dtype.element_ty
    for i in tl.static_range(0 if SELF else 1, W):
        to = (rank + i) % W
        there = peer(gathered, to, dtype) + (parity * W + rank).to(tl.int64) * elements
        flags = peer(signals, to, tl.int32) + (parity * W + rank) * slices
        for s in range(slices):
            first = s * slice_elements
            last = tl.minimum(first + slice_elements, elements)
            for at in range(first + mover * BLOCK, last, MOVERS * BLOCK):
                o = at + tl.arange(0, BLOCK)
                tl.store(there + o, tl.load(part + o, mask=o < last), mask=o < last)
            signal(flags + s)


@triton.jit
def reset(signals, rank, count, parity, epoch, state, PROGRAMS: tl.constexpr):
    """`finish`, and all counters of this parity are 0 again."""
    tl.debug_barrier()
    if tl.atomic_add(state + 6, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        flags = peer(signals, rank, tl.int32) + parity * count
        for i in range(count):
            tl.store(flags + i, 0)
    finish(state, epoch, PROGRAMS)


@triton.jit
def gather_matmul(
    x, gathered_x, w, y, part, gathered, signals, out, state,
    M, N, K, rank, chunk, rows, cols, slices, slice_rows, target, out_stride,
    PUSHING: tl.constexpr, PROGRAMS: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr,
    EXACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the first PUSHING move.

    x, w: descriptors of the own part [C, K] and the weight; gathered_x: of the own gathered memory [2 * W * C, K];
    y: of the output, used if EXACT (C is a multiple of BM); part, out: the own part and the output; gathered,
    signals: int64 [W]; slice_rows: rows of tiles in a slice; target: what the counter of a complete slice shows.
    """
    program = tl.program_id(0)
    epoch = begin(state)
    parity = epoch % 2
    if program < PUSHING:
        push(
            part, gathered, signals, rank, chunk * K, slices, slice_rows * BM * K, parity, program,
            PUSHING, W, False, BLOCK,
        )  # fmt: skip
    else:
        COMPUTING: tl.constexpr = PROGRAMS - PUSHING
        arrived = peer(signals, rank, tl.int32) + parity * W * slices
        multiply(
            x, w, y, out, K, N, 0, rank * chunk, chunk, 0, rows, program - PUSHING, rows * cols, out_stride,
            COMPUTING, TRANSPOSED, EXACT, BM, BN, BK,
        )  # fmt: skip
        before = rows * cols
        for unit in range(slices, W * slices):
            source = (rank + W - unit // slices) % W
            piece = unit % slices
            wait(arrived + source * slices + piece, target, state, GATHERING, source, piece, epoch)
            fence_copies()
            first = piece * slice_rows
            here = tl.minimum(slice_rows, rows - first)
            tiles = here * cols
            # Whose turn it is goes on where the last unit ended.
            start = (program - PUSHING + COMPUTING - before % COMPUTING) % COMPUTING
            before += tiles
            multiply(
                gathered_x, w, y, out, K, N, (parity * W + source) * chunk, source * chunk, chunk, first, here,
                start, tiles, out_stride, COMPUTING, TRANSPOSED, EXACT, BM, BN, BK,
            )  # fmt: skip
    reset(signals, rank, W * slices, parity, epoch, state, PROGRAMS)


@triton.jit
def multiply(
    x, w, y, out, K, N, at, to, chunk, first, here, start, tiles, out_stride,
    COMPUTING: tl.constexpr, TRANSPOSED: tl.constexpr, EXACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tiles `start, start + COMPUTING, ...` of `here` rows of tiles from row `first` of a part on, columns slowest.

    The part begins in row `at` of x and in row `to` of the output.
    """
    blocks = tl.cdiv(K, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    t = start - COMPUTING
    block = blocks - 1
    row = 0
    col = 0
    for _ in range(tl.cdiv(tiles - start, COMPUTING) * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            t += COMPUTING
            row = first + t % here
            col = t // here
        a, b = load_operands(x, w, at + row * BM, col * BN, block * BK, TRANSPOSED)
        acc = tl.dot(a, b, acc)
        if block == blocks - 1:
            if EXACT:
                y.store([to + row * BM, col * BN], acc.to(x.dtype))
            else:
                r = row * BM + tl.arange(0, BM)
                c = col * BN + tl.arange(0, BN)
                where = (to + r[:, None]).to(tl.int64) * out_stride + c[None, :]
                tl.store(out + where, acc.to(x.dtype), mask=(r[:, None] < chunk) & (c[None, :] < N))
            acc = tl.zeros((BM, BN), tl.float32)


@triton.jit
def gather_matmul_few(
    gathered_x, w, part, gathered, signals, out, pieces, done, state,
    M, N, K, rank, chunk, cols, per_piece, out_stride,
    PROGRAMS: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, PIECES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS >= cols * PIECES, all of which move and multiply. M <= BM.

    pieces: fp32 [PIECES, BM, cols * BN]; done: int32 [cols], 0; per_piece: blocks of K in a piece.
    """
    program = tl.program_id(0)
    epoch = begin(state)
    parity = epoch % 2
    push(part, gathered, signals, rank, chunk * K, 1, chunk * K, parity, program, PROGRAMS, W, True, BLOCK)
    if program < cols * PIECES:
        col = program % cols
        piece = program // cols
        arrived = peer(signals, rank, tl.int32) + parity * W
        wait_all(arrived, 1, W, PROGRAMS, state, GATHERING, 0, program, epoch)
        fence_copies()
        acc = tl.zeros((BM, BN), tl.float32)
        first = piece * per_piece
        for block in range(first, tl.minimum(first + per_piece, tl.cdiv(K, BK))):
            a, b = load_operands(gathered_x, w, parity * W * chunk, col * BN, block * BK, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        r = tl.arange(0, BM)
        c = col * BN + tl.arange(0, BN)
        where = r[:, None] * (cols * BN) + c[None, :]
        last = True
        if PIECES > 1:
            tl.store(pieces + piece * BM * cols * BN + where, acc)
            tl.debug_barrier()
            last = tl.atomic_add(done + col, 1, sem="acq_rel", scope="gpu") == PIECES - 1
            tl.debug_barrier()
        if last:
            if PIECES > 1:
                acc = tl.zeros((BM, BN), tl.float32)
                for i in tl.static_range(PIECES):
                    acc += tl.load(pieces + i * BM * cols * BN + where)
                tl.store(done + col, 0)
            inside = (r[:, None] < M) & (c[None, :] < N)
            tl.store(out + r[:, None] * out_stride + c[None, :], acc.to(out.dtype.element_ty), mask=inside)
    reset(signals, rank, W, parity, epoch, state, PROGRAMS)
