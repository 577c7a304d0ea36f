// expert_matmul_all_to_all of experts with any number of rows, in one persistent kernel over frame.cuh: as expert_combine.cu,
// but only the device knows how many rows an expert has and where each of them goes.
//
// `positions` gives the place of a row in a send buffer, whose parts go to the ranks. Each rank tells the others where in its
// inbox, [rows of all parts, N], their rows begin (plus 1: 0 means not yet told). A storing warp stores rows there one by one
// and counts them in slices of SLICE rows of a part. A rank has two halves of the starts [8] and the counters [W, slots].
#include "frame.cuh"
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
CHECK_PARAMS

constexpr int SLICE = 128, PIECES = 8, STARTS = 8;  // rows of a slice; tickets of a slice; starts before the counters
constexpr int WIDE = BN / 8;                        // pieces of 16 bytes in a row of a tile

struct DroplessCombine : Frame<Params, TEAMS> {
    static constexpr int STORERS = 32;
    static constexpr bool WAITS = true;  // for where a peer wants its rows
    static constexpr bool KEEPS = false;
    Ragged& experts;

    __device__ explicit DroplessCombine(const Params& p) : Frame(p), experts(shared_offsets()) {
        read_offsets(experts, p.offsets, p.rows);
    }

    __device__ int tiles() const { return experts.highs[ALL] * ((p.cols + ALONG - 1) / ALONG); }
    __device__ int blocks() const { return blocks_of(p.k); }
    __device__ Tile tile_of(int t) const { return ragged_tile(experts, t, p.cols); }
    // The first tile of a cluster is multiplied in any case, and stored if the cluster goes on.
    __device__ bool waits(int t) const { return t >= clusters; }
    __device__ int* counters(int rank) const { return p.signals[rank] + parity * p.signals_half; }

    __device__ void load_tiles(int tiles) const {
        for (int i = 0; i < TERMS; ++i) prefetch(&p.x[i]), prefetch(&p.w[i]);
        Turn turn;
        each_tile_loaded(*this, tiles, [&](int t) {
            Tile tile = tile_of(t);
            int expert = tile.owner < EXPERTS ? tile.owner : EXPERTS - 1;
            for (int i = 0; i < TERMS; ++i)
                produce<true>(s, turn, {{&p.x[i]}, {&p.w[i], expert}, tile.row, tile.col * BN, 0, p.k[i]});
        });
    }

    // Rows behind the last expert are 0.
    __device__ void before_store(float (&acc)[BN / 2], const Tile& tile) const {
        if (BIASED && tile.owner < EXPERTS)
            add_bias(acc, p.bias + static_cast<int64_t>(tile.owner) * p.n * 2, tile.col * BN, p.n);
#pragma unroll
        for (int i = 0; i < BN / 2; ++i)
            if (tile.owner == EXPERTS) acc[i] = 0;
    }

    // A warp stores the rows of tiles to the ranks that they are for, and counts them there.
    __device__ void store_tiles(int tiles) const {
        constexpr int AT_ONCE = 32 / WIDE;       // rows; a few lanes have none where a row is no power of two
        int lane = threadIdx.x % 32, start = 0;  // lane i: where our part begins in the inbox of rank i, plus 1
        const int* starts = counters(p.rank);
        Staged staged{s};
        bool told = false;
        if (first && lane < W && lane != p.rank) add_release(counters(lane) + p.rank, p.received[lane] + 1);
        each_tile_after<WAITS>(tiles, [&] { return barrier_is_over(s.ready, staged.parity); }, [&](int t) {
            if (!told && (!margin || await(progress().going) == 1) && lane < W && lane != p.rank) {
                wait(starts + lane, 1, WAIT_TELLING, lane, 0);
                start = load_acquire(starts + lane);
            }
            told = true;
            __syncwarp();
            Tile tile = tile_of(t);
            int rows = experts.starts[tile.owner + 1] - tile.row, piece = lane % WIDE, col = tile.col * BN + piece * 8;
            staged.wait();
            if (margin && await(progress().going) != 1) rows = 0;
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
                    to = reinterpret_cast<int64_t>(p.inbox[owner]) + parity * p.inbox_half + (begin - 1 + at) * p.n * 2;
                    counted[c] = counters(owner) + STARTS + p.rank * p.slots + at / SLICE;
                }
                for (int i = 0; i < 32 && c * 32 + i < rows; i += 4 * AT_ONCE) {
                    uint4 held[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        held[j] = load_shared(s.staged + staged_at(c * 32 + i + j * AT_ONCE + lane / WIDE, piece));
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        int64_t there = __shfl_sync(~0u, to, i + j * AT_ONCE + lane / WIDE);
                        if (there && col < p.n && lane < AT_ONCE * WIDE)
                            store(reinterpret_cast<char*>(there) + col * 2, held[j]);
                    }
                }
            }
            named_barrier(STORER_BARRIER, STORERS);
            if (lane == 0) staged.free();
            fence_sys();
#pragma unroll
            for (int c = 0; c < ROWS / 32; ++c) count_rows(counted[c]);
        });
    }

    // A team copies what has arrived, a piece of a slice a ticket.
    template <int SIZE>
    __device__ void exchange(Team<SIZE> team) {
        constexpr int AHEAD = 8;
        int slices = most_slices(), tickets = slices * (W - 1) * PIECES;
        // The rank to name if rows do not come is the one that has not told where rows go.
        for (int r = 1; r < W && tickets && team.leads(); ++r) {
            int source = (p.rank + r) % W;
            wait(counters(p.rank) + source, 1, WAIT_TELLING, source, 0);
        }
        for (Tickets ticket(p, team); ticket.number < tickets; ticket.next()) {
            // All ranks go from expert to expert, and so do rows of parts as they are mostly sorted.
            int source = (p.rank + W - 1 - ticket.number / PIECES % (W - 1)) % W, slice = ticket.number / PIECES / (W - 1);
            int first = p.received[source] + slice * SLICE, left = p.received[source + 1] - first;
            int rows = left < SLICE ? left : SLICE, low = ticket.number % PIECES * (SLICE / PIECES);
            int high = low + SLICE / PIECES < rows ? low + SLICE / PIECES : rows;
            if (low < high && team.leads())
                wait(counters(p.rank) + STARTS + source * p.slots + slice, rows * p.cols, WAIT_COMBINING, source, slice);
            ticket.draw();
            if (team.leads()) trace.stamp(EVENT_WAITED, source, slice);
            int64_t begin = static_cast<int64_t>(first + low) * p.n * 2;
            const char* from = p.inbox[p.rank] + parity * p.inbox_half + begin;
            int count = low < high ? (high - low) * (p.n / 8) : 0;
            for (int i = team.thread; i < count; i += AHEAD * SIZE) {
                uint4 moved[AHEAD];
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (i + a * SIZE < count) moved[a] = load_l2(from + (i + a * SIZE) * 16);
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (i + a * SIZE < count) store(p.out + begin + (i + a * SIZE) * 16, moved[a]);
            }
            if (team.leads()) trace.stamp(EVENT_COPIED, source, slice);
        }
    }

    // Of the longest part that arrives.
    __device__ int most_slices() const {
        int slices = 0;
        for (int source = 0; source < W; ++source) {
            int here = (p.received[source + 1] - p.received[source] + SLICE - 1) / SLICE;
            slices = source != p.rank && here > slices ? here : slices;
        }
        return slices;
    }

    // Also a rank that receives nothing hears from all others in each call.
    template <class Meet>
    __device__ void clear(int thread, int threads, Meet meet) const {
        int* own = counters(p.rank);
        int slices = most_slices();
        if (thread < W && thread != p.rank) wait(own + thread, 1, WAIT_TELLING, thread, 0);
        meet();
        if (thread < STARTS) own[thread] = 0;
        for (int i = thread; i < W * slices; i += threads) own[STARTS + i / slices * p.slots + i % slices] = 0;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) dropless_combine(const __grid_constant__ Params p) {
    run<DroplessCombine>(p);
}
