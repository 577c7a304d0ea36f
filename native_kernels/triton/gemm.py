"""Functions of the matmul kernels: the order of tiles, loads of blocks, biases, sums of pieces of K, pairs.

The order of tiles is the closed form of a plan (tests/kernels compares both). A matrix is cut into a chunk
for each rank, a chunk into `rows x cols` tiles. A rank visits all chunks in turn, in `direct` order those of
the peers `r + 1, r + 2, ...` and its own last, and computes `visit` tiles at each visit. So tiles for all
peers leave all the time, and the own chunk can be reduced before the end.
"""

import triton
import triton.language as tl

from .comm import barrier

DIRECT = tl.constexpr(0)
RING = tl.constexpr(1)
OBLIVIOUS = tl.constexpr(2)

GROUP = tl.constexpr(16)


@triton.jit
def owner_at(stage, rank, world, ORDER: tl.constexpr):
    """The owner whose chunk is visited at `stage` of a turn."""
    if ORDER == OBLIVIOUS:
        return stage
    elif ORDER == RING:
        return (rank + 2 * world - 1 - stage) % world
    else:
        return (rank + 1 + stage) % world


@triton.jit
def tile_at(t, rank, world, rows, cols, visit, ORDER: tl.constexpr):
    """The tile that a rank computes as number `t`: (owner, row, column), in tiles of the owner's chunk."""
    turn = t // (world * visit)
    here = tl.minimum(visit, rows * cols - turn * visit)
    t = t % (world * visit)
    row, col = chunk_tile_at(turn * visit + t % here, rows, cols)
    return owner_at(t // here, rank, world, ORDER), row, col


@triton.jit
def chunk_tile_at(t, rows, cols):
    """Tile number `t` of a chunk, (row, column): down GROUP rows at a time, which stay in the cache."""
    first = t // (GROUP * cols) * GROUP
    here = tl.minimum(GROUP, rows - first)
    t = t % (GROUP * cols)
    return first + t % here, t // here


@triton.jit
def blocks_of(K, BK: tl.constexpr, TERMS: tl.constexpr):
    """Blocks of K of all terms of a sum. K: a tuple, with the K of each term."""
    blocks = tl.cdiv(K[0], BK)
    for i in tl.static_range(1, TERMS):
        blocks += tl.cdiv(K[i], BK)
    return blocks


@triton.jit
def load_term(
    x, w, row, col, block, K, TRANSPOSED: tl.constexpr, BK: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """Block number `block` of the operands of a sum; those of a term follow those of the term before.

    x, w, K: tuples with an entry a term. The loop over blocks has one load of each operand, from the
    descriptor that is selected: so it is pipelined, over the ends of terms, too.
    """
    of_x, of_w = x[0], w[0]
    k = block * BK
    end = tl.cdiv(K[0], BK)
    for i in tl.static_range(1, TERMS):
        if block >= end:
            of_x = x[i]
            of_w = w[i]
            k = (block - end) * BK
        end += tl.cdiv(K[i], BK)
    return load_operands(of_x, of_w, row, col, k, TRANSPOSED)


@triton.jit
def load_operands(x, w, row, col, k, TRANSPOSED: tl.constexpr):
    """Blocks `[BM, BK]` of x and `[BK, BN]` of the weight, stored as [N, K] if TRANSPOSED, else as [K, N]."""
    a = x.load([row, k])
    if TRANSPOSED:
        b = w.load([col, k]).T
    else:
        b = w.load([k, col])
    return a, b


@triton.jit
def add_bias(acc, bias, first, N, piece):
    """`acc` plus entries `first, first + 1, ...` of the bias [N] in each row, for piece 0 of K only."""
    c = first + tl.arange(0, acc.shape[1])
    return acc + tl.load(bias + c, mask=(c < N) & (piece == 0), other=0.0).to(tl.float32)[None, :]


@triton.jit
def add_pieces(pieces, done, acc, tile, piece, where, inside, PIECES: tl.constexpr):
    """Store a piece of K; the last program of a tile adds up its pieces, in order, and stores the sum.

    pieces: fp32 [tiles, PIECES, BM, BN]; done: int32 [tiles], 0 before and after.
    """
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    at = (
        pieces
        + tile.to(tl.int64) * (PIECES * BM * BN)
        + tl.arange(0, BM)[:, None] * BN
        + tl.arange(0, BN)[None, :]
    )
    tl.store(at + piece * (BM * BN), acc)
    barrier()
    if tl.atomic_add(done + tile, 1, sem="acq_rel", scope="gpu") == PIECES - 1:
        barrier()
        total = tl.load(at)
        for i in tl.static_range(1, PIECES):
            total += tl.load(at + i * (BM * BN))
        tl.store(where, total.to(where.dtype.element_ty), mask=inside)
        tl.store(done + tile, 0)


@triton.jit
def pack(values):
    """Pairs of 16-bit values `[R, C]` as uint32 `[R, C / 2]`, the first in the low half."""
    rows: tl.constexpr = values.shape[0]
    cols: tl.constexpr = values.shape[1] // 2
    low, high = tl.split(tl.reshape(values, (rows, cols, 2)))
    return pair(low, high)


@triton.jit
def pair(low, high):
    """Two 16-bit values as one uint32."""
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    high = high.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high << 16)
