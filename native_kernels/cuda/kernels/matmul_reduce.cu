// matmul_all_reduce and matmul_reduce_scatter, as native_kernels/triton/matmul_reduce.py, in one persistent kernel
// whose warps specialise: one loads, two groups of four multiply, one stores tiles to their owners and signals, and
// two add up what has arrived and send the sums, beside the tensor cores; the groups join them when they are through.
//
// Of an inbox [W, rows * cols, BM * BN] (a tile as it was staged), the words of sums [W, rows * cols, PARTS, PART,
// BN] (all_reduce), and the counters arrived [W, rows * cols], a rank has two halves each.
//
// ENGINES: tiles for a peer go to an outbox [W, rows * cols, BM * BN] of ours. Those of a chunk lie there in the
// order in which they are computed; a copy engine takes `slice` of them at a time to the inbox, and sets a counter of
// the slice there. It knows no epoch: the inbox has one half, and peers may store again when they have credit.
// UPDATE: the inbox is [rows * cols, BM * BN], of memory of words: 0 between calls; tiles of all ranks are added there.
#include "gemm.cuh"
#include "order.cuh"
#include "words.cuh"

struct Params {
    TensorMap x, w;
    char* out;
    char* inbox[8];     // of every rank
    char* words[8];
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t inbox_half, words_half;  // bytes
    int64_t signals_half;            // counters
    int m, n, k, rank, site;
    int chunk_rows, stretch, rows, cols;  // rows of a chunk and stretch; tiles of a stretch, and of a chunk
    int out_pitch, visit, lag, programs;  // bytes of a row of the output
    // ENGINES:
    char* outbox;
    int* copied[8];  // of every rank: the counters [W, slices] that copy engines set
    int* stored;     // [W, slices] counters of tiles in the outbox, and as many words that start copies
    int slice, slices, credit;  // credit: where, behind `copied`, peers are told that they may store again
};

constexpr int PARTS = BM / PART;  // of a tile
constexpr int TILE_BYTES = BM * BN * 2, PART_BYTES = PART * BN * 2;

// The row of the output, of all ranks, that row `row` of the chunk of `owner` is; -1 if it is none.
__device__ inline int row_at(const Params& p, int owner, int row) {
    int high = row / (p.stretch * BM), low = row % (p.stretch * BM);
    int at = (high * W + owner) * p.chunk_rows + low;
    return low < p.chunk_rows && at < p.m ? at : -1;
}

constexpr int TERMS = UPDATE ? 1 : W;  // of what arrives of a tile

__device__ inline Tile tile_of(const Params& p, int t) {
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    return tile_at(t, me / ALONG, me % ALONG, p.rank, W, p.rows, p.cols, p.visit, ACROSS, ALONG, ORDER);
}

__device__ void load_tiles(const Params& p, const Shared& s, int block, int tiles) {
    prefetch(&p.x);
    prefetch(&p.w);
    Turn turn;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        int row = (tile.row / p.stretch * W + tile.owner) * p.chunk_rows + tile.row % p.stretch * BM;
        produce(s, turn, {&p.x}, {&p.w}, row, tile.col * BN, 0, p.k);
    }
}

// One more tile of a slice lies in the outbox; after the last one a copy engine may take them.
__device__ inline void give_to_engine(const Params& p, int owner, int number) {
    int s = number / p.slice, left = p.rows * p.cols - s * p.slice;
    int* stored = p.stored + owner * p.slices + s;
    if (count_stored(stored) != (left < p.slice ? left : p.slice) - 1) return;
    *stored = 0;
    fence_sys();
    add_relaxed(stored + W * p.slices);
}

__device__ void store_tiles(const Params& p, const Shared& s, int block, int tiles, int64_t parity) {
    int turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        int number = (p.rank * p.rows + tile.row) * p.cols + tile.col;
        bool away = ENGINES && tile.owner != p.rank;
        if (ENGINES) number = tile.owner * p.rows * p.cols + chunk_number_of(tile.row, tile.col, p.rows, p.cols);
        int64_t to = parity * p.inbox_half + static_cast<int64_t>(number) * TILE_BYTES;
        if (UPDATE) to -= static_cast<int64_t>(p.rank) * p.rows * p.cols * TILE_BYTES;
        bool is_tile = tile.col < p.cols;
        barrier_wait(s.ready, turn);
        turn ^= 1;
        char* there = (away ? p.outbox : p.inbox[tile.owner]) + to;
        if (is_tile && UPDATE)
            add_bulk(there, s.staged, TILE_BYTES);
        else if (is_tile)
            store_bulk(there, s.staged, TILE_BYTES);
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(s.taken);
        bulk_wait();
        fence_proxy();
        if (!is_tile) continue;
        if (away) {
            give_to_engine(p, tile.owner, number - tile.owner * p.rows * p.cols);
            continue;
        }
        fence_sys();
        add_relaxed(p.signals[tile.owner] + parity * p.signals_half + number);
    }
}

// A team of threads adds parts of our own chunk up and sends the sums, and copies those that peers send. Parts come in
// the order in which they are complete; who is free takes the next.
template <int TEAM>
__device__ void reduce_parts(const Params& p, const Shared& s, int block, int team, int64_t parity, int epoch, Trace trace) {
    constexpr int KINDS = ALL ? 2 : 1, WIDE = BN / 8;  // words of 16 bytes in a row
    __shared__ int tickets_of[3];
    int thread = TEAM == 64 ? threadIdx.x - 64 : threadIdx.x % 128, bar = 1 + team;
    int tiles = p.rows * p.cols, parts = tiles * PARTS;
    int* arrived = p.signals[p.rank] + parity * p.signals_half;
    char* inbox = p.inbox[p.rank] + parity * p.inbox_half;
    bool mixed = p.lag < parts;
    int tickets = (mixed ? parts + p.lag : parts) * KINDS;
    auto* next = reinterpret_cast<unsigned long long*>(p.state + 5);
    int ticket = block, following = 0;  // the first are given away beforehand
    if (team) {
        if (thread == 0) tickets_of[team] = p.programs + atomicAdd(next, 1ull);
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
    }
    while (ticket < tickets) {
        // Number i of our own parts, or number i - lag of all peers'; of few, all of our own first.
        bool copying = ALL && (mixed ? ticket % 2 : ticket >= parts);
        int i = mixed ? ticket / KINDS - (copying ? p.lag : 0) : ticket - (copying ? parts : 0);
        bool is_part = i >= 0 && i < parts;
        int number = is_part ? i / PARTS : 0;
        Tile at = chunk_tile_at(number, p.rows, p.cols);
        int tile = ENGINES ? number : at.row * p.cols + at.col, part = is_part ? tile * PARTS + i % PARTS : 0;
        if (is_part && !copying) {
            if (thread < W) {
                const int* from = arrived + thread * tiles + tile;
                if (ENGINES && thread != p.rank) from = p.copied[p.rank] + thread * p.slices + tile / p.slice;
                wait(from, 1, p.state, p.site * 8 + REDUCING, thread, tile, epoch);
            }
        }
        named_barrier(bar, TEAM);
        if (thread == 0) {
            following = p.programs + atomicAdd(next, 1ull);
            trace.stamp(WAITED, -1, part);
        }
        // Where the sums of a part by rank `owner` lie.
        auto sums = [&](int owner) {
            return parity * p.words_half + (static_cast<int64_t>(owner) * parts + part) * PART_BYTES;
        };
        // Word j of the part: its row in the tile, and where it goes in the output, if it does.
        auto place = [&](int source, int j, int& row) {
            row = i % PARTS * PART + j / WIDE;
            int in_chunk = at.row * BM + row, col = at.col * BN + j % WIDE * 8;
            int to = row_at(p, source, in_chunk);
            if (to < 0 || col >= p.n) return static_cast<char*>(nullptr);
            if (!ALL) to = in_chunk / (p.stretch * BM) * p.chunk_rows + in_chunk % (p.stretch * BM);
            return p.out + static_cast<int64_t>(to) * p.out_pitch + col * 2;
        };
        if (is_part && !copying) {
#pragma unroll 2
            for (int j = thread; j < PART * WIDE; j += TEAM) {
                int row;
                char* to = place(p.rank, j, row);
                if (!to && !UPDATE) continue;
                char* from = inbox + static_cast<int64_t>(tile) * TILE_BYTES + staged_at(row, j % WIDE);
                uint4 words[TERMS];
#pragma unroll
                for (int r = 0; r < TERMS; ++r) words[r] = load_l2(from + static_cast<int64_t>(r) * tiles * TILE_BYTES);
                if (UPDATE) store(from, {});
                if (UPDATE && !to) continue;
                uint4 value = sum(words);
                if (ALL) {
                    value = sendable(value);
                    for (int r = 1; r < W; ++r) put(p.words[(p.rank + r) % W] + sums(p.rank) + j * 16, value);
                }
                store(to, value);
            }
        } else if (is_part) {
            // Of all peers at once, so that their latencies overlap.
            auto from = [&](int r, int j) { return p.words[p.rank] + sums((p.rank + r) % W) + j * 16; };
            for (int j = thread; j < PART * WIDE; j += TEAM) {
                uint4 words[W] = {};
                char* to[W];
                int row;
#pragma unroll
                for (int r = 0; r < W; ++r) to[r] = r ? place((p.rank + r) % W, j, row) : nullptr;
                auto wanted = [&](int r) { return to[r] != nullptr; };
                auto place_of = [&](int r) { return from(r, j); };
                auto source = [&](int r) { return (p.rank + r) % W; };
                take_all(words, wanted, place_of, p.state, p.site * 8 + COPYING, source, part, epoch);
#pragma unroll
                for (int r = 1; r < W; ++r)
                    if (to[r]) store(to[r], flip(words[r]));
            }
        }
        if (thread == 0) {
            tickets_of[team] = following;
            trace.stamp(copying ? COPIED : REDUCED, copying ? -1 : p.rank, part);
        }
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
    }
    // The last program sets the counters that several have waited for back to 0, and ends the epoch.
    if (team) {
        named_arrive(4, 320);
    } else {
        named_barrier(4, 320);
        if (thread == 0) tickets_of[0] = count(p.state + 6) == p.programs - 1;
        named_barrier(bar, TEAM);
        if (tickets_of[0]) {
            for (int i = thread; i < W * tiles; i += TEAM) arrived[i] = 0;
            if (ENGINES) {
                for (int i = thread; i < W * p.slices; i += TEAM) p.copied[p.rank][i] = 0;
                named_barrier(bar, TEAM);
                if (thread < W && thread != p.rank) add_release(p.copied[thread] + p.credit + p.rank);
                if (given_up(p.state)) {
                    for (int i = thread; i < W * p.slices; i += TEAM) p.stored[W * p.slices + i] = 1;
                    if (thread < W) p.copied[p.rank][p.credit + thread] = 1;
                }
            }
            if (thread == 0) finish(p.state, epoch);
        }
    }
    if (thread == 0) trace.stamp(ENDED, p.rank, 0);
}

extern "C" __global__ void __launch_bounds__(384, 1) matmul_reduce(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = (p.k + BK - 1) / BK;
    int tiles = W / ACROSS * p.rows * ((p.cols + ALONG - 1) / ALONG);
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = epoch % 2;
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    // Of the first group, the team that reduces.
    if (threadIdx.x % 128 == (group ? 0 : 64)) trace.stamp(BEGUN, p.rank, 0);
    init(s);
    if (group == 0) {
        give_registers<88>();
        if (threadIdx.x == 0)
            load_tiles(p, s, block, tiles);
        else if (threadIdx.x == 32)
            store_tiles(p, s, block, tiles, parity);
        else if (threadIdx.x >= 64)
            reduce_parts<64>(p, s, block, 0, parity, epoch, trace);
    } else {
        take_registers<208>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            stage(s, acc, group - 1, taken);
            if (threadIdx.x % 128 == 0) trace.stamp(COMPUTED, -1, t * CLUSTER);
        }
        reduce_parts<128>(p, s, block, group, parity, epoch, trace);
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_sync();
}
