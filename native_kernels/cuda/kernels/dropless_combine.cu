// expert_matmul_all_to_all of experts with any number of rows: as expert_combine.cu, but for how tiles are found and
// rows are stored. How many rows an expert has, and where each of them goes, only the device knows.
//
// A row goes to the place that `positions` says in a send buffer, whose parts go to the ranks. Each rank tells the
// others where in its inbox, [rows of all parts, N], theirs begins; rows are stored there one by one, and counted in
// slices of SLICE rows of a part. Of the words for these, starts [8] and counters [W, slots], a rank has two halves.
#include "comm.cuh"
#include "gemm.cuh"
#include "ragged.cuh"

struct Params {
    TensorMap x[TERMS], w[TERMS];  // stacks of one; a matrix an expert
    char* out;
    const char* bias;
    const int* offsets;        // [EXPERTS], where rows of experts end; absent if all have as many
    const int64_t* positions;  // [rows]; absent if rows are where they go
    char* inbox[8];            // of every rank
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t inbox_half;    // bytes
    int64_t signals_half;  // counters
    int sent[9], received[9];  // where parts begin in the send buffer, and in the output
    int rows, n, k[TERMS], rank, site, slots, cols, programs;
};

constexpr int COMBINING = 6, TELLING = 0;
constexpr int SLICE = 128, PIECES = 8, STARTS = 8;
constexpr int WIDE = BN / 8;

__device__ void load_tiles(const Params& p, const Shared& s, const Ragged& r, int block, int tiles) {
    for (int i = 0; i < TERMS; ++i) prefetch(&p.x[i]), prefetch(&p.w[i]);
    Turn turn;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = ragged_tile(r, t, p.cols);
        int expert = tile.owner < EXPERTS ? tile.owner : EXPERTS - 1;
        for (int i = 0; i < TERMS; ++i)
            produce<true>(s, turn, {&p.x[i]}, {&p.w[i], expert}, tile.row, tile.col * BN, 0, p.k[i]);
    }
}

// A warp stores the rows of tiles to the ranks that they are for, and counts them there.
__device__ void send_rows(
    const Params& p, const Shared& s, const Ragged& r, int block, int tiles, int64_t parity, int epoch) {
    constexpr int AT_ONCE = 32 / WIDE;  // rows
    int lane = threadIdx.x % 32, turn = 0, start = 0;       // lane i: where our part begins in the inbox of rank i
    const int* starts = p.signals[p.rank] + parity * p.signals_half;
    if (block == 0 && lane < W && lane != p.rank)
        add_release(p.signals[lane] + parity * p.signals_half + p.rank, p.received[lane] + 1);
    if (block / CLUSTER < tiles && lane < W && lane != p.rank) {
        wait(starts + lane, 1, p.state, p.site * 8 + TELLING, lane, 0, epoch);
        start = load_acquire(starts + lane);
    }
    __syncwarp();
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = ragged_tile(r, t, p.cols);
        int rows = r.starts[tile.owner + 1] - tile.row, word = lane % WIDE, col = tile.col * BN + word * 8;
        barrier_wait(s.ready, turn);
        turn ^= 1;
        int* counted[ROWS / 32];
#pragma unroll
        for (int c = 0; c < ROWS / 32; ++c) {  // lane i: of row i
            int row = c * 32 + lane;
            bool is_row = row < rows && tile.col < p.cols;
            int64_t at = !is_row ? 0 : p.positions ? p.positions[tile.row + row] : tile.row + row, to = 0;
            is_row = is_row && at >= 0 && at < p.sent[W];
            counted[c] = nullptr;
            int owner = 0;
            for (int rank = 1; rank < W; ++rank) owner += at >= p.sent[rank];
            at -= p.sent[owner];
            int begin = __shfl_sync(~0u, start, owner);
            if (is_row && owner == p.rank) {
                to = reinterpret_cast<int64_t>(p.out) + (p.received[owner] + at) * p.n * 2;
            } else if (is_row && begin > 0) {
                to = reinterpret_cast<int64_t>(p.inbox[owner]) + parity * p.inbox_half +
                     (begin - 1 + at) * p.n * 2;
                counted[c] = p.signals[owner] + parity * p.signals_half + STARTS + p.rank * p.slots + at / SLICE;
            }
            for (int i = 0; i < 32 && c * 32 + i < rows; i += 4 * AT_ONCE) {
                uint4 words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = load_shared(s.staged + staged_at(c * 32 + i + j * AT_ONCE + lane / WIDE, word));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    int64_t there = __shfl_sync(~0u, to, i + j * AT_ONCE + lane / WIDE);
                    if (there && col < p.n) store(reinterpret_cast<char*>(there) + col * 2, words[j]);
                }
            }
        }
        named_barrier(4, 32);
        if (lane == 0) barrier_arrive(s.taken);
        fence_sys();
#pragma unroll
        for (int c = 0; c < ROWS / 32; ++c) count_rows(counted[c]);
    }
    named_arrive(5, 352);  // the words that we have read may be set back to 0
}

// A team of threads copies what arrives for us, in pieces of slices; who is free takes the next.
template <int TEAM>
__device__ void copy_parts(const Params& p, int block, int team, int64_t parity, int epoch, Trace trace) {
    constexpr int AHEAD = 8;
    __shared__ int tickets_of[3];
    int thread = TEAM == 64 ? threadIdx.x - 64 : threadIdx.x % 128, bar = 1 + team;
    int* words = p.signals[p.rank] + parity * p.signals_half;
    int slices = 0;
    for (int source = 0; source < W; ++source) {
        int here = (p.received[source + 1] - p.received[source] + SLICE - 1) / SLICE;
        slices = source != p.rank && here > slices ? here : slices;
    }
    int tickets = slices * (W - 1) * PIECES;
    // Who is there may wait for one that is lost, which is to be named.
    for (int r = 1; r < W && tickets && thread == 0; ++r) {
        int source = (p.rank + r) % W;
        wait(words + source, 1, p.state, p.site * 8 + TELLING, source, 0, epoch);
    }
    auto* next = reinterpret_cast<unsigned long long*>(p.state + 5);
    int ticket = block, following = 0;  // the first are given away beforehand
    if (team) {
        if (thread == 0) tickets_of[team] = p.programs + atomicAdd(next, 1ull);
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
    }
    while (ticket < tickets) {
        // All ranks go from expert to expert, and so do rows of parts as they are mostly sorted.
        int source = (p.rank + W - 1 - ticket / PIECES % (W - 1)) % W, slice = ticket / PIECES / (W - 1);
        int first = p.received[source] + slice * SLICE, left = p.received[source + 1] - first;
        int rows = left < SLICE ? left : SLICE, low = ticket % PIECES * (SLICE / PIECES);
        int high = low + SLICE / PIECES < rows ? low + SLICE / PIECES : rows;
        if (low < high && thread == 0)
            wait(words + STARTS + source * p.slots + slice, rows * p.cols, p.state, p.site * 8 + COMBINING, source, slice,
                 epoch);
        named_barrier(bar, TEAM);
        if (thread == 0) {
            following = p.programs + atomicAdd(next, 1ull);
            trace.stamp(WAITED, source, slice);
        }
        int64_t begin = static_cast<int64_t>(first + low) * p.n * 2;
        const char* from = p.inbox[p.rank] + parity * p.inbox_half + begin;
        int count = low < high ? (high - low) * (p.n / 8) : 0;
        for (int i = thread; i < count; i += AHEAD * TEAM) {
            uint4 moved[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
                if (i + a * TEAM < count) moved[a] = load_l2(from + (i + a * TEAM) * 16);
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
                if (i + a * TEAM < count) store(p.out + begin + (i + a * TEAM) * 16, moved[a]);
        }
        if (thread == 0) {
            tickets_of[team] = following;
            trace.stamp(COPIED, source, slice);
        }
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
    }
    // The last program has heard of all others, sets all words back to 0, and ends the epoch.
    if (team) {
        named_arrive(5, 352);
    } else {
        named_barrier(5, 352);
        if (thread == 0) tickets_of[0] = count(p.state + 6) == p.programs - 1;
        named_barrier(bar, TEAM);
        if (tickets_of[0]) {
            if (thread < W && thread != p.rank)
                wait(words + thread, 1, p.state, p.site * 8 + TELLING, thread, 0, epoch);
            named_barrier(bar, TEAM);
            if (thread < STARTS) words[thread] = 0;
            for (int i = thread; i < W * slices; i += TEAM) words[STARTS + i / slices * p.slots + i % slices] = 0;
            if (thread == 0) finish(p.state, epoch);
        }
    }
    if (thread == 0) trace.stamp(ENDED, p.rank, 0);
}

extern "C" __global__ void __launch_bounds__(384, 1) dropless_combine(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    __shared__ Ragged r;
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = blocks_of(p.k);
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = epoch % 2;
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    // Of the first group, the team that copies.
    if (threadIdx.x % 128 == (group ? 0 : 64)) trace.stamp(BEGUN, p.rank, 0);
    read_offsets(r, p.offsets, p.rows);
    init(s);
    int tiles = r.highs[ALL] * ((p.cols + ALONG - 1) / ALONG);
    if (group == 0) {
        give_registers<88>();
        if (threadIdx.x == 0)
            load_tiles(p, s, r, block, tiles);
        else if (threadIdx.x >= 32 && threadIdx.x < 64)
            send_rows(p, s, r, block, tiles, parity, epoch);
        else if (threadIdx.x >= 64)
            copy_parts<64>(p, block, 0, parity, epoch, trace);
    } else {
        take_registers<208>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; group <= GROUPS && t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            Tile tile = ragged_tile(r, t, p.cols);
            if (BIASED && tile.owner < EXPERTS)
                add_bias(acc, p.bias + static_cast<int64_t>(tile.owner) * p.n * 2, tile.col * BN, p.n);
#pragma unroll
            for (int i = 0; i < BN / 2; ++i)
                if (tile.owner == EXPERTS) acc[i] = 0;
            stage(s, acc, group - 1, taken);
            if (threadIdx.x % 128 == 0) trace.stamp(COMPUTED, -1, t * CLUSTER);
        }
        copy_parts<128>(p, block, group, parity, epoch, trace);
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_sync();
}
