// matmul_all_reduce and matmul_reduce_scatter, as native_kernels/triton/matmul_reduce.py, in one persistent kernel over
// frame.cuh. The storer sends tiles of partial sums to their owners. Teams add up what has arrived for this rank and send the
// sums to all ranks (all_reduce), beside the tensor cores.
//
// A rank has two halves each of an inbox [W, rows * cols, BM * BN], of tiles as they are staged; of sums with flags in the
// payload [W, rows * cols, PARTS, PART, BN] (all_reduce); and of counters [W, rows * cols] of tiles that have arrived.
//
// ENGINES: tiles for a peer go to a local outbox [W, rows * cols, BM * BN]. The tiles of a chunk lie there in the order in
// which they are computed. A copy engine moves `slice` of them at a time to the inbox of the peer and raises a flag of the
// slice there. Copy engines do not know the epoch: the inbox has one half, and a peer stores again once it has credit.
// A tile is a sum of TERMS products, each with a K of its own; it is rounded once.
//
// UPDATE: the inbox is [rows * cols, BM * BN] and 0 between calls; tiles of all ranks are added to it as they come.
#include "dependent.cuh"
#include "frame.cuh"
#include "stages.cuh"
#include "words.cuh"

struct Params {
    TensorMap x[TERMS], w[TERMS];
    char* out;
    const char* bias;   // BIASED: [n], which this rank adds to its product
    const char* added;  // ADDED: as `out`, which is added to the sums
    char* inbox[8];     // of every rank
    char* words[8];     // flag-in-payload
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t inbox_half, words_half;  // bytes
    int64_t signals_half;            // counters
    int m, n, k[TERMS], rank, site;
    int chunk_rows, stretch, rows, cols;  // rows of a chunk and stretch; tiles of a stretch, and of a chunk
    int out_pitch, visit, lag, programs;  // bytes of a row of the output
    float scale;                          // SCALED
    // ENGINES:
    char* outbox;
    int* copied[8];  // of every rank: the flags [W, slices] that copy engines raise
    int* stored;     // [W, slices] counters of tiles in the outbox, and as many flags that start copies
    int slice, slices, credit;  // credit: where, behind `copied`, peers are told that they may store again
};
CHECK_PARAMS

constexpr int PARTS = BM / PART;  // of a tile
constexpr int TILE_BYTES = BM * BN * 2, PART_BYTES = PART * BN * 2;
constexpr int WIDE = BN / 8;              // pieces of 16 bytes in a row
constexpr int ARRIVING = UPDATE ? 1 : W;  // copies of a tile in the inbox

// Bytes that the storer stores to a peer at once while its block multiplies another tile. All blocks end tiles at about the
// same time. If each stored a whole tile, the loads of the next tiles would wait for 10 us behind stores that the links cannot
// take yet.
constexpr int PACED = 4096;

// Pieces of a part that a thread of a team of SIZE adds up at once, so that the latencies of their loads overlap.
template <int SIZE>
__device__ constexpr int at_once() {
    constexpr int LOADS = SIZE == HELPERS ? 8 : 16, PIECES = PART * WIDE / SIZE;  // of a thread: at once; in a part
    int count = 1;
    while (2 * count * ARRIVING <= LOADS && 2 * count <= PIECES && PIECES % (2 * count) == 0) count *= 2;
    return count;
}

// PART rows of a tile.
struct Part {
    bool exists;
    int tile, number;       // of the chunk, in the order of memory
    int first;              // row of the tile
    int stretch, row, col;  // of the chunk; row of the stretch; column of the output
};

struct MatmulReduce : Frame<Params, TEAMS> {
    using Frame::Frame;

    __device__ int tiles() const { return W / ACROSS * p.rows * ((p.cols + ALONG - 1) / ALONG); }
    __device__ int blocks() const { return blocks_of(p.k); }

    __device__ Tile tile_of(int t) const {
        return tile_at(t, cluster_row(), cluster_col(), p.rank, W, p.rows, p.cols, p.visit, ACROSS, ALONG, ORDER);
    }

    __device__ void load_tiles(int tiles) const {
        for (int i = 0; i < TERMS; ++i) prefetch(&p.x[i]), prefetch(&p.w[i]);
        Turn turn;
        each_tile_loaded(*this, tiles, [&](int t) {
            Tile tile = tile_of(t);
            int row = (tile.row / p.stretch * W + tile.owner) * p.chunk_rows + tile.row % p.stretch * BM;
            for (int i = 0; i < TERMS; ++i) produce(s, turn, {{&p.x[i]}, {&p.w[i]}, row, tile.col * BN, 0, p.k[i]});
        });
    }

    __device__ void before_store(float (&acc)[BN / 2], const Tile& tile) const {
        apply_stages(acc, p, tile.col * BN);
    }

    __device__ void store_tiles(int tiles) const {
        Staged staged{s};
        each_tile_after<WAITS>(tiles, [&] { return barrier_is_over(s.ready, staged.parity); }, [&](int t) {
            Tile tile = tile_of(t);
            int number = (p.rank * p.rows + tile.row) * p.cols + tile.col;
            bool away = ENGINES && tile.owner != p.rank;
            if (ENGINES) number = tile.owner * p.rows * p.cols + chunk_number_of(tile.row, tile.col, p.rows, p.cols);
            int64_t to = parity * p.inbox_half + static_cast<int64_t>(number) * TILE_BYTES;
            if (UPDATE) to -= static_cast<int64_t>(p.rank) * p.rows * p.cols * TILE_BYTES;
            bool is_tile = tile.col < p.cols;
            staged.wait();
            char* there = (away ? p.outbox : p.inbox[tile.owner]) + to;
            int piece = tile.owner != p.rank && !away && t + clusters < tiles ? PACED : TILE_BYTES;
            for (int at = 0; is_tile && at < TILE_BYTES; at += piece) {
                if (at) bulk_commit(), bulk_wait();
                if (UPDATE)
                    add_bulk(there + at, s.staged + at, piece);
                else
                    store_bulk(there + at, s.staged + at, piece);
            }
            staged.free_after_bulk();
            staged.arrived();
            if (!is_tile) return;
            if (away) {
                give_to_engine(tile.owner, number - tile.owner * p.rows * p.cols);
                return;
            }
            fence_sys();
            add_relaxed(p.signals[tile.owner] + parity * p.signals_half + number);
        });
    }

    // One more tile of a slice lies in the outbox; after the last one a copy engine may take the slice.
    __device__ void give_to_engine(int owner, int number) const {
        int slice = number / p.slice, left = p.rows * p.cols - slice * p.slice;
        int* stored = p.stored + owner * p.slices + slice;
        if (count_stored(stored) != (left < p.slice ? left : p.slice) - 1) return;
        *stored = 0;
        fence_sys();
        add_relaxed(stored + W * p.slices);
    }

    __device__ int* arrived() const { return p.signals[p.rank] + parity * p.signals_half; }

    // Number `i` of the parts of a chunk, in the order in which they are complete.
    __device__ Part part_of(int i) const {
        bool exists = i >= 0 && i < p.rows * p.cols * PARTS;
        int number = exists ? i / PARTS : 0, first = exists ? i % PARTS * PART : 0;
        Tile at = chunk_tile_at(number, p.rows, p.cols);
        int tile = ENGINES ? number : at.row * p.cols + at.col;
        int row = at.row % p.stretch * BM + first;
        return {exists, tile, tile * PARTS + first / PART, first, at.row / p.stretch, row, at.col * BN};
    }

    // Where piece j of a part of the chunk of rank `owner` goes in the output; nullptr outside of it.
    __device__ char* place(const Part& part, int owner, int j) const {
        int row = part.row + j / WIDE, col = part.col + j % WIDE * 8;
        int from_all = (part.stretch * W + owner) * p.chunk_rows + row;
        if (row >= p.chunk_rows || from_all >= p.m || col >= p.n) return nullptr;
        int to = ALL ? from_all : part.stretch * p.chunk_rows + row;
        return p.out + static_cast<int64_t>(to) * p.out_pitch + col * 2;
    }

    // Where the sums of a part by rank `owner` lie.
    __device__ int64_t sums_at(const Part& part, int owner) const {
        int64_t parts = p.rows * p.cols * PARTS;
        return parity * p.words_half + (owner * parts + part.number) * PART_BYTES;
    }

    // A team reduces parts of our own chunk and sends the sums, and copies the sums that peers send.
    template <int SIZE>
    __device__ void exchange(Team<SIZE> team) {
        constexpr int KINDS = ALL ? 2 : 1;
        int parts = p.rows * p.cols * PARTS;
        bool mixed = p.lag < parts;
        int lag = mixed ? p.lag : parts, tickets = mixed ? (parts + lag) * KINDS : parts * KINDS;
        for (Tickets ticket(p, team); ticket.number < tickets; ticket.next()) {
            // Number i of our own parts, or number i - lag of all peers'; of few parts, all of our own come first.
            bool copying = ALL && (mixed ? ticket.number % 2 : ticket.number >= parts);
            Part part = part_of((mixed ? ticket.number / KINDS : ticket.number) - (copying ? lag : 0));
            if (part.exists && !copying && team.thread < W) {
                const int* from = arrived() + team.thread * p.rows * p.cols + part.tile;
                if (ENGINES && team.thread != p.rank)
                    from = p.copied[p.rank] + team.thread * p.slices + part.tile / p.slice;
                wait(from, 1, WAIT_REDUCING, team.thread, part.tile);
            }
            ticket.draw();
            if (team.leads()) trace.stamp(EVENT_WAITED, -1, part.number);
            constexpr int AHEAD = at_once<SIZE>();
            for (int first = team.thread; part.exists && first < PART * WIDE; first += AHEAD * SIZE)
                if (copying)
                    copy<SIZE, AHEAD>(part, first);
                else
                    reduce<SIZE, AHEAD>(part, first);
            if (team.leads()) trace.stamp(copying ? EVENT_COPIED : EVENT_REDUCED, copying ? -1 : p.rank, part.number);
        }
    }

    // A thread adds up its pieces first, first + SIZE, ... of a part.
    template <int SIZE, int AHEAD>
    __device__ void reduce(const Part& part, int first) const {
        int64_t apart = static_cast<int64_t>(p.rows) * p.cols * TILE_BYTES;  // of two ranks' tiles
        char* tile = p.inbox[p.rank] + parity * p.inbox_half + static_cast<int64_t>(part.tile) * TILE_BYTES;
        auto from = [&](int j) { return tile + staged_at(part.first + j / WIDE, j % WIDE); };
        uint4 terms[AHEAD][ARRIVING], added[AHEAD] = {};
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            char* to = place(part, p.rank, first + a * SIZE);
            if (to) added[a] = added_at(p, to - p.out);
#pragma unroll
            for (int r = 0; r < ARRIVING; ++r) terms[a][r] = load_l2(from(first + a * SIZE) + r * apart);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            int j = first + a * SIZE;
            char* to = place(part, p.rank, j);
            if (UPDATE) store(from(j), {});
            if (!to) continue;
            uint4 value = sum(terms[a]);
            if (ALL) {
                value = sendable(value);
                for (int r = 1; r < W; ++r) put(p.words[(p.rank + r) % W] + sums_at(part, p.rank) + j * 16, value);
            }
            store(to, with_added(value, added[a]));
        }
    }

    // A thread copies its pieces of the sums of all peers.
    template <int SIZE, int AHEAD>
    __device__ void copy(const Part& part, int first) const {
        constexpr int PEERS = W > 1 ? W - 1 : 1, COUNT = AHEAD * PEERS;
        uint4 words[COUNT] = {}, added[COUNT];
        char* to[COUNT];
        auto piece = [&](int i) { return first + i / PEERS * SIZE; };
        auto source = [&](int i) { return (p.rank + 1 + i % PEERS) % W; };
        auto from = [&](int i) { return p.words[p.rank] + sums_at(part, source(i)) + piece(i) * 16; };
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            to[i] = place(part, source(i), piece(i));
            if (to[i]) added[i] = added_at(p, to[i] - p.out);
        }
        take_all(words, [&](int i) { return to[i] != nullptr; }, from, call(), WAIT_COPYING, source, part.number);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (to[i]) store(to[i], with_added(flip(words[i]), added[i]));
    }

    template <class Meet>
    __device__ void clear(int thread, int threads, Meet meet) const {
        for (int i = thread; i < W * p.rows * p.cols; i += threads) arrived()[i] = 0;
        if (!ENGINES) return;
        for (int i = thread; i < W * p.slices; i += threads) p.copied[p.rank][i] = 0;
        meet();
        if (thread < W) give_credit(call(), p.copied, p.credit, p.rank, true, thread);
        if (given_up(p.state))
            for (int i = thread; i < W * p.slices; i += threads) p.stored[W * p.slices + i] = 1;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) matmul_reduce(const __grid_constant__ Params p) {
    grid_wait();
    run<MatmulReduce>(p);
}
