// all_gather_matmul, as native_kernels/triton/gather_matmul.py, in one persistent kernel over frame.cuh. The helpers send this
// rank's part to all peers, beside the tensor cores; the loader waits for what arrives.
//
// Parts go out in slices of rows and, within these, of K; each slice has a counter at every receiver. A rank has two halves
// each of the gathered memory [W, C, K] and of the counters [W, slices, k_slices]. SPANNING: a tile holds rows of all parts,
// and the part of this rank is stored among them, too. ENGINES: copy engines send instead of the helpers; they do not know
// the epoch, so there is one half, and a peer stores again once it has credit. Columns of tiles go through all WEIGHTS, of
// different widths, which multiply rows while these lie in the L2 cache.
#define OVERLAPPING 1
#include "frame.cuh"

struct Params {
    TensorMap x, gathered;  // our own part; our own memory, both halves
    TensorMap w[WEIGHTS];
    TensorMap y[WEIGHTS];   // the outputs, as [outer * W, inner, N]
    char* part;
    const char* bias[WEIGHTS];
    char* memory[8];  // of every rank
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t signals_half;  // counters
    int m, n[WEIGHTS], k, rank, site;
    int chunk, inner, stretch, rows, cols;       // rows of a part and stretch; tiles of a stretch, and of a part, of all weights
    int half_rows;                               // rows of the memory before its second half
    int slice_rows, slices, k_slice, k_slices;   // rows of tiles in a slice, elements of K in a slice
    int credit, gives_credit, programs;  // where, among counters, peers are told that they may store again; whether here
};
CHECK_PARAMS

constexpr int OWNERS = SPANNING ? 1 : W;

// A column of tiles: its weight, and its number in that.
struct WeightColumn {
    int weight, col;
};

__device__ inline WeightColumn weight_column(const int (&n)[WEIGHTS], int col) {
    int weight = 0;
#pragma unroll
    for (int i = 0; i < WEIGHTS - 1; ++i) {
        int wide = (n[i] + BN - 1) / BN;
        if (weight == i && col >= wide) weight = i + 1, col -= wide;
    }
    return {weight, col};
}

struct GatherMatmul : Frame<Params, SENDERS, !ENGINES> {
    static constexpr bool WAITS = W > 1, SENDS = !ENGINES;
    using Frame::Frame;

    __device__ int tiles() const {
        int wide = (p.cols + ALONG - 1) / ALONG;
        return WITHIN ? W * ((p.rows + ACROSS - 1) / ACROSS) * wide : OWNERS / ACROSS * p.rows * wide;
    }
    __device__ int blocks() const { return blocks_of(p.k); }

    __device__ Tile tile_of(int t) const {
        return gathered_tile_at(t, cluster_row(), cluster_col(), p.rank, OWNERS, p.rows, p.cols, p.slice_rows, ACROSS,
                                ALONG, WITHIN);
    }

    __device__ bool waits(int t) const {
        bool own = !SPANNING;
        for (int m = 0; m < ACROSS; ++m)
            own = own && gathered_tile_at(t, m, 0, p.rank, OWNERS, p.rows, p.cols, p.slice_rows, ACROSS, ALONG, WITHIN)
                                 .owner == p.rank;
        return !own;
    }

    // The row of a part where row `row` of tiles begins.
    __device__ int row_of(int row) const { return row / p.stretch * p.inner + row % p.stretch * BM; }

    __device__ int* arrived(int rank) const { return p.signals[rank] + parity * p.signals_half; }

    __device__ void load_tiles(int tiles) {
        prefetch(&p.x);
        prefetch(&p.gathered);
        for (int i = 0; i < WEIGHTS; ++i) prefetch(&p.w[i]);
        Turn turn;
        each_tile_loaded(*this, tiles, [&](int t) {
            Tile tile = tile_of(t);
            bool own = !SPANNING && tile.owner == p.rank;
            int row = row_of(tile.row), slice = tile.row / p.slice_rows;
            WeightColumn at = weight_column(p.n, tile.col);
            if (!own) row += parity * p.half_rows + tile.owner * p.chunk;
            for (int q = 0; q < p.k_slices; ++q) {
                if (!own && slice < p.slices) {
                    int unit = slice * p.k_slices + q;
                    for (int r = 0; r < (SPANNING ? W : 1); ++r) {
                        int source = SPANNING ? (p.rank + r) % W : tile.owner;
                        wait(arrived(p.rank) + source * p.slices * p.k_slices + unit, ENGINES ? 1 : p.programs,
                             WAIT_GATHERING, source, unit);
                    }
                    fence_proxy();
                    trace.stamp(EVENT_WAITED, SPANNING ? -1 : tile.owner, unit);
                }
                int k = q * p.k_slice, last = k + p.k_slice < p.k ? k + p.k_slice : p.k;
                produce(s, turn, {{own ? &p.x : &p.gathered}, {&p.w[at.weight]}, row, at.col * BN, k, last});
            }
        });
    }

    __device__ void before_store(float (&acc)[BN / 2], const Tile& tile) const {
        WeightColumn at = weight_column(p.n, tile.col);
        if (BIASED) add_bias(acc, p.bias[at.weight], at.col * BN, p.n[at.weight]);
    }

    __device__ void store_tiles(int tiles) const {
        Staged staged{s};
        each_tile_after<WAITS>(tiles, [&] { return barrier_is_over(s.ready, staged.parity); }, [&](int t) {
            Tile tile = tile_of(t);
            WeightColumn at = weight_column(p.n, tile.col);
            staged.wait();
            if (tile.row < p.rows)
                for (int i = 0; i < BOXES; ++i)
                    store_box(&p.y[at.weight], tile.row / p.stretch * OWNERS + tile.owner, tile.row % p.stretch * BM,
                              at.col * BN + (i < BOXES - 1 ? i * 64 : LAST_BOX), s.staged + i * HIGH * 128);
            staged.free_after_bulk();
        });
    }

    // The helpers of a block store a share of each slice to all peers, and signal. A piece is stored once for each peer, so a
    // thread loads STORES_AHEAD / PEERS pieces at once, but at least one.
    __device__ void exchange(Team<HELPERS> team, int share) const {
        constexpr int PEERS = W > 1 ? W - 1 : 1, AHEAD = PEERS < STORES_AHEAD ? STORES_AHEAD / PEERS : 1;
        constexpr int FIRST = SPANNING ? 0 : 1;
        int pitch = p.k * 2;
        int64_t there = (parity * p.half_rows + static_cast<int64_t>(p.rank) * p.chunk) * pitch;
        for (int unit = 0; unit < p.slices * p.k_slices; ++unit) {
            int s = unit / p.k_slices, start = unit % p.k_slices * p.k_slice;
            int first = row_of(s * p.slice_rows);
            int last = s == p.slices - 1 ? p.chunk : row_of((s + 1) * p.slice_rows);
            int width = (p.k - start < p.k_slice ? p.k - start : p.k_slice) / 8;
            int count = (last - first) * width, step = p.programs * HELPERS;
            for (int i = share * HELPERS + team.thread; i < count; i += AHEAD * step) {
                uint4 held[AHEAD];
                auto at = [&](int a) {
                    int j = i + a * step;
                    return static_cast<int64_t>(first + j / width) * pitch + (start + j % width * 8) * 2;
                };
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (i + a * step < count) held[a] = load_l2(p.part + at(a));
                if (!owns()) return;
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    if (i + a * step >= count) break;
                    int64_t to = there + at(a);
#pragma unroll
                    for (int r = FIRST; r < W; ++r) store(p.memory[(p.rank + r) % W] + to, held[a]);
                }
            }
            if (!owns()) return;
            team.meet();
            int peer = (p.rank + team.thread) % W;
            if (team.thread >= FIRST && team.thread < W)
                add_release(arrived(peer) + p.rank * p.slices * p.k_slices + unit);
        }
    }

    template <class Meet>
    __device__ void clear(int thread, int threads, Meet meet) const {
        for (int i = thread; i < W * p.slices * p.k_slices; i += threads) arrived(p.rank)[i] = 0;
        meet();
        if (ENGINES && thread < W) give_credit(call(), p.signals, p.credit, p.rank, p.gives_credit, thread);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_matmul(const __grid_constant__ Params p) {
    run<GatherMatmul>(p);
}
