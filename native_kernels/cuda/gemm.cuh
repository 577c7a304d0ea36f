// The matrix product of a block of 128 x BN, fed by TMA, in clusters that share what they load.
//
// Warpgroup 0 loads (and stores, in another warp), 1 and 2 multiply 64 rows each. Blocks of a cluster are numbered
// m * ALONG + n: those of equal n (ACROSS of them) share the block of the weight, those of equal m that of x. Each
// loads its share of both and sends it to all it shares it with.
#pragma once
#include "wgmma.cuh"

constexpr int BM = 128, BK = 64, ROW = BK * 2;
constexpr int CLUSTER = ACROSS * ALONG;
constexpr int SHARERS = ACROSS + ALONG - 1;
constexpr int A_BYTES = BM * ROW, B_BYTES = BN * ROW, STAGE = A_BYTES + B_BYTES;
constexpr int STAGED = BM * BN * 2;

struct Shared {
    uint32_t stages, staged;             // memory
    uint32_t full, empty, ready, taken;  // barriers: full and empty of every stage, and those of `staged`
    uint32_t more;                       // memory that a kernel uses for something else
};

__device__ inline Shared shared_memory(void* memory) {
    uint32_t at = (shared_address(memory) + 1023) / 1024 * 1024;
    uint32_t barriers = at + STAGES * STAGE + STAGED;  // an even number of them, so that `more` is aligned
    return {at, at + STAGES * STAGE, barriers, barriers + STAGES * 8, barriers + 2 * STAGES * 8,
            barriers + 2 * STAGES * 8 + 8, barriers + (2 * STAGES + 2) * 8};
}

// Makes the barriers; all of the cluster meet.
__device__ inline void init(const Shared& s) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, 2 * SHARERS);
        }
        barrier_init(s.ready, 256);
        barrier_init(s.taken, 1);
        barrier_inits_done();
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
}

struct Turn {
    int stage = 0, parity = 0;
    __device__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// One thread loads rows `row, ...` of x and columns `col, ...` of the weight, in blocks of BK from k = `first` on.
__device__ inline void produce(
    const Shared& s, Turn& turn, const TensorMap* x, const TensorMap* w, int row, int col, int first, int last) {
    int me = CLUSTER > 1 ? cluster_rank() : 0, m = me / ALONG, n = me % ALONG;
    uint16_t row_mask = ((1 << ALONG) - 1) << (m * ALONG), col_mask = 0;
    for (int i = 0; i < ACROSS; ++i) col_mask |= 1 << (i * ALONG + n);
    for (int k = first; k < last; k += BK) {
        uint32_t a = s.stages + turn.stage * STAGE, b = a + A_BYTES, full = s.full + 8 * turn.stage;
        barrier_wait(s.empty + 8 * turn.stage, turn.parity ^ 1);
        barrier_expect(full, STAGE);
        constexpr int ROWS = BM / ALONG, COLS = BN / ACROSS;
        load_share<ALONG>(a + n * ROWS * ROW, x, row + n * ROWS, k, full, row_mask);
#if TRANSPOSED
        load_share<ACROSS>(b + m * COLS * ROW, w, col + m * COLS, k, full, col_mask);
#else
        // Boxes of 64 columns, as wide as the swizzle.
        for (int c = m * COLS; c < (m + 1) * COLS; c += 64)
            load_share<ACROSS>(b + c * ROW, w, k, col + c, full, col_mask);
#endif
        turn.next();
    }
}

// A warpgroup waits for blocks and multiplies 64 rows: acc = A @ B.
__device__ inline void consume(const Shared& s, Turn& turn, float (&acc)[BN / 2], int group, int blocks) {
    int me = CLUSTER > 1 ? cluster_rank() : 0, m = me / ALONG, n = me % ALONG;
    int thread = threadIdx.x % 128;
    // Thread i frees a stage for the i-th of those who store to it.
    int sharer = thread < ALONG ? m * ALONG + thread : (thread - ALONG) + (thread - ALONG >= m);
    if (thread >= ALONG) sharer = sharer * ALONG + n;
    auto release = [&](int stage) {
        if (thread < SHARERS) {
            if (CLUSTER > 1)
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

// Adds entries `first, ...` of a bias [n] to every row.
__device__ inline void add_bias(float (&acc)[BN / 2], const char* bias, int first, int n) {
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        int col = first + j * 8 + threadIdx.x % 4 * 2;
        if (col >= n) continue;
        uint32_t words = *reinterpret_cast<const uint32_t*>(bias + col * 2);
        acc[4 * j] += low_of(words);
        acc[4 * j + 1] += high_of(words);
        acc[4 * j + 2] += low_of(words);
        acc[4 * j + 3] += high_of(words);
    }
}

// Where word `word` (of 8 values) of row `row` lies among `rows` staged rows: 64 columns after another, and swizzled as
// TMA does, so that 8 rows lie in different banks. `first`: which row of shared memory the first one was.
__device__ inline int staged_at(int rows, int row, int word, int first = 0) {
    return (word / 8 * rows + row) * 128 + (word % 8 ^ (first + row) % 8) * 16;
}

// A warpgroup puts its 64 rows, rounded, where the storing warp takes them from, once the rows before have been taken.
__device__ inline void stage(const Shared& s, const float (&acc)[BN / 2], int group, int& parity) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = group * 64 + warp * 16 + lane % 16;
    barrier_wait(s.taken, parity ^ 1);
    parity ^= 1;
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
        const float* d = acc + j * 8;
        store_matrices(s.staged + staged_at(BM, row, j * 2 + lane / 16), pair(d[0], d[1]), pair(d[2], d[3]),
                       pair(d[4], d[5]), pair(d[6], d[7]));
    }
    fence_proxy_shared();
    barrier_arrive(s.ready);
}
