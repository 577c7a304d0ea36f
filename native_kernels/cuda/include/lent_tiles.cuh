// Which tiles a block of gather_words.cu multiplies: its own, and others where a peer is late.
//
// The blocks of a tile multiply a piece of K each, and wait for the sums of each other. The blocks of NEAR tiles have
// neighbouring numbers: as blocks start in the order of their numbers, blocks that wait for each other run, or come as soon as
// others end, if there is room for (PIECES - 1) * NEAR + 1 blocks.
//
// Tiles with a block of the margin are lent: where x has not arrived after YIELD_NS, the blocks of such a tile end, and the
// blocks of a tile before them multiply it once they have x. The first block that decides does so for all of its tile.
// The warp that loads x (`bring_x`) decides for its block, and tells the other warps which tiles come.
#pragma once
#include "progress.cuh"

constexpr int BK = 64, ROW = BK * 2;  // columns of a block of K, bytes of its rows

// Tiles whose blocks have neighbouring numbers. Multiprocessors near to each other then multiply the same piece of x.
constexpr int NEAR = 8;

// Tile and piece of a block, and the blocks of K that it multiplies.
struct Work {
    int tile, piece, first, last;
    template <class Params>
    __device__ explicit Work(const Params& p) {
        int group = blockIdx.x / (NEAR * PIECES) * NEAR, tiles = min(NEAR, p.tiles - group);
        int place = blockIdx.x - group * PIECES, blocks = (p.k + BK - 1) / BK;
        tile = group + place % tiles;
        piece = place / tiles;
        first = piece * blocks / PIECES;
        last = (piece + 1) * blocks / PIECES;
    }
    __device__ int blocks() const { return last - first; }
};

// The number of tiles that are not lent. It is at least a part of 1 / MOST_TURNS, so that a block takes few others.
constexpr int MOST_TURNS = 16;
template <class Params>
__device__ inline int kept_tiles(const Params& p) {
    int firm = static_cast<int>(p.state[STATE_FIRM]);
    if (p.programs <= firm) return p.tiles;
    int kept = max(firm / (NEAR * PIECES) * NEAR, (p.tiles + MOST_TURNS - 1) / MOST_TURNS);
    return min(max(kept, NEAR), p.tiles);
}

// Who multiplies a tile that is lent: its own blocks, or those of another tile. 0: nobody has decided.
enum Lent { OWN_BLOCKS = 1, OTHERS };

// Decides who multiplies a lent tile, unless another block has decided before. Returns the decision that holds.
template <class Params>
__device__ inline int decide(const Params& p, int tile, Lent who) {
    int before = atomicCAS(claims(p.state, CLAIM_B) + tile, 0, who);
    return before ? before : who;
}

// Whether the blocks of a tile that is lent leave it to others. If they run, they decide soon after x has arrived.
template <class Params>
__device__ inline bool is_left(const Params& p, int tile) {
    const int* word = claims(p.state, CLAIM_B) + tile;
    int64_t begun = nanoseconds();
    int who;
    do who = load_relaxed(word);
    while (!who && nanoseconds() - begun < START_NS);
    return (who ? who : decide(p, tile, OTHERS)) == OTHERS;
}

// The tile that a block multiplies after `tile`: of the lent tiles of equal number in their stretches of `kept` tiles, the next
// one that is left to others; p.tiles or more: none. Blocks of a tile that is lent itself multiply no other.
template <class Params>
__device__ inline int tile_after(const Params& p, int tile, int kept, bool is_lent) {
    do tile = is_lent ? p.tiles : tile + kept;
    while (tile < p.tiles && !is_left(p, tile));
    return tile;
}

// How long a warp waits for x: as long as any wait does, or in a block of a tile that is lent until YIELD_NS have passed.
// is_over() is asked after each poll; reading the clock takes longer than a poll.
struct Wait {
    bool is_lent;
    int64_t begun = nanoseconds();
    int polls = 0;
    __device__ bool is_over() { return is_lent && ++polls % 32 == 0 && nanoseconds() - begun > YIELD_NS; }
};

// What warps of a block tell each other; 0 at first.
struct Progress {
    int owned;     // 1: the share of this block is ours to send; 2: another block has it
    int claimed;   // 1: this block needs the claims no more
    int x;         // 1: x has arrived; 2: it has not, and this block ends
    int lent;      // of Lent, for the tile of this block
    int finished;  // warpgroups that have stored a tile before another one
    int turns[MOST_TURNS];  // 1: no more; 2 + the tile that comes next
};

__device__ inline Progress& progress() {
    __shared__ Progress found;
    return found;
}

// each(work, turn) for each tile that this block multiplies, as the warp that loads x tells them; between() between two.
template <class Each, class Between>
__device__ inline void each_tile(Work work, Each each, Between between) {
    if (await(progress().x) == 2) return;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        each(work, turn);
        int next = await(progress().turns[turn]) - 2;
        if (next < 0) return;
        work.tile = next;
        between();
    }
}
