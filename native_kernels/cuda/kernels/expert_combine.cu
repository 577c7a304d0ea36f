// expert_matmul_all_to_all in one persistent kernel whose warps specialise: one loads, two groups of four multiply, one
// stores rows to the ranks that they are for and signals, and two copy what has arrived into the output, beside the
// tensor cores; the groups join them when they are through.
//
// What it multiplies is a sum of TERMS products, each with a K of its own: a tile goes from one to the next.
//
// Of an inbox [W, columns / 64, rows of a part, 64], where words lie in a row as they were staged, and the counters
// arrived [W, rows * cols], a rank has two halves each. SPANNING: a tile holds rows for several ranks.
#include "comm.cuh"
#include "expert_order.cuh"
#include "gemm.cuh"

struct Params {
    TensorMap x[TERMS], w[TERMS];  // stacks, a matrix an expert
    TensorMap y;                   // our own part of the output, a matrix a run
    char* out;
    const char* bias;
    char* inbox[8];  // of every rank
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t inbox_half;    // bytes
    int64_t signals_half;  // counters
    Runs runs;
    int n, k[TERMS], rank, site, part_rows;
    int rows, cols, visit, programs;  // tiles of a chunk
};

constexpr int COMBINING = 6;
constexpr int SOURCES = SPANNING ? W : W - 1;  // whose rows come through the inbox
constexpr int WIDE = BN / 8, BOXES = BN / 64;

__device__ inline Tile tile_of(const Params& p, int t) {
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    return combined_tile_at(t, me / ALONG, me % ALONG, p.rank, W, p.rows, p.cols, p.visit, ACROSS, ALONG, ORDER,
                            p.runs.group, SPANNING);
}

// Where rows of a part of `source` begin in an inbox, of the 64 columns number `box`.
__device__ inline int64_t inbox_at(const Params& p, int64_t parity, int source, int box, int row) {
    int64_t rows = (static_cast<int64_t>(source) * p.cols * BOXES + box) * p.part_rows + row;
    return parity * p.inbox_half + rows * 128;
}

__device__ void load_tiles(const Params& p, const Shared& s, int block, int tiles) {
    for (int i = 0; i < TERMS; ++i) prefetch(&p.x[i]), prefetch(&p.w[i]);
    Turn turn;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        Rows rows = rows_of(p.runs, tile.row, tile.owner, W, SPANNING);
        for (int i = 0; i < TERMS; ++i)
            produce<true>(s, turn, {&p.x[i], rows.expert}, {&p.w[i], rows.expert}, rows.first, tile.col * BN, 0, p.k[i]);
    }
}

__device__ void store_tiles(const Params& p, const Shared& s, int block, int tiles, int64_t parity) {
    int turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        Rows rows = rows_of(p.runs, tile.row, tile.owner, W, SPANNING);
        int number = (p.rank * p.rows + tile.row) * p.cols + tile.col;
        int boxes = (p.n - tile.col * BN + 63) / 64;
        if (boxes > BOXES) boxes = BOXES;
        uint32_t sent = 0;  // a bit a rank
        barrier_wait(s.ready, turn);
        turn ^= 1;
        for (int r = 0; r < rows.count && boxes > 0;) {
            Run run = run_at(p.runs, rows.expert, rows.first + r, W);
            int count = run.left < rows.count - r ? run.left : rows.count - r;
            for (int i = 0; i < boxes; ++i) {
                uint32_t from = s.staged + (i * HIGH + r) * 128;
                if (!SPANNING && run.owner == p.rank)
                    store_box(&p.y, run.at / p.runs.run, run.at % p.runs.run, tile.col * BN + i * 64, from);
                else
                    store_bulk(p.inbox[run.owner] + inbox_at(p, parity, p.rank, tile.col * BOXES + i, run.at), from,
                               count * 128);
            }
            if (SPANNING || run.owner != p.rank) sent |= 1 << run.owner;
            r += count;
        }
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(s.taken);
        if (!sent) continue;
        bulk_wait();
        fence_proxy();
        fence_sys();
        for (int owner = 0; owner < W; ++owner)
            if (sent >> owner & 1) add_relaxed(p.signals[owner] + parity * p.signals_half + number);
    }
}

// A team of threads copies what arrives for us; who is free takes the next part of a tile.
template <int TEAM>
__device__ void copy_parts(const Params& p, int block, int team, int64_t parity, int epoch, Trace trace) {
    constexpr int AHEAD = 8, PARTS = ROWS / PART;
    __shared__ int tickets_of[3];
    int thread = TEAM == 64 ? threadIdx.x - 64 : threadIdx.x % 128, bar = 1 + team;
    int tiles = p.rows * p.cols, wide = (p.cols + ALONG - 1) / ALONG * ALONG;
    int tickets = SOURCES * p.rows * wide * PARTS;
    int* arrived = p.signals[p.rank] + parity * p.signals_half;
    auto* next = reinterpret_cast<unsigned long long*>(p.state + 5);
    int ticket = block, following = 0;  // the first are given away beforehand
    if (team) {
        if (thread == 0) tickets_of[team] = p.programs + atomicAdd(next, 1ull);
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
    }
    while (ticket < tickets) {
        Tile tile = arriving_tile_at(ticket / PARTS, p.rank, W, SOURCES, p.rows, p.cols, p.visit, ALONG, ORDER,
                                     p.runs.group);
        int source = tile.owner, number = (source * p.rows + tile.row) * p.cols + tile.col;
        Rows rows = rows_of(p.runs, tile.row, p.rank, W, SPANNING);
        int low = ticket % PARTS * PART, high = low + PART < rows.count ? low + PART : rows.count;
        bool is_part = low < high && tile.col < p.cols &&
                       (!SPANNING || has_rows_for(p.runs, p.rank, rows.first + low, high - low, W));
        if (is_part && thread == 0) wait(arrived + number, 1, p.state, p.site * 8 + COMBINING, source, number, epoch);
        named_barrier(bar, TEAM);
        if (thread == 0) {
            following = p.programs + atomicAdd(next, 1ull);
            trace.stamp(WAITED, source, number);
        }
        // A thread copies one word of every so many rows.
        constexpr int STEP = TEAM / WIDE;
        int word = thread % WIDE, col = tile.col * BN + word * 8;
        if (col >= p.n) is_part = false;
        int start = SPANNING ? 0 : run_at(p.runs, rows.expert, rows.first, W).at;
        const char* from = p.inbox[p.rank] + inbox_at(p, parity, source, tile.col * BOXES + word / 8, start);
        char* to = p.out + ((static_cast<int64_t>(source) * p.part_rows + start) * p.n + col) * 2;
        // Row `row` of the tile, counted from `start`; false if it is none of ours.
        auto place = [&](int row, int64_t& at) {
            at = row;
            if (row >= high) return false;
            if (!SPANNING) return true;
            Run run = run_at(p.runs, rows.expert, rows.first + row, W);
            at = run.at;
            return run.owner == p.rank;
        };
        for (int row = low + thread / WIDE; is_part && row < high; row += AHEAD * STEP) {
            uint4 words[AHEAD];
            int64_t at;
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                int r = row + a * STEP;
                if (place(r, at)) words[a] = load_l2(from + at * 128 + (word % 8 ^ r % 8) * 16);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
                if (place(row + a * STEP, at)) store(to + at * p.n * 2, words[a]);
        }
        if (thread == 0) {
            tickets_of[team] = following;
            trace.stamp(COPIED, source, number);
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
            if (thread == 0) finish(p.state, epoch);
        }
    }
    if (thread == 0) trace.stamp(ENDED, p.rank, 0);
}

extern "C" __global__ void __launch_bounds__(384, 1) expert_combine(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = blocks_of(p.k);
    int tiles = (SPANNING ? 1 : W) * p.rows / ACROSS * ((p.cols + ALONG - 1) / ALONG);
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = epoch % 2;
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    // Of the first group, the team that copies.
    if (threadIdx.x % 128 == (group ? 0 : 64)) trace.stamp(BEGUN, p.rank, 0);
    init(s);
    if (group == 0) {
        give_registers<88>();
        if (threadIdx.x == 0)
            load_tiles(p, s, block, tiles);
        else if (threadIdx.x == 32)
            store_tiles(p, s, block, tiles, parity);
        else if (threadIdx.x >= 64)
            copy_parts<64>(p, block, 0, parity, epoch, trace);
    } else {
        take_registers<208>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; group <= GROUPS && t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            Tile tile = tile_of(p, t);
            if (BIASED) add_bias(acc, p.bias + static_cast<int64_t>(tile.row / p.runs.per) * p.n * 2, tile.col * BN, p.n);
            stage(s, acc, group - 1, taken);
            if (threadIdx.x % 128 == 0) trace.stamp(COMPUTED, -1, t * CLUSTER);
        }
        copy_parts<128>(p, block, group, parity, epoch, trace);
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_sync();
}
