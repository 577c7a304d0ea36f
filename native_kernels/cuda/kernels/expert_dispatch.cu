// all_to_all_expert_matmul of experts with a fixed capacity, in one persistent kernel over frame.cuh. The helpers send this
// rank's rows to the ranks of their experts, beside the tensor cores; the loader waits for what arrives.
//
// Parts go out in slices of rows, to all ranks at once; each slice has a counter at every receiver. A rank has two halves each
// of the rows of its experts, [E, R = (outer, W, run), K], and of the counters [W, slices]. ENGINES: copy engines send, into one
// half, [W, E, outer, run, K]. SPANNING: a tile holds rows of several sources, this rank among them. Columns of tiles go
// through all WEIGHTS, which multiply rows while these lie in the L2 cache.
#include "expert_order.cuh"
#include "frame.cuh"

struct Params {
    TensorMap x;                // our own part, a matrix a run
    TensorMap exchanged[2];     // our own memory, a matrix a run or, spanning, an expert
    TensorMap w[MOST_WEIGHTS];  // a matrix an expert
    TensorMap y[MOST_WEIGHTS];  // the outputs, as `exchanged`
    const char* parts;          // [W, rows of a part, K]
    const char* bias[MOST_WEIGHTS];
    char* memory[8];            // of every rank
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t half;               // bytes
    int64_t signals_half;       // counters
    Runs runs;
    int n, k, rank, site, part_rows, keep;  // keep: store our own part among the others; the host gives credit
    int rows, cols;                         // tiles of a part; of all weights
    int slice_rows, slices;                 // rows of tiles in a slice
    int credit, programs;  // where, among the counters of a rank, peers are told that they may store again
};
CHECK_PARAMS

constexpr int OWNERS = SPANNING ? 1 : W;

struct ExpertDispatch : Frame<Params, SENDERS, !ENGINES> {
    static constexpr bool WAITS = true, SENDS = !ENGINES;
    using Frame::Frame;

    __device__ int tiles() const {
        return (WITHIN ? OWNERS : W / ACROSS) * (WITHIN ? p.rows / ACROSS : p.rows) * ((p.cols + ALONG - 1) / ALONG);
    }
    __device__ int blocks() const { return blocks_of(p.k); }

    __device__ Tile tile_of(int t) const {
        return dispatched_tile_at(t, cluster_row(), cluster_col(), p.rank, W, p.rows, p.cols, p.slice_rows, ACROSS, ALONG,
                                  WITHIN, p.runs.group, SPANNING);
    }

    __device__ bool waits(int t) const {
        bool own = !SPANNING;
        for (int m = 0; m < ACROSS; ++m)
            own = own && dispatched_tile_at(t, m, 0, p.rank, W, p.rows, p.cols, p.slice_rows, ACROSS, ALONG, WITHIN,
                                            p.runs.group, SPANNING)
                                 .owner == p.rank;
        return !own;
    }

    __device__ int* arrived(int rank) const { return p.signals[rank] + parity * p.signals_half; }

    __device__ void load_tiles(int tiles) {
        if (!SPANNING) prefetch(&p.x);
        prefetch(&p.exchanged[parity]);
        for (int i = 0; i < WEIGHTS; ++i) prefetch(&p.w[i]);
        Turn turn;
        uint64_t heard = 0;  // a byte for each source: how many of its slices have come, in their order
        each_tile_loaded(*this, tiles, [&](int t) {
            Tile tile = tile_of(t);
            bool own = !SPANNING && tile.owner == p.rank;
            int expert = tile.row / p.runs.per, i = tile.row % p.runs.per, slice = tile.row / p.slice_rows;
            int run = expert * p.runs.outer + i / p.runs.stretch;
            Matrix x{own ? &p.x : &p.exchanged[parity], run};
            if (SPANNING)
                x.number = expert;
            else if (!own)
                x.number = ENGINES ? tile.owner * (p.part_rows / p.runs.run) + run : run * W + tile.owner;
            for (int r = 0; r < (SPANNING ? W : 1) && !own; ++r) {
                int source = SPANNING ? (p.rank + r) % W : tile.owner;
                if (static_cast<int>(heard >> source * 8 & 255) > slice) continue;
                wait(arrived(p.rank) + source * p.slices + slice, ENGINES ? 1 : p.programs, WAIT_DISPATCHING, source,
                     slice);
                fence_proxy();
                heard = heard & ~(255ull << source * 8) | static_cast<uint64_t>(slice + 1) << source * 8;
                trace.stamp(EVENT_WAITED, source, slice);
            }
            Column at = column_at(tile.col, p.cols, WEIGHTS);
            produce<true>(s, turn, {x, {&p.w[at.weight], expert}, i % p.runs.stretch * ROWS, at.col * BN, 0, p.k});
        });
    }

    __device__ void before_store(float (&acc)[BN / 2], const Tile& tile) const {
        if (!BIASED) return;
        Column at = column_at(tile.col, p.cols, WEIGHTS);
        int64_t expert = tile.row / p.runs.per;
        add_bias(acc, p.bias[at.weight] + expert * p.n * 2, at.col * BN, p.n);
    }

    __device__ void store_tiles(int tiles) const {
        Staged staged{s};
        each_tile_after<WAITS>(tiles, [&] { return barrier_is_over(s.ready, staged.parity); }, [&](int t) {
            Tile tile = tile_of(t);
            int expert = tile.row / p.runs.per, i = tile.row % p.runs.per;
            int matrix = SPANNING ? expert : (expert * p.runs.outer + i / p.runs.stretch) * W + tile.owner;
            Column at = column_at(tile.col, p.cols, WEIGHTS);
            staged.wait();
            for (int j = 0; j < BOXES; ++j)
                store_box(&p.y[at.weight], matrix, i % p.runs.stretch * ROWS, at.col * BN + j * 64,
                          s.staged + j * HIGH * 128);
            staged.free_after_bulk();
        });
    }

    // The helpers of a block store a share of each slice, a row a warp, and signal.
    __device__ void exchange(Team<HELPERS> team, int share) const {
        int lane = team.thread % 32;
        int skip = SPANNING || p.keep ? 0 : 1;  // our own part is read where it is
        for (int slice = 0; slice < p.slices; ++slice) {
            int first = part_row_at(p.runs, slice * p.slice_rows, SPANNING);
            int last = slice == p.slices - 1 ? p.part_rows : part_row_at(p.runs, (slice + 1) * p.slice_rows, SPANNING);
            int rows = last - first;
            for (int i = share * HELPER_WARPS + team.thread / 32; i < (W - skip) * rows; i += p.programs * HELPER_WARPS) {
                int dest = (p.rank + skip + i / rows) % W, row = first + i % rows;
                const char* from = p.parts + (static_cast<int64_t>(dest) * p.part_rows + row) * p.k * 2;
                char* to = p.memory[dest] + parity * p.half + exchanged_row_at(p.runs, p.rank, row, W) * p.k * 2;
                if (!copy_row(to, from, p.k / 8, lane, [&] { return owns(); })) return;
            }
            if (!owns()) return;
            team.meet();
            int peer = (p.rank + team.thread) % W;
            if (team.thread >= (SPANNING ? 0 : 1) && team.thread < W) add_release(arrived(peer) + p.rank * p.slices + slice);
        }
    }

    template <class Meet>
    __device__ void clear(int thread, int threads, Meet meet) const {
        for (int i = thread; i < W * p.slices; i += threads) arrived(p.rank)[i] = 0;
        meet();
        if (ENGINES && thread < W) give_credit(call(), p.signals, p.credit, p.rank, !p.keep, thread);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_dispatch(const __grid_constant__ Params p) {
    run<ExpertDispatch>(p);
}
