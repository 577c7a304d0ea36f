// all_to_all_expert_matmul of experts with any number of rows, in one persistent kernel over frame.cuh: as expert_dispatch.cu,
// but only the device knows how many rows an expert has and which of the rows that arrive.
//
// Each rank first tells the others which row of X each of their rows becomes (places [W, slot] in their memory); they store
// it there. A rank has two halves each of X [rows, K] and of counters: told [8], by rank, and arrived [rows / 128], of rows of
// X. Columns of tiles go through all WEIGHTS, which multiply rows while these lie in the L2 cache.
#define STAGED_BOXES 1  // of a warp: with less memory for tiles, more stages are in flight
#include "frame.cuh"
#include "gate.cuh"
#include "ragged.cuh"

// KEPT: of GATED, whether the products are stored, too.
#ifndef KEPT
#define KEPT 0
#endif
static_assert(GATED || !KEPT, "products of a gate");
constexpr int MOST_OUTPUTS = MOST_WEIGHTS + 1;

struct Params {
    TensorMap exchanged[2];  // our X, a stack of one
    TensorMap w[MOST_WEIGHTS];  // a matrix an expert
    char* out[MOST_OUTPUTS];
    const char* parts;         // [rows to send, K]
    const char* bias[MOST_WEIGHTS];
    const int* offsets;        // [EXPERTS], where rows of experts end; absent if all have as many
    const int64_t* positions;  // [rows], of the rows that arrive; absent if they are X
    char* memory[8];           // of every rank
    int* places[8];
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t half;                       // bytes
    int64_t places_half, signals_half;  // counters
    int sent[9], received[9];           // where parts begin in `parts`, and among the rows that arrive
    int rows, n, k, rank, site, slot, cols, programs;  // cols: of tiles, of all weights
};
CHECK_PARAMS

constexpr int BLOCK = 128, STARTS = 8;  // rows of X that a counter counts; counters before these
constexpr int ROWS_AT_ONCE = 4;         // that a warp stores, of a box
constexpr int OUTPUTS = GATED ? 1 : WEIGHTS;  // that columns of tiles go through

struct DroplessDispatch : Frame<Params, SENDERS> {
    static constexpr bool WAITS = true, STORES_OWN = true;
    static constexpr int MOST_RUN = 8, LEAST_RUNS = 4;  // rows of a run, and runs of a warp that has longer ones
    static constexpr int FIRST_AHEAD = 8;               // as STORES_AHEAD, of a warp's first run: no tile is loaded yet
    static constexpr int MOST_KNOWN = 256;              // blocks of X: behind these each tile waits anew
    Ragged& experts;

    __device__ explicit DroplessDispatch(const Params& p) : Frame(p), experts(shared_offsets()) {
        read_offsets(experts, p.offsets, p.rows);
    }

    __device__ int tiles() const { return experts.highs[ALL] * ((p.cols + ALONG - 1) / ALONG); }
    __device__ int blocks() const { return blocks_of(p.k); }
    __device__ Tile tile_of(int t) const { return ragged_tile(experts, t, p.cols); }
    __device__ bool waits(int) const { return true; }
    __device__ int* counters(int rank) const { return p.signals[rank] + parity * p.signals_half; }
    __device__ int rows_of_block(int b) const { return p.rows - b * BLOCK < BLOCK ? p.rows - b * BLOCK : BLOCK; }

    // The helpers of a block tell the others where a share of their rows goes.
    __device__ void exchange(Team<HELPERS> team, int share) const {
        for (int i = share * HELPERS + team.thread; i < p.rows; i += p.programs * HELPERS) {
            int64_t at = p.positions ? p.positions[i] : i;
            if (!owns()) return;
            if (at < 0 || at >= p.received[W]) continue;
            int source = 0;
            for (int rank = 1; rank < W; ++rank) source += at >= p.received[rank];
            store(p.places[source] + parity * p.places_half + p.rank * p.slot + (at - p.received[source]), i);
        }
        if (!owns()) return;
        team.meet();
        if (team.thread < W) add_release(counters(team.thread) + p.rank);
    }

    // The rows of a run, which a warp stores and then counts: few where a warp has few, so that the first blocks of X are whole
    // early.
    __device__ int run_of() const {
        int run = p.sent[W] / (p.programs * HELPER_WARPS * LEAST_RUNS);
        return run < 1 ? 1 : run > MOST_RUN ? MOST_RUN : run;
    }

    // Then they store our rows where the others have told; these shares are claimed as well. The claim of a share of the margin
    // waits until all peers are there.
    __device__ void send(Team<HELPERS> team) const {
        if (margin && await(progress().going) != 1) return;
        if (team.leads()) poke(progress().owned, claim(p.state, CLAIM_C, block) ? 1 : 2);
        int run = run_of(), runs = 0;  // of the longest part
        for (int dest = 0; dest < W; ++dest) {
            int here = (p.sent[dest + 1] - p.sent[dest] + run - 1) / run;
            runs = here > runs ? here : runs;
        }
        team.meet();
        each_share(p, team, CLAIM_C, block, [&](int share) {
            if (owns()) send_rows(team, share, run, runs);
        });
    }

    __device__ void send_rows(Team<HELPERS> team, int share, int run, int runs) const {
        int lane = team.thread % 32, step = p.programs * HELPER_WARPS;
        uint32_t heard = 0;  // a bit a rank
        for (int i = share * HELPER_WARPS + team.thread / 32; i < runs * W; i += step) {
            int dest = (p.rank + 1 + i % W) % W, first = i / W * run, left = p.sent[dest + 1] - p.sent[dest] - first;
            int rows = left < run ? left : run;
            if (rows <= 0) continue;
            if (!(heard >> dest & 1) && lane == 0)
                wait(counters(p.rank) + dest, p.programs, WAIT_TELLING, dest, 0);
            heard |= 1 << dest;
            named_barrier(HELPER_WARP_BARRIER + team.thread / 32, 32);
            int place = -1;
            if (lane < rows) place = load_l2(p.places[p.rank] + parity * p.places_half + dest * p.slot + first + lane);
            if (place >= (p.half / (p.k * 2))) place = -1;  // where nobody has told us, after a failure
            for (int r = 0; r < rows; ++r) {
                int64_t row = __shfl_sync(~0u, place, r);
                if (row < 0) continue;
                const char* from = p.parts + static_cast<int64_t>(p.sent[dest] + first + r) * p.k * 2;
                char* to = p.memory[dest] + parity * p.half + row * p.k * 2;
                if (i < step)
                    copy_row<FIRST_AHEAD>(to, from, p.k / 8, lane, [] { return true; });
                else
                    copy_row(to, from, p.k / 8, lane, [] { return true; });
            }
            named_barrier(HELPER_WARP_BARRIER + team.thread / 32, 32);
            fence_sys();
            count_rows(place < 0 ? nullptr : counters(dest) + STARTS + place / BLOCK);
        }
    }

    __device__ void load_tiles(int tiles) {
        prefetch(&p.exchanged[parity]);
        for (int i = 0; i < WEIGHTS; ++i) prefetch(&p.w[i]);
        Turn turn;
        const int* arrived = counters(p.rank) + STARTS;
        uint32_t known[MOST_KNOWN / 32] = {};  // bits: blocks of X that have come
        bool told = false;
        each_tile_loaded(*this, tiles, [&](int t) {
            // A block does not say whose rows are missing: a rank that is lost is named here.
            for (int r = 1; r < W && !told; ++r) {
                int source = (p.rank + r) % W;
                wait(arrived - STARTS + source, p.programs, WAIT_TELLING, source, 0);
            }
            told = true;
            Tile tile = tile_of(t);
            int end = experts.starts[tile.owner + 1] < tile.row + ROWS ? experts.starts[tile.owner + 1] : tile.row + ROWS;
            int first = tile.row / BLOCK, last = tile.owner < EXPERTS ? (end + BLOCK - 1) / BLOCK : first;
            for (int b = first; b < last; ++b) {
                if (b < MOST_KNOWN && known[b / 32] >> b % 32 & 1) continue;
                wait(arrived + b, rows_of_block(b), WAIT_DISPATCHING, p.rank, b);
                fence_proxy();
                trace.stamp(EVENT_WAITED, -1, b);
                if (b < MOST_KNOWN) known[b / 32] |= 1u << b % 32;
            }
            int expert = tile.owner < EXPERTS ? tile.owner : EXPERTS - 1;
            Column at = column_at(tile.col, p.cols, OUTPUTS);
            produce<true>(s, turn, {{&p.exchanged[parity]}, {&p.w[at.weight], expert}, tile.row, at.col * OUT_BN, 0, p.k,
                                    {&p.w[GATED ? 1 : 0], expert}});
        });
    }

    __device__ void before_store(float (&acc)[BN / 2], const Tile& tile) const {
        if (!BIASED || tile.owner == EXPERTS) return;
        Column at = column_at(tile.col, p.cols, OUTPUTS);
        add_bias(acc, p.bias[at.weight] + static_cast<int64_t>(tile.owner) * p.n * 2, at.col * BN, p.n);
    }

    // Of GATED, the result comes first and behind it, of KEPT, the products.
    __device__ void store_rows(float (&acc)[BN / 2], const Tile& tile) const {
        Column at = column_at(tile.col, p.cols, OUTPUTS);
        if (KEPT) {
            store_columns(acc, tile, p.out[1], at.col);
            store_columns(acc + BN / 4, tile, p.out[2], at.col);
        }
        if (GATED) gate(acc);
        store_columns(acc, tile, p.out[at.weight], at.col);
    }

    // OUT_BN columns of a tile. A warp stages a box of its 16 rows, and stores those of this expert, which may end in the middle
    // of a tile. Rows behind the last expert are 0.
    __device__ void store_columns(const float* acc, const Tile& tile, char* out, int tile_col) const {
        int warp = (group - 1) * 4 + threadIdx.x / 32 % 4, lane = threadIdx.x % 32, first = tile.row + warp * 16;
        if (warp >= WARPS) return;
        int row = lane / 8, piece = lane % 8, left = experts.starts[tile.owner + 1] - first;
        int col = tile_col * OUT_BN + piece * 8;
        uint32_t box = s.staged + warp * 16 * ROW;
        char* to = out + (static_cast<int64_t>(first + row) * p.n + col) * 2;
#pragma unroll
        for (int b = 0; b < OUT_BOXES; ++b) {
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* d = acc + b * 32 + j * 8;
                if (b * 64 + j * 16 < OUT_BN)
                    store_matrices(box + lane % 16 * ROW + (j * 2 + lane / 16 ^ lane % 8) * 16, pair(d[0], d[1]),
                                   pair(d[2], d[3]), pair(d[4], d[5]), pair(d[6], d[7]));
            }
            __syncwarp();
            uint4 held[16 / ROWS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < 16; i += ROWS_AT_ONCE) {
                uint4 eight = load_shared(box + (row + i) * ROW + (piece ^ (row + i) % 8) * 16);
                held[i / ROWS_AT_ONCE] = tile.owner == EXPERTS ? uint4{} : eight;
            }
            if (b * 64 + piece * 8 >= OUT_BN || col + b * 64 >= p.n) continue;
#pragma unroll
            for (int i = 0; i < 16; i += ROWS_AT_ONCE)
                if (row + i < left) store(to + static_cast<int64_t>(i) * p.n * 2 + b * ROW, held[i / ROWS_AT_ONCE]);
        }
    }

    // Every rank hears of all others and of all its rows in each call.
    template <class Meet>
    __device__ void clear(int thread, int threads, Meet meet) const {
        int* own = counters(p.rank);
        for (int i = thread; i < STARTS + (p.rows + BLOCK - 1) / BLOCK; i += threads) {
            int b = i - STARTS;
            if (b >= 0)
                wait(own + i, rows_of_block(b), WAIT_DISPATCHING, p.rank, b);
            else if (i < W)
                wait(own + i, p.programs, WAIT_TELLING, i, 0);
            own[i] = 0;
        }
        meet();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) dropless_dispatch(const __grid_constant__ Params p) {
    run<DroplessDispatch>(p);
}
