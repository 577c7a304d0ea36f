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

constexpr int GATHERING = 3;
constexpr int SENDERS = 2, BUFFERS = 3, PIECE = 2048;  // bytes
constexpr int OWNERS = SPANNING ? 1 : W;

__device__ inline Tile tile_of(const Params& p, int t) {
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    return gathered_tile_at(t, me / ALONG, me % ALONG, p.rank, OWNERS, p.rows, p.cols, p.slice_rows, ACROSS, ALONG,
                            WITHIN);
}

// The row of a part where row `row` of tiles begins.
__device__ inline int row_of(const Params& p, int row) { return row / p.stretch * p.inner + row % p.stretch * BM; }

// One thread of each of SENDERS warps sends pieces of rows by way of its own buffers.
__device__ void send_part(const Params& p, uint32_t memory, int block, int sender, int64_t parity) {
    constexpr int FIRST = SPANNING ? 0 : 1, AHEAD = BUFFERS - 1;
    uint32_t buffers = memory + sender * BUFFERS * PIECE, loaded = memory + SENDERS * BUFFERS * PIECE + sender * BUFFERS * 8;
    int64_t pitch = p.k * 2, there = (parity * p.half_rows + static_cast<int64_t>(p.rank) * p.chunk) * pitch;
    int turn = 0;
    uint32_t phases = 0;
    for (int s = 0; s < p.slices; ++s) {
        int first = row_of(p, s * p.slice_rows);
        int last = s == p.slices - 1 ? p.chunk : row_of(p, (s + 1) * p.slice_rows);
        for (int q = 0; q < p.k_slices; ++q) {
            int start = q * p.k_slice * 2, width = p.k * 2 - start < p.k_slice * 2 ? p.k * 2 - start : p.k_slice * 2;
            int pieces = (width + PIECE - 1) / PIECE, count = (last - first) * pieces, step = p.programs * SENDERS;
            auto piece = [&](int i, int& bytes) {
                int at = i % pieces * PIECE;
                bytes = width - at < PIECE ? width - at : PIECE;
                return (first + i / pieces) * pitch + start + at;
            };
            int begin = block * SENDERS + sender, total = count > begin ? (count - begin + step - 1) / step : 0;
            for (int n = 0; n < total + AHEAD; ++n) {
                int bytes;
                if (n < total) {
                    int to = (turn + n) % BUFFERS;
                    bulk_wait_read();  // of what was sent from there
                    int64_t at = piece(begin + n * step, bytes);
                    barrier_expect(loaded + to * 8, bytes);
                    load_bulk(buffers + to * PIECE, p.part + at, bytes, loaded + to * 8);
                }
                if (n >= AHEAD) {
                    int from = (turn + n - AHEAD) % BUFFERS;
                    int64_t at = piece(begin + (n - AHEAD) * step, bytes);
                    barrier_wait(loaded + from * 8, phases >> from & 1);
                    phases ^= 1 << from;
                    for (int r = FIRST; r < W; ++r)
                        store_bulk(p.memory[(p.rank + r) % W] + there + at, buffers + from * PIECE, bytes);
                    bulk_commit();
                }
            }
            turn = (turn + total) % BUFFERS;
            bulk_wait();
            fence_proxy();
            for (int r = FIRST; r < W; ++r)
                add_release(p.signals[(p.rank + r) % W] + parity * p.signals_half +
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
                    wait(arrived + source * p.slices * p.k_slices + unit, SENDERS * p.programs, p.state,
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
    if (threadIdx.x == 0) {
        for (int i = 0; i < SENDERS * BUFFERS; ++i) barrier_init(s.more + SENDERS * BUFFERS * PIECE + 8 * i, 1);
        init(s);
    }
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
        } else if (threadIdx.x == 64 || threadIdx.x == 96) {
            send_part(p, s.more, block, threadIdx.x / 32 - 2, parity);
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
        last = count(p.state + 6) == p.programs - 1;
    }
    __syncthreads();
    if (last) {
        int* arrived = p.signals[p.rank] + parity * p.signals_half;
        for (int i = threadIdx.x; i < W * p.slices * p.k_slices; i += 384) arrived[i] = 0;
        if (threadIdx.x == 0) finish(p.state, epoch);
    }
    if (CLUSTER > 1) cluster_sync();
}
