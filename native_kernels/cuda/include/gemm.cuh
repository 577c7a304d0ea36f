// The matrix product of a block of 128 x BN, fed by TMA, in clusters that share what they load.
//
// A thread of warpgroup 0 loads; warpgroups 1 and 2 multiply 64 rows each. Blocks of a cluster are numbered m * ALONG + n.
// The ACROSS blocks of equal n share the block of the weight, the ALONG blocks of equal m share the block of x. Each block
// loads its share of both and multicasts it to the blocks that share it. Where nothing is shared, SPLIT blocks of a cluster
// may compute one tile, each over a part of K; each block then adds up SPLIT_ROWS rows of the tile, in the order of the
// blocks. With few rows, blocks of x and staged tiles have ROWS rows instead of 128, and the other rows of the tensor cores'
// result are not used.
#pragma once
#include "turn.cuh"
#include "wgmma.cuh"

// GATED: the first half of a tile's columns are of one weight, the second half are the same columns of another one (gate.cuh).
// OUT_BN: columns of a result.
#ifndef GATED
#define GATED 0
#endif
constexpr int BM = 128, BK = 64, ROW = BK * 2, OUT_BN = GATED ? BN / 2 : BN;
constexpr int SHARING = ACROSS * ALONG, CLUSTER = SHARING * SPLIT;
static_assert(SPLIT == 1 || SHARING == 1, "a cluster shares loads or splits K");
// Boxes of the weight are 64 columns wide. A tile may use half of the last one.
constexpr int BOXES = (BN + 63) / 64, BOXES_EACH = (BOXES + ACROSS - 1) / ACROSS;
static_assert(BN % 32 == 0 && BN / ACROSS % 8 == 0 && BOXES >= ACROSS, "shares of the weight");
constexpr int GROUPS = ROWS > 64 ? 2 : 1, WARPS = (ROWS + 15) / 16;  // that multiply, and that have rows
constexpr int SPLIT_WARPS = GROUPS * 4 / SPLIT, SPLIT_ROWS = SPLIT_WARPS * 16;
constexpr int PARTIAL = SPLIT_ROWS * BN * 4;  // bytes that one block sends to another, at most
constexpr int SHARERS = ACROSS + ALONG - 1;
constexpr int A_BYTES = ROWS * ROW, B_BYTES = (TRANSPOSED ? BN : BOXES * 64) * ROW;
constexpr int STAGE = A_BYTES + BOXES * 64 * ROW;
constexpr int OUT_BOXES = (OUT_BN + 63) / 64;
// STAGED_BOXES: the boxes of a tile that are staged at once.
#ifndef STAGED_BOXES
#define STAGED_BOXES OUT_BOXES
#endif
constexpr int HIGH = WARPS * 16, STAGED = HIGH * STAGED_BOXES * 128;  // rows and bytes
static_assert(!GATED || (BN % 128 == 0 && ACROSS <= 2), "a box, and a block's share of the weights, is of one weight");

struct Shared {
    uint32_t stages, staged;             // memory
    uint32_t full, empty, ready, taken;  // barriers: full and empty of every stage, and those of `staged`
    uint32_t partials, partial, summed;  // memory of partial sums, and barriers: these have come, may come again
};

__device__ inline Shared shared_memory(void* memory) {
    uint32_t at = (shared_address(memory) + 1023) / 1024 * 1024;
    uint32_t barriers = at + STAGES * STAGE + STAGED;  // an even number of them, so that `partials` is aligned
    return {at,
            at + STAGES * STAGE,
            barriers,
            barriers + STAGES * 8,
            barriers + 2 * STAGES * 8,
            barriers + 2 * STAGES * 8 + 8,
            barriers + (2 * STAGES + 4) * 8,
            barriers + 2 * STAGES * 8 + 16,
            barriers + 2 * STAGES * 8 + 24};
}

// Of this block, the warps whose rows it adds up, if they have any.
__device__ inline int warps_here() {
    int left = WARPS - cluster_rank() * SPLIT_WARPS;
    return left < 0 ? 0 : left < SPLIT_WARPS ? left : SPLIT_WARPS;
}

// Makes the barriers; all of the cluster meet.
__device__ inline void init(const Shared& s) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, GROUPS * SHARERS);
        }
        barrier_init(s.ready, GROUPS * 128);
        barrier_init(s.taken, 1);
        barrier_init(s.partial, 1);
        int others = WARPS - (SPLIT > 1 ? warps_here() : 0);
        barrier_init(s.summed, others > 0 ? others : 1);
        barrier_inits_done();
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
}

// A matrix, or one of a stack (STACKS).
struct Matrix {
    const TensorMap* map;
    int number = 0;
};

template <int SHARERS, bool STACKS>
__device__ inline void load_box(uint32_t to, const Matrix& from, int row, int col, uint32_t barrier, uint16_t mask) {
    if constexpr (STACKS)
        load_share<SHARERS>(to, from.map, from.number, row, col, barrier, mask);
    else
        load_share<SHARERS>(to, from.map, row, col, barrier, mask);
}

// One product of the sum that an accumulator holds: rows `row` and on of x times columns `col` and on of w, over k from
// `first` to before `last`.
struct Term {
    Matrix x, w;
    int row, col, first, last;
    Matrix second{};  // of GATED: the other weight
};

// One thread loads the blocks of a term. A sum of several terms is loaded one term after another, into the same turn.
template <bool STACKS = false>
__device__ inline void produce(const Shared& s, Turn& turn, const Term& term) {
    int me = SHARING > 1 ? cluster_rank() : 0, m = me / ALONG, n = me % ALONG;
    uint16_t row_mask = ((1 << ALONG) - 1) << (m * ALONG), col_mask = 0;
    for (int i = 0; i < ACROSS; ++i) col_mask |= 1 << (i * ALONG + n);
    for (int k = term.first; k < term.last; k += BK) {
        uint32_t a = s.stages + turn.stage * STAGE, b = a + A_BYTES, full = s.full + 8 * turn.stage;
        barrier_wait(s.empty + 8 * turn.stage, turn.parity ^ 1);
        barrier_expect(full, A_BYTES + B_BYTES);
        constexpr int SHARE = ROWS / ALONG;
        load_box<ALONG, STACKS>(a + n * SHARE * ROW, term.x, term.row + n * SHARE, k, full, row_mask);
#if TRANSPOSED && GATED
        constexpr int COLS = OUT_BN;  // a map's box
        for (int i = ACROSS > 1 ? m : 0; i < (ACROSS > 1 ? m + 1 : 2); ++i)
            load_box<ACROSS, STACKS>(b + i * COLS * ROW, i ? term.second : term.w, term.col, k, full, col_mask);
#elif TRANSPOSED
        constexpr int COLS = BN / ACROSS;
        load_box<ACROSS, STACKS>(b + m * COLS * ROW, term.w, term.col + m * COLS, k, full, col_mask);
#elif GATED
        constexpr int COLS = BN / ACROSS;
        for (int c = m * COLS; c < (m + 1) * COLS; c += 64)
            load_box<ACROSS, STACKS>(b + c * ROW, c < OUT_BN ? term.w : term.second, k, term.col + c % OUT_BN, full, col_mask);
#else
        constexpr int COLS = BOXES_EACH * 64;
        for (int c = m * COLS; c < (m + 1) * COLS; c += 64)
            if (BOXES % ACROSS == 0 || c < BOXES * 64)
                load_box<ACROSS, STACKS>(b + c * ROW, term.w, k, term.col + c, full, col_mask);
#endif
        turn.next();
    }
}

// Blocks of K of one term, or of all terms of a sum.
__device__ inline int blocks_of(int k) { return (k + BK - 1) / BK; }

template <int COUNT>
__device__ inline int blocks_of(const int (&k)[COUNT]) {
    int blocks = 0;
    for (int i = 0; i < COUNT; ++i) blocks += blocks_of(k[i]);
    return blocks;
}

// A warpgroup waits for the blocks of all terms and multiplies 64 rows: acc = the sum of A @ B.
__device__ inline void consume(const Shared& s, Turn& turn, float (&acc)[BN / 2], int group, int blocks) {
    int me = SHARING > 1 ? cluster_rank() : 0, m = me / ALONG, n = me % ALONG;
    int thread = threadIdx.x % 128;
    // Thread i frees a stage for the i-th of those who store to it.
    int sharer = thread < ALONG ? m * ALONG + thread : (thread - ALONG) + (thread - ALONG >= m);
    if (thread >= ALONG) sharer = sharer * ALONG + n;
    auto release = [&](int stage) {
        if (thread < SHARERS) {
            if (SHARING > 1)
                barrier_arrive_at(s.empty + 8 * stage, sharer);
            else
                barrier_arrive(s.empty + 8 * stage);
        }
    };
    int before = -1;
    for (int block = 0; block < blocks; ++block) {
        uint32_t a = s.stages + turn.stage * STAGE + group * 64 * ROW, b = s.stages + turn.stage * STAGE + A_BYTES;
        barrier_wait(s.full + 8 * turn.stage, turn.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) {
            uint64_t left = matrix_at(a + i * 32, 16, 1024);
#if TRANSPOSED
            uint64_t right = matrix_at(b + i * 32, 16, 1024);
#else
            uint64_t right = matrix_at(b + i * 16 * ROW, 64 * ROW, 1024);
#endif
            multiply<BN>(acc, left, right, block > 0 || i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(before);
        before = turn.stage;
        turn.next();
    }
    wgmma_wait<0>();
    release(before);
}

// What this block of a cluster multiplies of K, from `first` to before `last`; something of at least SPLIT * BK.
__device__ inline void split(int k, int& first, int& last) {
    int blocks = (k + BK - 1) / BK, me = SPLIT > 1 ? cluster_rank() : 0;
    first = me * blocks / SPLIT * BK;
    last = me == SPLIT - 1 ? k : (me + 1) * blocks / SPLIT * BK;
}

// Whether the rows of this warp are among those that this block adds up.
__device__ inline bool adds_up(int group) {
    return SPLIT == 1 || (group * 4 + threadIdx.x / 32 % 4) / SPLIT_WARPS == cluster_rank();
}

// Each warp sends its 16 rows to the block that adds them up; there, acc becomes the sum over all blocks.
__device__ inline void add_partials(const Shared& s, float (&acc)[BN / 2], int group, int tile) {
    int me = cluster_rank(), warp = group * 4 + threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int owner = warp / SPLIT_WARPS;
    if (warp >= WARPS) return;
    // A slot a block, without that of the owner; there as many float4 a lane as a warp has.
    auto at = [&](int from, int j) {
        int slot = from - (from > owner);
        return s.partials + slot * PARTIAL + ((warp % SPLIT_WARPS * (BN / 8) + j) * 32 + lane) * 16;
    };
    if (owner != me) {
        if (tile > 0) barrier_wait(s.summed, (tile - 1) % 2);
        uint32_t there = shared_of(s.partials, owner) - s.partials, barrier = shared_of(s.partial, owner);
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) store_async(there + at(me, j), acc + 4 * j, barrier);
        return;
    }
    if (warp % SPLIT_WARPS == 0 && lane == 0) barrier_expect(s.partial, (SPLIT - 1) * warps_here() * 64 * BN);
    barrier_wait(s.partial, tile % 2);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        float own[4], total[4] = {};
        for (int i = 0; i < 4; ++i) own[i] = settled(acc[4 * j + i]);
        for (int from = 0; from < SPLIT; ++from) {
            if (from == me) {
                for (int i = 0; i < 4; ++i) total[i] += own[i];
                continue;
            }
            uint4 part = load_shared(at(from, j));
            const uint32_t parts[4] = {part.x, part.y, part.z, part.w};
            for (int i = 0; i < 4; ++i) total[i] += __uint_as_float(parts[i]);
        }
        for (int i = 0; i < 4; ++i) acc[4 * j + i] = total[i];
    }
    __syncwarp();
    if (lane < SPLIT && lane != me) barrier_release_at(s.summed, lane);
}

// Adds entries `first, ...` of a bias [n] to every row.
__device__ inline void add_bias(float (&acc)[BN / 2], const char* bias, int first, int n) {
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        int col = first + j * 8 + threadIdx.x % 4 * 2;
        if (col >= n) continue;
        uint32_t two = *reinterpret_cast<const uint32_t*>(bias + col * 2);
        acc[4 * j] += low_of(two);
        acc[4 * j + 1] += high_of(two);
        acc[4 * j + 2] += low_of(two);
        acc[4 * j + 3] += high_of(two);
    }
}

// Where piece `piece` of 8 values of row `row` lies in a staged tile: blocks of 64 columns one after another, with the swizzle
// of TMA, so that 8 rows lie in different banks.
__device__ inline int staged_at(int row, int piece) {
    return (piece / 8 * HIGH + row) * 128 + (piece % 8 ^ row % 8) * 16;
}

// OVERLAPPING: a staged tile is stored in boxes of 64 columns, and the last box has the last 64 columns of the tile. So the
// first REPEATED columns of the last box are also those of the box before, and are staged in both.
#ifndef OVERLAPPING
#define OVERLAPPING 0
#endif
constexpr int REPEATED = OVERLAPPING ? OUT_BOXES * 64 - OUT_BN : 0;
constexpr int LAST_BOX = (OUT_BOXES - 1) * 64 - REPEATED;  // its first column
static_assert(LAST_BOX >= 0, "a tile has a box");

// A warp rounds its 16 rows to 16 bits, in shared memory.
__device__ inline void stage_rows(const Shared& s, const float (&acc)[BN / 2], int group) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = group * 64 + warp * 16 + lane % 16;
    if (group * 4 + warp >= WARPS) return;
#pragma unroll
    for (int j = 0; j < OUT_BN / 16; ++j) {
        const float* d = acc + j * 8;
        auto put = [&](int piece) {
            store_matrices(s.staged + staged_at(row, piece), pair(d[0], d[1]), pair(d[2], d[3]), pair(d[4], d[5]),
                           pair(d[6], d[7]));
        };
        int piece = j * 2 + lane / 16;
        if (!REPEATED || 16 * j < LAST_BOX + REPEATED) put(piece);
        if (REPEATED && 16 * j >= LAST_BOX) put(piece + REPEATED / 8);
    }
}

// A warpgroup puts its 64 rows where the storing warp takes them from, once the rows before have been taken.
__device__ inline void stage(const Shared& s, const float (&acc)[BN / 2], int group, int& parity) {
    barrier_wait(s.taken, parity ^ 1);
    parity ^= 1;
    stage_rows(s, acc, group);
    fence_proxy_shared();
    barrier_arrive(s.ready);
}
