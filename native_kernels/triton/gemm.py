"""What the matmul kernels share: the order of tiles, and the loop over K.

Plans become closed forms here. A matrix is cut into a chunk a rank, along rows or columns; a chunk into
`rows x cols` tiles; columns of tiles into rounds of `width` of them, so that a round of one chunk is about as much
work as the grid does at once. `direct` visits in every round the chunks of peers `r+1, r+2, ...` and the own
chunk last; `ring` `r-1, r-2, ...`; `oblivious` 0, 1, ...: tests/plans compare them with the plans.
"""

import triton
import triton.language as tl

DIRECT = tl.constexpr(0)
RING = tl.constexpr(1)
OBLIVIOUS = tl.constexpr(2)


@triton.jit
def owner_at(stage, rank, world, ORDER: tl.constexpr):
    """Whose chunk is visited at `stage` of a round."""
    if ORDER == OBLIVIOUS:
        return stage
    elif ORDER == RING:
        return (rank + 2 * world - 1 - stage) % world
    else:
        return (rank + 1 + stage) % world


@triton.jit
def tile_at(t, rank, world, rows, cols, width, ORDER: tl.constexpr):
    """Tile number `t` of all chunks: (owner, row, column) in tiles of the owner's chunk."""
    a_round = world * rows * width
    turn = t // a_round
    t = t % a_round
    width_here = tl.minimum(width, cols - turn * width)
    stage = t // (rows * width_here)
    t = t % (rows * width_here)
    return owner_at(stage, rank, world, ORDER), t % rows, turn * width + t // rows


@triton.jit
def chunk_tile_at(t, rows, cols, width):
    """Tile number `t` of one chunk, in the order of `tile_at`: (row, column)."""
    turn = t // (rows * width)
    t = t % (rows * width)
    return t % rows, turn * width + t // rows


@triton.jit
def load_operands(x, w, row, col, k, TRANSPOSED: tl.constexpr):
    """Blocks `[BM, BK]` of x and `[BK, BN]` of the weight, which is stored [N, K] if TRANSPOSED, else [K, N]."""
    a = x.load([row, k])
    if TRANSPOSED:
        b = w.load([col, k]).T
    else:
        b = w.load([k, col])
    return a, b
