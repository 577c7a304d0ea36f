// all_gather_matmul of at most 8 tokens, in one kernel: parts of x go to all ranks as words that say themselves that they
// have come, while the weight is being loaded already.
//
// A block computes G * 64 columns of Y, over a piece of K, as their transpose: the weight is the left operand of the
// tensor cores, of 64 rows a warpgroup, and x the right one, of 8 columns. One thread loads blocks of the weight by TMA,
// many warps take x out of our memory, and the first block of a tile adds up what the others send it.
//
// Many blocks read a word, so none can put 0 back at once. A rank has memory for x [M, K] in three thirds, and before them
// the number of calls and what each third holds: call number c fills third c % 3, and clears that of the call before.
// Nobody fills that one before call c + 2, which is after all have had our part in c + 1, so after we were through with c.
#include "turn.cuh"
#include "wgmma.cuh"
#include "words.cuh"

constexpr int TOKENS = 8, BK = 64, ROW = BK * 2;
constexpr int W_BYTES = G * 64 * ROW, X_BYTES = TOKENS * ROW, STAGE = W_BYTES + X_BYTES;
constexpr int ACCS = 4;                                     // accumulators of a thread
constexpr int LOADER = G * 128, FIRST_TAKER = LOADER + 32;  // threads before multiply
constexpr int THREADS = FIRST_TAKER + TAKERS;
constexpr int TEAMS = TAKERS / 128;                         // who takes x: each AHEAD blocks of every STAGES
constexpr int AHEAD = STAGES / TEAMS;
constexpr int LINES = TOKENS * BK / 8;                      // of 16 bytes, in a block of x
constexpr int EACH = (AHEAD * LINES + 127) / 128;           // of a thread

struct Params {
    TensorMap w;
    const char* part;
    const char* bias;
    char* out;
    char* kept;       // x [M, K], where somebody needs it
    char* memory[8];  // of every rank: x, three thirds
    char* words;      // our own: partial sums, two halves
    int64_t* state;
    int64_t* calls;  // how many there were, and how many lines each third has
    int64_t* trace;
    int64_t third, half;  // bytes
    int m, n, k, rank, site;
    int chunk, tiles, pieces;
    int out_pitch, programs;
};

struct Shared {
    uint32_t stages, full, empty;
    __device__ uint32_t w(int stage) const { return stages + stage * STAGE; }
    __device__ uint32_t x(int stage) const { return stages + stage * STAGE + W_BYTES; }
};

// Tile and piece of a block, and the blocks of K that it multiplies.
struct Work {
    int tile, piece, first, last;
    __device__ explicit Work(const Params& p, int block) : tile(block % p.tiles), piece(block / p.tiles) {
        int blocks = (p.k + BK - 1) / BK;
        first = piece * blocks / p.pieces;
        last = (piece + 1) * blocks / p.pieces;
    }
};

// All threads but those of the loading warp store our part to all ranks, and clear the `used` lines of the call before.
__device__ void send_part(const Params& p, int block, int64_t call, int64_t used) {
    constexpr int SENDERS = THREADS - 32;
    int sender = threadIdx.x < LOADER ? threadIdx.x : threadIdx.x - 32;
    int lines = p.chunk * (p.k / 8), step = p.programs * SENDERS, begin = block * SENDERS + sender;
    int64_t there = call % 3 * p.third + static_cast<int64_t>(p.rank) * lines * 16;
    for (int i = begin; i < lines; i += step) {
        uint4 v = sendable(load_l2(p.part + static_cast<int64_t>(i) * 16));
        for (int r = 1; r <= W; ++r) put(p.memory[(p.rank + r) % W] + there + static_cast<int64_t>(i) * 16, v);
    }
    char* old = p.memory[p.rank] + (call + 2) % 3 * p.third;
    for (int64_t i = begin; i < used; i += step) store(old + i * 16, {0, 0, 0, 0});
}

__device__ void load_weight(const Params& p, const Shared& s, const Work& work) {
    prefetch(&p.w);
    Turn turn;
    for (int b = work.first; b < work.last; ++b, turn.next()) {
        uint32_t full = s.full + 8 * turn.stage;
        barrier_wait(s.empty + 8 * turn.stage, turn.parity ^ 1);
        barrier_expect(full, W_BYTES);
        for (int g = 0; g < G; ++g) {
            int col = (work.tile * G + g) * 64;
#if TRANSPOSED
            load_share<1>(s.w(turn.stage) + g * 64 * ROW, &p.w, col, b * BK, full, 0);
#else
            load_share<1>(s.w(turn.stage) + g * 64 * ROW, &p.w, b * BK, col, full, 0);
#endif
        }
    }
}

// Where line `line` (8 values of K) of token `token` lies in a block of x, swizzled as TMA would.
__device__ inline int x_at(int token, int line) { return token * ROW + (line ^ token % 8) * 16; }

// Each of TEAMS warpgroups has some of the stages: while one waits for its loads, others do not. In rounds, EACH lines of
// every thread at once. Threads are many, so that all but the loads is decided before.
__device__ void take_x(const Params& p, const Shared& s, const Work& work, int64_t call, int epoch) {
    struct Line {
        int from;    // where the first one is in x, in lines
        uint32_t to;  // and in shared memory
        int block, col, source;
    } lines[EACH];
    int thread = threadIdx.x % 128, row = p.k / 8, team = (threadIdx.x - FIRST_TAKER) / 128;
    const char* mine = p.memory[p.rank] + call % 3 * p.third;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        int i = thread + e * 128, block = work.first + team * AHEAD + i / LINES, token = i / 8 % TOKENS;
        lines[e].block = i < AHEAD * LINES ? block : work.last;
        lines[e].col = token < p.m ? block * 8 + i % 8 : row;  // none where there is no token
        lines[e].from = token * row + block * 8 + i % 8;
        lines[e].to = s.x(team * AHEAD + i / LINES) + x_at(token, i % 8);
        lines[e].source = token / p.chunk;
    }
    uint32_t full = s.full + 8 * team * AHEAD, empty = s.empty + 8 * team * AHEAD;
    for (int done = 0, parity = 1; work.first + team * AHEAD + done < work.last; done += STAGES, parity ^= 1) {
        uint4 seen[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (lines[e].block + done < work.last && lines[e].col + done * 8 < row)
                seen[e] = load_relaxed(mine + static_cast<int64_t>(lines[e].from + done * 8) * 16);
        for (int j = 0; j < AHEAD; ++j) barrier_wait(empty + 8 * j, parity);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const Line& l = lines[e];
            if (l.block + done >= work.last) continue;
            uint4 v = {};
            if (l.col + done * 8 < row) {
                int64_t at = static_cast<int64_t>(l.from + done * 8) * 16;
                int code = p.site * 8 + GATHERING;
                v = flip(arrived(mine + at, seen[e], p.state, code, l.source, l.block + done, epoch));
                if (p.kept && work.tile == 0) store(p.kept + at, v);
            }
            store_shared(l.to, v);
        }
        fence_proxy_shared();
        __syncwarp();
        if (threadIdx.x % 32 < AHEAD) barrier_arrive(full + 8 * (threadIdx.x % 32));
    }
}

__device__ void multiply_blocks(const Shared& s, const Work& work, float (&acc)[ACCS], int group) {
    Turn turn;
    int before = -1;
    for (int b = work.first; b < work.last; ++b) {
        uint32_t w = s.w(turn.stage) + group * 64 * ROW, x = s.x(turn.stage);
        barrier_wait(s.full + 8 * turn.stage, turn.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) {
#if TRANSPOSED
            uint64_t left = matrix_at(w + i * 32, 16, 1024);
#else
            uint64_t left = matrix_at(w + i * 16 * ROW, 64 * ROW, 1024);
#endif
            multiply_weight<TOKENS>(acc, left, matrix_at(x + i * 32, 16, 1024), b > work.first || i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0 && threadIdx.x % 128 == 0) barrier_arrive(s.empty + 8 * before);
        before = turn.stage;
        turn.next();
    }
    wgmma_wait<0>();
}

// Other pieces send their sums; the first one adds them up, in order, and stores rows of Y.
__device__ void finish_tile(const Params& p, const Work& work, float (&acc)[ACCS], int group, int64_t half, int epoch) {
    int thread = threadIdx.x % 128, lane = thread % 32;
    auto slot = [&](int piece) {
        int64_t at = (static_cast<int64_t>(piece - 1) * p.tiles + work.tile) * G + group;
        return p.words + half + (at * 128 + thread) * 16;
    };
    if (work.piece > 0) {
        put_sums(slot(work.piece), acc);
        return;
    }
    float total[ACCS];
#pragma unroll
    for (int i = 0; i < ACCS; ++i) total[i] = settled(acc[i]);
    for (int piece = 1; piece < p.pieces; ++piece) {
        float sums[ACCS];
        take_sums(slot(piece), sums, p.state, p.site * 8 + REDUCING, p.rank, piece, epoch);
        for (int i = 0; i < ACCS; ++i) total[i] += sums[i];
    }
    // Accumulators: columns c, c, c + 8, c + 8 of Y, tokens t, t + 1, t, t + 1.
#pragma unroll
    for (int i = 0; i < ACCS; ++i) {
        int col = (work.tile * G + group) * 64 + thread / 32 * 16 + lane / 4 + i / 2 * 8;
        int token = lane % 4 * 2 + i % 2;
        if (col >= p.n || token >= p.m) continue;
        float value = total[i];
        if (BIASED) value += low_of(reinterpret_cast<const uint16_t*>(p.bias)[col]);
        reinterpret_cast<uint16_t*>(p.out + static_cast<int64_t>(token) * p.out_pitch)[col] = pair(value, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_words(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    uint32_t at = (shared_address(memory) + 1023) / 1024 * 1024;
    Shared s{at, at + STAGES * STAGE, at + STAGES * STAGE + STAGES * 8};
    int block = blockIdx.x, group = threadIdx.x / 128, epoch = static_cast<int>(p.state[3]) + 1;
    int64_t call = p.calls[0], used = p.calls[1 + (call + 2) % 3], half = epoch % 2 * p.half;
    Work work(p, block);
    bool works = work.piece < p.pieces;
    // Rows of events: of the first warpgroup that multiplies, and of the thread that loads.
    bool loads = threadIdx.x == LOADER, traces = threadIdx.x == 0 || loads;
    Trace trace{p.trace + (loads * p.programs + block) * 2 * EVENTS};
    if (traces) trace.stamp(BEGUN, p.rank, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(s.full + 8 * i, 1 + 128 / 32);
            barrier_init(s.empty + 8 * i, G);
        }
        barrier_inits_done();
    }
    __syncthreads();
    if (works && loads) load_weight(p, s, work);
    __syncwarp();
    if (threadIdx.x / 32 != LOADER / 32) send_part(p, block, call, used);
    if (works && threadIdx.x >= FIRST_TAKER) take_x(p, s, work, call, epoch);
    if (works && group < G) {
        float acc[ACCS];
        multiply_blocks(s, work, acc, group);
        if (traces) trace.stamp(COMPUTED, -1, block);
        finish_tile(p, work, acc, group, half, epoch);
    }
    // The last program to know the number of the call ends it.
    if (loads && count(p.state + 6) == p.programs - 1) {
        p.calls[0] = call + 1;
        p.calls[1 + call % 3] = static_cast<int64_t>(p.m) * (p.k / 8);
        finish(p.state, epoch);
    }
    if (traces) trace.stamp(ENDED, p.rank, 0);
}
