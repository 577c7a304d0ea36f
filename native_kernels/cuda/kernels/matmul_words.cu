// matmul_all_reduce and matmul_reduce_scatter of at most 128 rows, in one kernel over gemm.cuh. Each rank sends rows of its
// product to their owners as flag-in-payload words (words.cuh). The owner adds the rows up and, of an all_reduce, sends the
// sums in the same way.
//
// Each half of a rank's words holds parts [W, height, n] by source and, of an all_reduce, sums [W, height, n] by owner; owner r
// has the rows from r * height on. ONCE: each rank sends its whole product to all ranks, and every rank adds up all rows.
//
// A share is what a cluster does: the columns it multiplies, and the same columns of the sums. Blocks that have multiplied while
// others have not started, or while a peer is missing and they are of the margin, end and leave their sums to those that stay.
#include "gemm.cuh"
#include "progress.cuh"
#include "words.cuh"

struct Params {
    TensorMap x, w;
    char* out;
    char* words[8];  // of every rank
    int64_t* state;
    int64_t* trace;
    int64_t half;  // bytes
    int m, n, k, rank, site;
    int height, cols;         // rows of an owner (ONCE: all); tiles
    int out_pitch, programs;  // bytes of a row of the output
};
CHECK_PARAMS

constexpr int THREADS = 384, DECIDER = 64, MOST_ROUNDS = 144;

struct Progress {
    int idle;                 // 1: this block has multiplied
    int going;                // 1: this cluster adds up its share; 2: others do
    int shares[MOST_ROUNDS];  // 1: no more; 2 + the share that comes next
};

__device__ inline Progress& progress() {
    __shared__ Progress found;
    return found;
}

// One thread of a cluster decides what the cluster adds up, while others multiply.
struct Decider {
    const Params& p;
    const Call& call;
    int share, clusters;
    bool decided = false, ended = false;
    int seen = 0;       // shares that were claimed when this cluster began to add up
    int64_t begun = 0;  // when there was nothing left but to wait
    __device__ Decider(const Params& p, const Call& call)
        : p(p), call(call), share(blockIdx.x / CLUSTER), clusters(p.programs / CLUSTER) {}
    __device__ void tell(const int& word, int v) const {
        for (int r = 0; r < CLUSTER; ++r) poke_at(word, r, v);
    }
    // All blocks have started once the epoch has ended. The first to claim stays whoever is missing, so that somebody does.
    __device__ void look() {
        bool all = load_relaxed(p.state + STATE_EPOCH) >= call.epoch;
        bool firm = share < static_cast<int>(p.state[STATE_FIRM]) / CLUSTER;
        bool stays = all && (firm || present(p.state, p.rank, call.epoch));
        if (!stays) {
            if (!peek(progress().idle)) return;
            if (!begun) begun = nanoseconds();
            if (nanoseconds() - begun < (all ? YIELD_NS : START_NS)) return;
            stays = all && held(call) == 0;
        }
        bool going = stays && claim_stamped(call, share);
        tell(progress().going, going ? 1 : 2);
        decided = true;
        if (!going) end(0);
    }
    __device__ void end(int round) {
        tell(progress().shares[round], 1);
        ended = true;
    }
    // After a share has been added up: takes one that nobody has.
    __device__ void next(int round) {
        if (ended) return;
        for (int other = 0; other < clusters && seen < clusters; ++other, seen = held(call))
            if (load_relaxed(claims(p.state, STAMPED) + other) != stamp_of(call) && claim_stamped(call, other)) {
                tell(progress().shares[round], other + 2);
                return;
            }
        end(round);
    }
};

__device__ void load_tiles(const Params& p, const Shared& s, int block) {
    prefetch(&p.x);
    prefetch(&p.w);
    Turn turn;
    int first, last;
    split(p.k, first, last);
    for (int t = block / CLUSTER; t < p.cols; t += p.programs / CLUSTER)
        produce(s, turn, {{&p.x}, {&p.w}, 0, t * BN, first, last});
}

// A warp sends its 16 rows of a tile, once they are staged, to their owners.
__device__ void send_rows(const Params& p, const Shared& s, int col, int group, int64_t half) {
    constexpr int WIDE = BN / 8;  // words of 16 bytes in a row
    int first = group * 64 + threadIdx.x / 32 % 4 * 16, line = p.n / 8;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < 16 * WIDE; i += 32) {
        int row = first + i / WIDE, word = i % WIDE, owner = row / p.height;
        if (row >= p.m || col + word * 8 >= p.n) continue;
        int64_t at = half + (static_cast<int64_t>(p.rank * p.height + row % p.height) * line + col / 8 + word) * 16;
        uint4 value = sendable(load_shared(s.staged + staged_at(row, word)));
        if (!ONCE) put(p.words[owner] + at, value);
        for (int r = 1; ONCE && r <= W; ++r) put(p.words[(p.rank + r) % W] + at, value);
    }
}

// Calls `line(row, j)` for each piece of 16 bytes, number j, of `rows` rows of an owner, in the columns that this block's
// cluster has multiplied. Blocks of the same number on the peers send these pieces at about the same time.
template <class Line>
__device__ inline void each_line(const Params& p, int share, int rows, Line line) {
    constexpr int WIDE = BN / 8;
    int me = SPLIT > 1 ? cluster_rank() : 0;
    for (int t = share; t < p.cols; t += p.programs / CLUSTER)
        for (int i = me * THREADS + threadIdx.x; i < rows * WIDE; i += SPLIT * THREADS) {
            int word = t * WIDE + i % WIDE;
            if (word < p.n / 8) line(i / WIDE, i / WIDE * (p.n / 8) + word);
        }
}

// Adds up the rows of this rank.
__device__ void reduce_rows(const Params& p, const Call& call, int share, int64_t half) {
    int line = p.n / 8, begin = ONCE ? 0 : p.rank * p.height;
    int rows = p.m - begin < p.height ? p.m - begin : p.height;  // may be 0 or less
    int64_t part = static_cast<int64_t>(p.height) * line;
    char* mine = p.words[p.rank] + half;
    each_line(p, share, rows, [&](int row, int j) {
        uint4 words[W] = {};
        auto place = [&](int r) { return mine + (r * part + j) * 16; };
        auto all = [](int) { return true; };
        take_all(words, all, place, call, WAIT_REDUCING, [](int r) { return r; }, j);
        for (uint4& v : words) v = flip(v);
        uint4 value = sum(words);
        if (ALL && !ONCE) {
            value = sendable(value);
            for (int r = 1; r < W; ++r)
                put(p.words[(p.rank + r) % W] + half + ((W + p.rank) * part + j) * 16, value);
        }
        store(p.out + static_cast<int64_t>(row + (ALL ? begin : 0)) * p.out_pitch + j % line * 16, value);
    });
}

// Copies the sums that the other owners send.
__device__ void copy_rows(const Params& p, const Call& call, int share, int64_t half) {
    int line = p.n / 8;
    int64_t part = static_cast<int64_t>(p.height) * line;
    char* mine = p.words[p.rank] + half;
    each_line(p, share, p.height, [&](int low, int j) {
        uint4 words[W] = {};
        auto source = [&](int r) { return (p.rank + r) % W; };
        auto row = [&](int r) { return source(r) * p.height + low; };
        auto wanted = [&](int r) { return r > 0 && row(r) < p.m; };
        auto place = [&](int r) { return mine + ((W + source(r)) * part + j) * 16; };
        take_all(words, wanted, place, call, WAIT_COPYING, source, j);
#pragma unroll
        for (int r = 1; r < W; ++r)
            if (wanted(r)) store(p.out + static_cast<int64_t>(row(r)) * p.out_pitch + j % line * 16, flip(words[r]));
    });
}

extern "C" __global__ void __launch_bounds__(384, 1) matmul_words(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, first, last;
    split(p.k, first, last);
    int blocks = blocks_of(last - first);
    Call call{p.state, p.site, epoch_of(p.state)};
    int64_t half = half_of(call.epoch) * p.half;
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    if (threadIdx.x % 128 == 0) trace.stamp(EVENT_BEGUN, p.rank, 0);
    for (int i = threadIdx.x; i < sizeof(Progress) / 4; i += THREADS) poke((&progress().idle)[i], 0);
    Decider decider(p, call);
    bool decides = threadIdx.x == DECIDER && (CLUSTER == 1 || cluster_rank() == 0);
    init(s);
    if (threadIdx.x == 0) load_tiles(p, s, block);
    // Words need no counters, so the last program that has read the epoch ends the call.
    if (threadIdx.x == 32) {
        int64_t before = count(p.state + STATE_THROUGH);
        if (before == p.programs - 1) finish(call, held_word(call.epoch));
        if (before == 0) tell_presence(p.state, p.rank, call.epoch);
    }
    while (decides && !decider.decided) decider.look();
    if (group > 0 && group <= GROUPS) {
        Turn turn;
        int done = 0;
        for (int t = block / CLUSTER; t < p.cols; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            if (SPLIT > 1) add_partials(s, acc, group - 1, done++);
            if (!adds_up(group - 1)) continue;
            stage_rows(s, acc, group - 1);
            __syncwarp();
            send_rows(p, s, t * BN, group - 1, half);
            __syncwarp();
            if (threadIdx.x % 128 == 0) trace.stamp(EVENT_COMPUTED, -1, t);
        }
    }
    if (threadIdx.x == 128) poke(progress().idle, 1);
    __syncwarp();
    __syncthreads();
    // All sums are computed before one of a peer is waited for: the peer may wait for any of ours.
    int own = block / CLUSTER, rounds = 0;  // shares that this block adds up
    if (decides && !decider.ended) decider.seen = held(call);  // on its way while parts are added up
    if (await(progress().going) == 1)
        for (int share = own; share >= 0; share = await(progress().shares[rounds++]) - 2) {
            reduce_rows(p, call, share, half);
            if (decides) decider.next(rounds);
        }
    for (int i = 0; ALL && !ONCE && i < rounds; ++i)
        copy_rows(p, call, i ? peek(progress().shares[i - 1]) - 2 : own, half);
    if (threadIdx.x % 128 == 0) {
        trace.stamp(EVENT_REDUCED, p.rank, 0);
        trace.stamp(EVENT_ENDED, p.rank, 0);
    }
    if (CLUSTER > 1) cluster_sync();
}
