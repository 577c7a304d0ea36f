"""What the matmul kernels share: the order of tiles, and loading blocks.

Plans become closed forms here (tests/kernels compares them). A matrix is cut into a chunk a rank, a chunk into
`rows x cols` tiles. A rank visits all chunks in turn, `direct` those of peers `r + 1, r + 2, ...` and its own last,
and at every visit computes `visit` tiles; so that tiles for all peers leave all the time, and own tiles too can
be reduced before the end.
"""

import triton
import triton.language as tl

DIRECT = tl.constexpr(0)
RING = tl.constexpr(1)
OBLIVIOUS = tl.constexpr(2)

GROUP = tl.constexpr(16)


@triton.jit
def owner_at(stage, rank, world, ORDER: tl.constexpr):
    """Whose chunk is visited at `stage` of a turn."""
    if ORDER == OBLIVIOUS:
        return stage
    elif ORDER == RING:
        return (rank + 2 * world - 1 - stage) % world
    else:
        return (rank + 1 + stage) % world


@triton.jit
def tile_at(t, rank, world, rows, cols, visit, ORDER: tl.constexpr):
    """What a rank computes as tile number `t`: (owner, row, column), in tiles of the owner's chunk."""
    turn = t // (world * visit)
    here = tl.minimum(visit, rows * cols - turn * visit)
    t = t % (world * visit)
    row, col = chunk_tile_at(turn * visit + t % here, rows, cols)
    return owner_at(t // here, rank, world, ORDER), row, col


@triton.jit
def chunk_tile_at(t, rows, cols):
    """Tile number `t` of a chunk, (row, column): down the columns of GROUP rows at a time, which stay in the cache."""
    first = t // (GROUP * cols) * GROUP
    here = tl.minimum(GROUP, rows - first)
    t = t % (GROUP * cols)
    return first + t % here, t // here


@triton.jit
def load_operands(x, w, row, col, k, TRANSPOSED: tl.constexpr):
    """Blocks `[BM, BK]` of x and `[BK, BN]` of the weight, which is stored [N, K] if TRANSPOSED, else [K, N]."""
    a = x.load([row, k])
    if TRANSPOSED:
        b = w.load([col, k]).T
    else:
        b = w.load([k, col])
    return a, b
