// matmul_all_reduce and matmul_reduce_scatter, as native_kernels/triton/matmul_reduce.py, in one persistent kernel
// whose warps specialise: one loads, two groups of four multiply, one stores tiles to their owners and signals, and
// four add up what has arrived and send the sums, beside the tensor cores.
//
// Of an inbox [W, height, pitch] and finished [W, height, pitch] (all_reduce) a rank has two halves each, and of the
// counters arrived [W, rows * cols], ready [W, rows * cols * PARTS]. SPANNING: a tile holds rows of all owners.
#include "comm.cuh"
#include "gemm.cuh"
#include "order.cuh"

struct Params {
    TensorMap x, w;
    char* out;
    char* inbox[8];     // of every rank
    char* finished[8];
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t inbox_half, finished_half;  // bytes
    int64_t signals_half;               // counters
    int m, n, k, rank, site;
    int chunk_rows, stretch, rows, cols;  // rows of a chunk and stretch; tiles of a stretch, and of a chunk
    int height, pitch, out_pitch;         // rows of a chunk in the inbox; bytes of a row there, and of the output
    int visit, lag, programs;
};

constexpr int PARTS = HEIGHT / PART;  // of a tile; HEIGHT rows of it have one owner
constexpr int REDUCING = 1, COPYING = 2;

// The row of the output, of all ranks, that row `row` of the chunk of `owner` is; -1 if it is none.
__device__ inline int row_at(const Params& p, int owner, int row) {
    int high = row / (p.stretch * HEIGHT), low = row % (p.stretch * HEIGHT);
    int at = (high * W + owner) * p.chunk_rows + low;
    return low < p.chunk_rows && at < p.m ? at : -1;
}

// Of all ranks' words, in their order, fp32, rounded once.
__device__ inline uint4 sum(const uint4 (&words)[W]) {
    float total[8] = {};
#pragma unroll
    for (int r = 0; r < W; ++r) {
        const uint32_t word[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            total[2 * e] += low_of(word[e]);
            total[2 * e + 1] += high_of(word[e]);
        }
    }
    constexpr float SCALE = MEAN ? 1.0f / W : 1.0f;
    return {pair(total[0] * SCALE, total[1] * SCALE), pair(total[2] * SCALE, total[3] * SCALE),
            pair(total[4] * SCALE, total[5] * SCALE), pair(total[6] * SCALE, total[7] * SCALE)};
}

__device__ void load_tiles(const Params& p, const Shared& s, int block, int tiles) {
    prefetch(&p.x);
    prefetch(&p.w);
    Turn turn;
    int me = CLUSTER > 1 ? cluster_rank() : 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_at(t, me / ALONG, me % ALONG, p.rank, SPANNING ? 1 : W, p.rows, p.cols, p.visit, ACROSS,
                            ALONG, ORDER);
        int row = (tile.row / p.stretch * W + tile.owner) * p.chunk_rows + tile.row % p.stretch * BM;
        produce(s, turn, &p.x, &p.w, SPANNING ? 0 : row, tile.col * BN, 0, p.k);
    }
}

__device__ void store_tiles(const Params& p, const Shared& s, int block, int tiles, int64_t parity) {
    int me = CLUSTER > 1 ? cluster_rank() : 0, lane = threadIdx.x % 32;
    int turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = tile_at(t, me / ALONG, me % ALONG, p.rank, SPANNING ? 1 : W, p.rows, p.cols, p.visit, ACROSS,
                            ALONG, ORDER);
        barrier_wait(s.ready, turn);
        turn ^= 1;
        int width = (p.n - tile.col * BN) * 2;
        width = width < BN * 2 ? width : BN * 2;
        if (width > 0) {
            for (int i = lane; i < BM; i += 32) {
                int owner = SPANNING ? i / HEIGHT : tile.owner;
                int row = SPANNING ? i % HEIGHT : tile.row * BM + i;
                if (owner >= W || row_at(p, owner, row) < 0) continue;
                int64_t to = parity * p.inbox_half + static_cast<int64_t>(p.rank * p.height + row) * p.pitch;
                store_bulk(p.inbox[owner] + to + tile.col * BN * 2, s.staged + i * PITCH, width);
            }
        }
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(s.taken);
        bulk_wait();
        fence_proxy();
        __syncwarp();
        int owner = SPANNING ? lane : tile.owner;
        int64_t counter = parity * p.signals_half + (p.rank * p.rows + tile.row) * p.cols + tile.col;
        if (tile.col < p.cols && (SPANNING ? lane < W : lane == 0)) add_release(p.signals[owner] + counter);
    }
}

// A team of threads adds parts of our own chunk up and sends the sums, and copies those that peers send. Parts come in
// the order in which they are complete; who is free takes the next.
template <int TEAM>
__device__ void reduce_parts(const Params& p, const Shared& s, int block, int team, int64_t parity, int epoch, Trace trace) {
    constexpr int SOURCES = ALL ? W : 1, WIDE = BN / 8;  // words of 16 bytes in a row
    __shared__ int tickets_of[3];
    // The groups that have multiplied use the memory of blocks of x and of the weight.
    uint32_t buffer = team ? s.stages + (team - 1) * PART * BN * 2 : s.more;
    int thread = TEAM == 64 ? threadIdx.x - 64 : threadIdx.x % 128, bar = 1 + team;
    int tiles = p.rows * p.cols, parts = tiles * PARTS;
    int* arrived = p.signals[p.rank] + parity * p.signals_half;
    int* ready = arrived + W * tiles;
    int64_t slot = static_cast<int64_t>(p.height) * p.pitch;
    const char* inbox = p.inbox[p.rank] + parity * p.inbox_half;
    int64_t finished = parity * p.finished_half;
    bool mixed = p.lag < parts;
    int tickets = (mixed ? parts + p.lag : parts) * SOURCES;
    auto* next = reinterpret_cast<unsigned long long*>(p.state + 5);
    int ticket = block, following = 0;  // the first are given away beforehand
    if (team) {
        if (thread == 0) tickets_of[team] = p.programs + atomicAdd(next, 1ull);
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
    }
    while (ticket < tickets) {
        // Number i of our own parts, or number i - lag of a peer's; of few, all of our own first.
        int away = ticket % SOURCES, i = ticket / SOURCES - (away ? p.lag : 0);
        if (!mixed) {
            int copied = ticket - parts;
            away = copied < 0 ? 0 : 1 + copied % (SOURCES > 1 ? SOURCES - 1 : 1);
            i = copied < 0 ? ticket : copied / (SOURCES > 1 ? SOURCES - 1 : 1);
        }
        bool is_part = i >= 0 && i < parts;
        int source = (p.rank + away) % W;
        Tile at = chunk_tile_at(is_part ? i / PARTS : 0, p.rows, p.cols);
        int tile = at.row * p.cols + at.col, part = tile * PARTS + i % PARTS;
        if (is_part && away == 0) {
            if (thread < W) wait(arrived + thread * tiles + tile, 1, p.state, p.site * 8 + REDUCING, thread, tile, epoch);
        } else if (is_part && thread == 0) {
            wait(ready + source * parts + part, 1, p.state, p.site * 8 + COPYING, source, part, epoch);
            ready[source * parts + part] = 0;
        }
        named_barrier(bar, TEAM);
        if (thread == 0) {
            following = p.programs + atomicAdd(next, 1ull);
            trace.stamp(WAITED, away ? source : -1, part);
        }
        int first = at.row * HEIGHT + i % PARTS * PART;
        auto place = [&](int j, int64_t& here) {
            int row = first + j / WIDE, col = at.col * BN + j % WIDE * 8;
            here = static_cast<int64_t>(row) * p.pitch + col * 2;
            int to = row_at(p, source, row);
            if (to < 0 || col >= p.n) return static_cast<char*>(nullptr);
            if (!ALL) to = row / (p.stretch * HEIGHT) * p.chunk_rows + row % (p.stretch * HEIGHT);
            return p.out + static_cast<int64_t>(to) * p.out_pitch + col * 2;
        };
        if (is_part && away == 0) {
#pragma unroll 2
            for (int j = thread; j < PART * WIDE; j += TEAM) {
                int64_t here;
                char* to = place(j, here);
                if (!to) continue;
                uint4 words[W];
#pragma unroll
                for (int r = 0; r < W; ++r) words[r] = load_l2(inbox + r * slot + here);
                uint4 value = sum(words);
                store(to, value);
                if (ALL) store_shared(buffer + j * 16, value);
            }
            if (ALL) {
                fence_proxy_shared();
                named_barrier(bar, TEAM);
                int width = (p.n - at.col * BN) * 2;
                width = width < BN * 2 ? width : BN * 2;
                for (int j = thread; j < PART; j += TEAM) {
                    int64_t to = finished + p.rank * slot + static_cast<int64_t>(first + j) * p.pitch + at.col * BN * 2;
                    for (int r = 1; r < W; ++r)
                        store_bulk(p.finished[(p.rank + r) % W] + to, buffer + j * BN * 2, width);
                }
                bulk_commit();
                bulk_wait();
                fence_proxy();
            }
        } else if (is_part) {
            const char* from = p.finished[p.rank] + finished + source * slot;
#pragma unroll 4
            for (int j = thread; j < PART * WIDE; j += TEAM) {
                int64_t here;
                char* to = place(j, here);
                if (to) store(to, load_l2(from + here));
            }
        }
        if (thread == 0) {
            tickets_of[team] = following;
            trace.stamp(away ? COPIED : REDUCED, source, part);
        }
        named_barrier(bar, TEAM);
        ticket = tickets_of[team];
        if (ALL && is_part && away == 0 && thread > 0 && thread < W)
            add_release(p.signals[(p.rank + thread) % W] + parity * p.signals_half + W * tiles + p.rank * parts + part);
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

extern "C" __global__ void __launch_bounds__(384, 1) matmul_reduce(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = (p.k + BK - 1) / BK;
    int tiles = (SPANNING ? 1 : W / ACROSS) * p.rows * ((p.cols + ALONG - 1) / ALONG);
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = epoch % 2;
    if (threadIdx.x == 0) init(s);
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    if (group == 0) {
        give_registers<72>();
        if (threadIdx.x == 0)
            load_tiles(p, s, block, tiles);
        else if (threadIdx.x / 32 == 1)
            store_tiles(p, s, block, tiles, parity);
        else if (threadIdx.x >= 64)
            reduce_parts<64>(p, s, block, 0, parity, epoch, trace);
    } else {
        take_registers<216>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            stage(s, acc, group - 1, taken);
            if (threadIdx.x % 128 == 0) trace.stamp(COMPUTED, -1, t);
        }
        reduce_parts<128>(p, s, block, group, parity, epoch, trace);
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_sync();
}
