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
constexpr int ARRIVING = UPDATE ? 1 : W;  // copies of a tile in the inbox

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
            if (is_tile && UPDATE)
                add_bulk(there, s.staged, TILE_BYTES);
            else if (is_tile)
                store_bulk(there, s.staged, TILE_BYTES);
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

    // The row of the output of all ranks that row `row` of the chunk of `owner` is; -1 outside of the output.
    __device__ int row_at(int owner, int row) const {
        int high = row / (p.stretch * BM), low = row % (p.stretch * BM);
        int at = (high * W + owner) * p.chunk_rows + low;
        return low < p.chunk_rows && at < p.m ? at : -1;
    }

    __device__ int* arrived() const { return p.signals[p.rank] + parity * p.signals_half; }

    // A team reduces parts of our own chunk and sends the sums, and copies the sums that peers send. Parts come in the order
    // in which they are complete.
    template <int SIZE>
    __device__ void exchange(Team<SIZE> team) {
        constexpr int KINDS = ALL ? 2 : 1, WIDE = BN / 8;  // pieces of 16 bytes in a row
        int tiles = p.rows * p.cols, parts = tiles * PARTS;
        char* inbox = p.inbox[p.rank] + parity * p.inbox_half;
        bool mixed = p.lag < parts;
        int tickets = (mixed ? parts + p.lag : parts) * KINDS;
        for (Tickets ticket(p, team); ticket.number < tickets; ticket.next()) {
            // Number i of our own parts, or number i - lag of all peers'; of few parts, all of our own come first.
            bool copying = ALL && (mixed ? ticket.number % 2 : ticket.number >= parts);
            int i = mixed ? ticket.number / KINDS - (copying ? p.lag : 0) : ticket.number - (copying ? parts : 0);
            bool is_part = i >= 0 && i < parts;
            int number = is_part ? i / PARTS : 0;
            Tile at = chunk_tile_at(number, p.rows, p.cols);
            int tile = ENGINES ? number : at.row * p.cols + at.col, part = is_part ? tile * PARTS + i % PARTS : 0;
            if (is_part && !copying) {
                if (team.thread < W) {
                    const int* from = arrived() + team.thread * tiles + tile;
                    if (ENGINES && team.thread != p.rank)
                        from = p.copied[p.rank] + team.thread * p.slices + tile / p.slice;
                    wait(from, 1, WAIT_REDUCING, team.thread, tile);
                }
            }
            ticket.draw();
            if (team.leads()) trace.stamp(EVENT_WAITED, -1, part);
            // Where the sums of a part by rank `owner` lie.
            auto sums = [&](int owner) {
                return parity * p.words_half + (static_cast<int64_t>(owner) * parts + part) * PART_BYTES;
            };
            // Piece j of the part: its row and column in the chunk, and where it goes in the output; nullptr outside of it.
            struct Place {
                int row, col;
                char* to;
            };
            auto place = [&](int source, int j) {
                int row = at.row * BM + i % PARTS * PART + j / WIDE, col = at.col * BN + j % WIDE * 8;
                int to = row_at(source, row);
                if (to < 0 || col >= p.n) return Place{row, col, nullptr};
                if (!ALL) to = row / (p.stretch * BM) * p.chunk_rows + row % (p.stretch * BM);
                return Place{row, col, p.out + static_cast<int64_t>(to) * p.out_pitch + col * 2};
            };
            if (is_part && !copying) {
#pragma unroll 2
                for (int j = team.thread; j < PART * WIDE; j += SIZE) {
                    Place there = place(p.rank, j);
                    if (!there.to && !UPDATE) continue;
                    char* from = inbox + static_cast<int64_t>(tile) * TILE_BYTES +
                                 staged_at(i % PARTS * PART + j / WIDE, j % WIDE);
                    uint4 added = there.to ? added_at(p, there.to - p.out) : uint4{}, terms[ARRIVING];
#pragma unroll
                    for (int r = 0; r < ARRIVING; ++r)
                        terms[r] = load_l2(from + static_cast<int64_t>(r) * tiles * TILE_BYTES);
                    if (UPDATE) store(from, {});
                    if (UPDATE && !there.to) continue;
                    uint4 value = sum(terms, [&](float (&totals)[8]) { before_output(totals, there.row, there.col); });
                    if (ALL) {
                        value = sendable(value);
                        for (int r = 1; r < W; ++r) put(p.words[(p.rank + r) % W] + sums(p.rank) + j * 16, value);
                    }
                    store(there.to, with_added(value, added));
                }
            } else if (is_part) {
                // Of all peers at once, so that their latencies overlap.
                for (int j = team.thread; j < PART * WIDE; j += SIZE) {
                    uint4 words[W] = {}, added[W];
                    char* to[W];
#pragma unroll
                    for (int r = 0; r < W; ++r) {
                        to[r] = r ? place((p.rank + r) % W, j).to : nullptr;
                        if (to[r]) added[r] = added_at(p, to[r] - p.out);
                    }
                    auto wanted = [&](int r) { return to[r] != nullptr; };
                    auto source = [&](int r) { return (p.rank + r) % W; };
                    auto from = [&](int r) { return p.words[p.rank] + sums(source(r)) + j * 16; };
                    take_all(words, wanted, from, call(), WAIT_COPYING, source, part);
#pragma unroll
                    for (int r = 1; r < W; ++r)
                        if (to[r]) store(to[r], with_added(flip(words[r]), added[r]));
                }
            }
            if (team.leads()) trace.stamp(copying ? EVENT_COPIED : EVENT_REDUCED, copying ? -1 : p.rank, part);
        }
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
