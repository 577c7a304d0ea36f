// all_to_all_expert_matmul in one persistent kernel whose warps specialise: one loads what has arrived, two groups of
// four multiply, one stores products, and two send our rows to the ranks of their experts, beside the tensor cores.
//
// Parts go out in slices of rows, to all ranks at once; each has a counter at every receiver. In either half of the
// memory of a rank: the rows of its experts, [E, R = (outer, W, run), K], and the counters arrived [W, slices]. ENGINES:
// copy engines send, into one half, [W, E, outer, run, K]. SPANNING: a tile holds rows of several sources, our own, too.
// Columns of tiles go through all WEIGHTS, which multiply rows while these lie in the L2 cache.
#include "comm.cuh"
#include "expert_order.cuh"
#include "gemm.cuh"

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

constexpr int DISPATCHING = 3;
constexpr int SENDING = 64;  // threads of a block
constexpr int OWNERS = SPANNING ? 1 : W;

__device__ inline Tile tile_of(const Params& p, int t) {
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    return dispatched_tile_at(t, me / ALONG, me % ALONG, p.rank, W, p.rows, p.cols, p.slice_rows, ACROSS, ALONG,
                              WITHIN, p.runs.group, SPANNING);
}

// Two warps of every block store their share of each slice, a row at a time, and signal.
__device__ void send_parts(const Params& p, int block, int64_t parity) {
    constexpr int AHEAD = 8, SENDERS = SENDING / 32;  // warps
    int thread = threadIdx.x - (BM - SENDING), lane = thread % 32, width = p.k / 8;
    int skip = SPANNING || p.keep ? 0 : 1;  // our own part is read where it is
    for (int s = 0; s < p.slices; ++s) {
        int first = part_row_at(p.runs, s * p.slice_rows, SPANNING);
        int last = s == p.slices - 1 ? p.part_rows : part_row_at(p.runs, (s + 1) * p.slice_rows, SPANNING);
        int rows = last - first;
        for (int i = block * SENDERS + thread / 32; i < (W - skip) * rows; i += p.programs * SENDERS) {
            int dest = (p.rank + skip + i / rows) % W, row = first + i % rows;
            const char* from = p.parts + (static_cast<int64_t>(dest) * p.part_rows + row) * p.k * 2;
            char* to = p.memory[dest] + parity * p.half + exchanged_row_at(p.runs, p.rank, row, W) * p.k * 2;
            for (int word = lane; word < width; word += AHEAD * 32) {
                uint4 words[AHEAD];
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (word + a * 32 < width) words[a] = load_l2(from + (word + a * 32) * 16);
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (word + a * 32 < width) store(to + (word + a * 32) * 16, words[a]);
            }
        }
        named_barrier(1, SENDING);
        int peer = (p.rank + thread) % W;
        if (thread >= (SPANNING ? 0 : 1) && thread < W)
            add_release(p.signals[peer] + parity * p.signals_half + p.rank * p.slices + s);
    }
}

__device__ void load_tiles(
    const Params& p, const Shared& s, int block, int tiles, int64_t parity, int epoch, Trace trace) {
    if (!SPANNING) prefetch(&p.x);
    prefetch(&p.exchanged[parity]);
    for (int i = 0; i < WEIGHTS; ++i) prefetch(&p.w[i]);
    Turn turn;
    uint64_t heard = 0;  // slices that have come, a byte a source: they come in their order
    const int* arrived = p.signals[p.rank] + parity * p.signals_half;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
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
            wait(arrived + source * p.slices + slice, ENGINES ? 1 : p.programs, p.state, p.site * 8 + DISPATCHING,
                 source, slice, epoch);
            fence_proxy();
            heard = heard & ~(255ull << source * 8) | static_cast<uint64_t>(slice + 1) << source * 8;
            trace.stamp(WAITED, source, slice);
        }
        Column at = column_at(tile.col, p.cols, WEIGHTS);
        produce<true>(s, turn, x, {&p.w[at.weight], expert}, i % p.runs.stretch * ROWS, at.col * BN, 0, p.k);
    }
}

__device__ void store_tiles(const Params& p, const Shared& s, int block, int tiles) {
    int turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        int expert = tile.row / p.runs.per, i = tile.row % p.runs.per;
        int matrix = SPANNING ? expert : (expert * p.runs.outer + i / p.runs.stretch) * W + tile.owner;
        Column at = column_at(tile.col, p.cols, WEIGHTS);
        barrier_wait(s.ready, turn);
        turn ^= 1;
        for (int j = 0; j < BN / 64; ++j)
            store_box(&p.y[at.weight], matrix, i % p.runs.stretch * ROWS, at.col * BN + j * 64,
                      s.staged + j * HIGH * 128);
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(s.taken);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) expert_dispatch(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    __shared__ bool last;
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = (p.k + BK - 1) / BK;
    int tiles = (WITHIN ? OWNERS : W / ACROSS) * (WITHIN ? p.rows / ACROSS : p.rows) * ((p.cols + ALONG - 1) / ALONG);
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = ENGINES ? 0 : epoch % 2;  // copy engines know no epoch: they store once, and again with credit
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    if (threadIdx.x % 128 == 0) trace.stamp(BEGUN, p.rank, 0);
    init(s);
    if (group == 0) {
        give_registers<88>();
        if (threadIdx.x == 0) {
            load_tiles(p, s, block, tiles, parity, epoch, trace);
        } else if (threadIdx.x == 32) {
            store_tiles(p, s, block, tiles);
        } else if (!ENGINES && threadIdx.x >= BM - SENDING) {
            send_parts(p, block, parity);
        }
    } else {
        take_registers<208>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; group <= GROUPS && t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            Tile tile = tile_of(p, t);
            Column at = column_at(tile.col, p.cols, WEIGHTS);
            int64_t expert = tile.row / p.runs.per;
            if (BIASED) add_bias(acc, p.bias[at.weight] + expert * p.n * 2, at.col * BN, p.n);
            stage(s, acc, group - 1, taken);
            if (threadIdx.x % 128 == 0) trace.stamp(COMPUTED, tile.owner, t);
        }
        if (threadIdx.x % 128 == 0) trace.stamp(ENDED, p.rank, 0);
    }
    __syncwarp();
    __syncthreads();
    // The last program sets all counters back to 0, and ends the epoch.
    if (threadIdx.x == 0) last = count(p.state + 6) == p.programs - 1;
    __syncthreads();
    if (last) {
        int* arrived = p.signals[p.rank] + parity * p.signals_half;
        for (int i = threadIdx.x; i < W * p.slices; i += 384) arrived[i] = 0;
        __syncthreads();
        if (ENGINES && threadIdx.x < W) {
            if (!p.keep && threadIdx.x != p.rank) add_release(p.signals[threadIdx.x] + p.credit + p.rank);
            if (given_up(p.state)) p.signals[p.rank][p.credit + threadIdx.x] = 1;
        }
        if (threadIdx.x == 0) finish(p.state, epoch);
    }
    if (CLUSTER > 1) cluster_sync();
}
