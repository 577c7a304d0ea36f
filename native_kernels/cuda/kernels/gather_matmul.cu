// all_gather_matmul, as native_kernels/triton/gather_matmul.py, in one persistent kernel whose warps specialise: one
// loads what has arrived, two groups of four multiply, one stores products, and two send our own part to all peers,
// beside the tensor cores.
//
// Parts go out in slices of rows and, within these, of K; each has a counter at every receiver. In either half of the
// memory of a rank: gathered [W, C, K], and the counters arrived [W, slices, k_slices]. SPANNING: a tile holds rows of
// all parts, and our own is stored among them, too.
#include "comm.cuh"
#include "gemm.cuh"
#include "order.cuh"

struct Params {
    TensorMap x, gathered, w;  // our own part; our own memory, both halves; the weight
    TensorMap y;               // the output, as [outer * W, inner, N]
    char* part;
    const char* bias;
    char* memory[8];  // of every rank
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t signals_half;  // counters
    int m, n, k, rank, site;
    int chunk, inner, stretch, rows, cols;       // rows of a part and stretch; tiles of a stretch, and of a part
    int half_rows;                               // rows of the memory before its second half
    int slice_rows, slices, k_slice, k_slices;   // rows of tiles in a slice, elements of K in a slice
    int credit, gives_credit, programs;  // where, among counters, peers are told that they may store again; whether here
};

constexpr int SENDING = 64;  // threads of a block
constexpr int OWNERS = SPANNING ? 1 : W;

__device__ inline Tile tile_of(const Params& p, int t) {
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    return gathered_tile_at(t, me / ALONG, me % ALONG, p.rank, OWNERS, p.rows, p.cols, p.slice_rows, ACROSS, ALONG,
                            WITHIN);
}

// The row of a part where row `row` of tiles begins.
__device__ inline int row_of(const Params& p, int row) { return row / p.stretch * p.inner + row % p.stretch * BM; }

// Two warps of every block store their share of each slice to all peers, and signal.
__device__ void send_part(const Params& p, int block, int64_t parity) {
    constexpr int AHEAD = 8, FIRST = SPANNING ? 0 : 1;
    int thread = threadIdx.x - (BM - SENDING), pitch = p.k * 2;
    int64_t there = (parity * p.half_rows + static_cast<int64_t>(p.rank) * p.chunk) * pitch;
    for (int unit = 0; unit < p.slices * p.k_slices; ++unit) {
        int s = unit / p.k_slices, start = unit % p.k_slices * p.k_slice;
        int first = row_of(p, s * p.slice_rows);
        int last = s == p.slices - 1 ? p.chunk : row_of(p, (s + 1) * p.slice_rows);
        int width = (p.k - start < p.k_slice ? p.k - start : p.k_slice) / 8;
        int count = (last - first) * width, step = p.programs * SENDING;
        for (int i = block * SENDING + thread; i < count; i += AHEAD * step) {
            uint4 words[AHEAD];
            auto at = [&](int a) {
                int j = i + a * step;
                return static_cast<int64_t>(first + j / width) * pitch + (start + j % width * 8) * 2;
            };
#pragma unroll
            for (int a = 0; a < AHEAD; ++a)
                if (i + a * step < count) words[a] = load_l2(p.part + at(a));
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (i + a * step >= count) break;
                int64_t to = there + at(a);
#pragma unroll
                for (int r = FIRST; r < W; ++r) store(p.memory[(p.rank + r) % W] + to, words[a]);
            }
        }
        named_barrier(1, SENDING);
        int peer = (p.rank + thread) % W;
        if (thread >= FIRST && thread < W)
            add_release(p.signals[peer] + parity * p.signals_half + p.rank * p.slices * p.k_slices + unit);
    }
}

__device__ void load_tiles(
    const Params& p, const Shared& s, int block, int tiles, int64_t parity, int epoch, Trace trace) {
    prefetch(&p.x);
    prefetch(&p.gathered);
    prefetch(&p.w);
    Turn turn;
    const int* arrived = p.signals[p.rank] + parity * p.signals_half;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        bool own = !SPANNING && tile.owner == p.rank;
        int row = row_of(p, tile.row), slice = tile.row / p.slice_rows;
        if (!own) row += parity * p.half_rows + tile.owner * p.chunk;
        for (int q = 0; q < p.k_slices; ++q) {
            if (!own && slice < p.slices) {
                for (int r = 0; r < (SPANNING ? W : 1); ++r) {
                    int source = SPANNING ? (p.rank + r) % W : tile.owner, unit = slice * p.k_slices + q;
                    wait(arrived + source * p.slices * p.k_slices + unit, ENGINES ? 1 : p.programs, p.state,
                         p.site * 8 + GATHERING, source, unit, epoch);
                }
                fence_proxy();
                trace.stamp(WAITED, SPANNING ? -1 : tile.owner, slice * p.k_slices + q);
            }
            int k = q * p.k_slice, last = k + p.k_slice < p.k ? k + p.k_slice : p.k;
            produce(s, turn, {own ? &p.x : &p.gathered}, {&p.w}, row, tile.col * BN, k, last);
        }
    }
}

__device__ void store_tiles(const Params& p, const Shared& s, int block, int tiles) {
    int turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        barrier_wait(s.ready, turn);
        turn ^= 1;
        if (tile.row < p.rows)
            for (int i = 0; i < BN / 64; ++i)
                store_box(&p.y, tile.row / p.stretch * OWNERS + tile.owner, tile.row % p.stretch * BM,
                          tile.col * BN + i * 64, s.staged + i * BM * 128);
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(s.taken);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) gather_matmul(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    __shared__ bool last;
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = (p.k + BK - 1) / BK, wide = (p.cols + ALONG - 1) / ALONG;
    int tiles = WITHIN ? W * ((p.rows + ACROSS - 1) / ACROSS) * wide : OWNERS / ACROSS * p.rows * wide;
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
            send_part(p, block, parity);
        }
    } else {
        take_registers<208>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            Tile tile = tile_of(p, t);
            if (BIASED) add_bias(acc, p.bias, tile.col * BN, p.n);
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
        for (int i = threadIdx.x; i < W * p.slices * p.k_slices; i += 384) arrived[i] = 0;
        __syncthreads();
        if (ENGINES && threadIdx.x < W) {
            if (p.gives_credit && threadIdx.x != p.rank) add_release(p.signals[threadIdx.x] + p.credit + p.rank);
            if (given_up(p.state)) p.signals[p.rank][p.credit + threadIdx.x] = 1;
        }
        if (threadIdx.x == 0) finish(p.state, epoch);
    }
    if (CLUSTER > 1) cluster_sync();
}
