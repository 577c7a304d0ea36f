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
    char* part;
    char* out;
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
    int out_pitch, programs;                     // bytes of a row of the output
};

constexpr int GATHERING = 3, MOVING = 64;  // threads that move
constexpr int OWNERS = SPANNING ? 1 : W;

__device__ inline Tile tile_of(const Params& p, int t) {
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    return gathered_tile_at(t, me / ALONG, me % ALONG, p.rank, OWNERS, p.rows, p.cols, p.slice_rows, ACROSS, ALONG,
                            WITHIN);
}

// The row of a part where row `row` of tiles begins.
__device__ inline int row_of(const Params& p, int row) { return row / p.stretch * p.inner + row % p.stretch * BM; }

__device__ void send_part(const Params& p, int block, int64_t parity) {
    constexpr int AHEAD = 4, FIRST = SPANNING ? 0 : 1;
    int thread = threadIdx.x - 64, pitch = p.k * 2;
    for (int s = 0; s < p.slices; ++s) {
        int first = row_of(p, s * p.slice_rows);
        int last = s == p.slices - 1 ? p.chunk : row_of(p, (s + 1) * p.slice_rows);
        for (int q = 0; q < p.k_slices; ++q) {
            int start = q * p.k_slice, width = (p.k - start < p.k_slice ? p.k - start : p.k_slice) / 8;
            int count = (last - first) * width, step = p.programs * MOVING;
            for (int i = block * MOVING + thread; i < count; i += AHEAD * step) {
                uint4 words[AHEAD];
                int64_t at[AHEAD];
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    int j = i + a * step;
                    at[a] = static_cast<int64_t>(first + j / width) * pitch + (start + j % width * 8) * 2;
                    if (j < count) words[a] = load_l2(p.part + at[a]);
                }
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    if (i + a * step >= count) break;
                    int64_t to = at[a] + (parity * p.half_rows + static_cast<int64_t>(p.rank) * p.chunk) * pitch;
#pragma unroll
                    for (int r = FIRST; r < W; ++r) store(p.memory[(p.rank + r) % W] + to, words[a]);
                }
            }
            named_barrier(1, MOVING);
            if (thread >= FIRST && thread < W)
                add_release(p.signals[(p.rank + thread) % W] + parity * p.signals_half +
                            (p.rank * p.slices + s) * p.k_slices + q);
        }
    }
}

__device__ void load_tiles(const Params& p, const Shared& s, int block, int tiles, int64_t parity, int epoch) {
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
                    wait(arrived + source * p.slices * p.k_slices + unit, p.programs, p.state,
                         p.site * 8 + GATHERING, source, unit, epoch);
                }
                fence_proxy();
            }
            int k = q * p.k_slice, last = k + p.k_slice < p.k ? k + p.k_slice : p.k;
            produce(s, turn, own ? &p.x : &p.gathered, &p.w, row, tile.col * BN, k, last);
        }
    }
}

__device__ void store_tiles(const Params& p, const Shared& s, int block, int tiles) {
    int lane = threadIdx.x % 32, turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_of(p, t);
        barrier_wait(s.ready, turn);
        turn ^= 1;
        int width = (p.n - tile.col * BN) * 2;
        width = width < BN * 2 ? width : BN * 2;
        if (width > 0 && tile.row < p.rows) {
            for (int i = lane; i < BM; i += 32) {
                int low = tile.row % p.stretch * BM + i;
                int to = (tile.row / p.stretch * OWNERS + tile.owner) * p.inner + low;
                if (low < p.inner && to < p.m)
                    store_bulk(p.out + static_cast<int64_t>(to) * p.out_pitch + tile.col * BN * 2,
                               s.staged + i * PITCH, width);
            }
        }
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(s.taken);
    }
    bulk_wait();
}

extern "C" __global__ void __launch_bounds__(384, 1) gather_matmul(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    __shared__ bool last;
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = (p.k + BK - 1) / BK, wide = (p.cols + ALONG - 1) / ALONG;
    int tiles = WITHIN ? W * ((p.rows + ACROSS - 1) / ACROSS) * wide : OWNERS / ACROSS * p.rows * wide;
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = epoch % 2;
    if (threadIdx.x == 0) init(s);
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    if (threadIdx.x % 128 == 0) trace.stamp(BEGUN, p.rank, 0);
    if (group == 0) {
        give_registers<72>();
        if (threadIdx.x == 0) {
            load_tiles(p, s, block, tiles, parity, epoch);
        } else if (threadIdx.x / 32 == 1) {
            store_tiles(p, s, block, tiles);
        } else if (threadIdx.x >= 64) {
            send_part(p, block, parity);
        }
    } else {
        take_registers<216>();
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
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(reinterpret_cast<unsigned long long*>(p.state + 6), 1ull) == p.programs - 1;
        __threadfence();
    }
    __syncthreads();
    if (last) {
        int* arrived = p.signals[p.rank] + parity * p.signals_half;
        for (int i = threadIdx.x; i < W * p.slices * p.k_slices; i += 384) arrived[i] = 0;
        if (threadIdx.x == 0) finish(p.state, epoch);
    }
    if (CLUSTER > 1) cluster_sync();
}
