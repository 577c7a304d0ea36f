// all_to_all_expert_matmul of experts with any number of rows: as expert_dispatch.cu, but for how tiles are found and
// where rows go. How many rows an expert has, and which of those that arrive, only the device knows.
//
// Each rank first tells the others which row of X each of theirs becomes (places [W, slot] in their memory); they store
// it there. Of X [rows, K], and of the words told [8] and arrived [rows / 128], which counts rows of X, a rank has two
// halves each. Columns of tiles go through all WEIGHTS, which multiply rows while these lie in the L2 cache.
#include "comm.cuh"
#include "gemm.cuh"
#include "ragged.cuh"

struct Params {
    TensorMap exchanged[2];  // our X, a stack of one
    TensorMap w[MOST_WEIGHTS];  // a matrix an expert
    char* out[MOST_WEIGHTS];
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
    int64_t places_half, signals_half;  // words
    int sent[9], received[9];           // where parts begin in `parts`, and among the rows that arrive
    int rows, n, k, rank, site, slot, cols, programs;  // cols: of tiles, of all weights
};

constexpr int DISPATCHING = 3, TELLING = 0;
constexpr int BLOCK = 128, STARTS = 8;  // rows of X that a word counts
constexpr int SENDING = 64;             // threads of a block
constexpr int WIDE = BN / 8;

__device__ inline int rows_of_block(const Params& p, int b) {
    return p.rows - b * BLOCK < BLOCK ? p.rows - b * BLOCK : BLOCK;
}

// Two warps of every block tell the others where their rows go, and store ours where they have told us.
__device__ void send_rows(const Params& p, int block, int64_t parity, int epoch) {
    constexpr int AHEAD = 8, RUN = 8, SENDERS = SENDING / 32;  // rows at a time, warps
    int thread = threadIdx.x - (BM - SENDING), lane = thread % 32, width = p.k / 8;
    for (int i = block * SENDING + thread; i < p.rows; i += p.programs * SENDING) {
        int64_t at = p.positions ? p.positions[i] : i;
        if (at < 0 || at >= p.received[W]) continue;
        int source = 0;
        for (int rank = 1; rank < W; ++rank) source += at >= p.received[rank];
        store(p.places[source] + parity * p.places_half + p.rank * p.slot + (at - p.received[source]), i);
    }
    named_barrier(1, SENDING);
    if (thread < W) add_release(p.signals[thread] + parity * p.signals_half + p.rank);
    int chunks = 0;
    for (int dest = 0; dest < W; ++dest) {
        int here = (p.sent[dest + 1] - p.sent[dest] + RUN - 1) / RUN;
        chunks = here > chunks ? here : chunks;
    }
    uint32_t heard = 0;  // a bit a rank
    for (int i = block * SENDERS + thread / 32; i < chunks * W; i += p.programs * SENDERS) {
        int dest = (p.rank + 1 + i % W) % W, first = i / W * RUN, left = p.sent[dest + 1] - p.sent[dest] - first;
        int rows = left < RUN ? left : RUN;
        if (rows <= 0) continue;
        if (!(heard >> dest & 1) && lane == 0)
            wait(p.signals[p.rank] + parity * p.signals_half + dest, p.programs, p.state, p.site * 8 + TELLING, dest, 0,
                 epoch);
        heard |= 1 << dest;
        named_barrier(2 + thread / 32, 32);
        int place = -1;
        if (lane < rows) place = load_l2(p.places[p.rank] + parity * p.places_half + dest * p.slot + first + lane);
        if (place >= (p.half / (p.k * 2))) place = -1;  // where nobody has told us, after a failure
        for (int r = 0; r < rows; ++r) {
            int64_t row = __shfl_sync(~0u, place, r);
            if (row < 0) continue;
            const char* from = p.parts + static_cast<int64_t>(p.sent[dest] + first + r) * p.k * 2;
            char* to = p.memory[dest] + parity * p.half + row * p.k * 2;
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
        named_barrier(2 + thread / 32, 32);
        fence_sys();
        count_rows(place < 0 ? nullptr : p.signals[dest] + parity * p.signals_half + STARTS + place / BLOCK);
    }
}

__device__ void load_tiles(
    const Params& p, const Shared& s, const Ragged& r, int block, int tiles, int64_t parity, int epoch, Trace trace) {
    prefetch(&p.exchanged[parity]);
    for (int i = 0; i < WEIGHTS; ++i) prefetch(&p.w[i]);
    Turn turn;
    const int* arrived = p.signals[p.rank] + parity * p.signals_half + STARTS;
    int known = 0, known_end = 0;  // blocks of X that have come
    // A block does not say whose rows are missing: a rank that is lost is named here.
    for (int r = 1; r < W && block / CLUSTER < tiles; ++r) {
        int source = (p.rank + r) % W;
        wait(arrived - STARTS + source, p.programs, p.state, p.site * 8 + TELLING, source, 0, epoch);
    }
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = ragged_tile(r, t, p.cols);
        int end = r.starts[tile.owner + 1] < tile.row + ROWS ? r.starts[tile.owner + 1] : tile.row + ROWS;
        int first = tile.row / BLOCK, last = tile.owner < EXPERTS ? (end + BLOCK - 1) / BLOCK : first;
        for (int b = first; b < last; ++b) {
            if (b >= known && b < known_end) continue;
            wait(arrived + b, rows_of_block(p, b), p.state, p.site * 8 + DISPATCHING, p.rank, b, epoch);
            fence_proxy();
            trace.stamp(WAITED, -1, b);
        }
        if (first < last) known = first, known_end = last;
        int expert = tile.owner < EXPERTS ? tile.owner : EXPERTS - 1;
        Column at = column_at(tile.col, p.cols, WEIGHTS);
        produce<true>(s, turn, {&p.exchanged[parity]}, {&p.w[at.weight], expert}, tile.row, at.col * BN, 0, p.k);
    }
}

// A warp stores the rows of tiles: an expert may end in the middle of one.
__device__ void store_tiles(const Params& p, const Shared& s, const Ragged& r, int block, int tiles) {
    constexpr int AT_ONCE = 32 / WIDE;  // rows
    int lane = threadIdx.x % 32, turn = 0;
    for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) {
        Tile tile = ragged_tile(r, t, p.cols);
        int left = r.starts[tile.owner + 1] - tile.row, rows = left < ROWS ? left : ROWS;
        Column at = column_at(tile.col, p.cols, WEIGHTS);
        int word = lane % WIDE, col = at.col * BN + word * 8;
        char* to = p.out[at.weight] + (static_cast<int64_t>(tile.row) * p.n + col) * 2;
        barrier_wait(s.ready, turn);
        turn ^= 1;
        for (int row = lane / WIDE; row < rows && col < p.n; row += 4 * AT_ONCE) {
            uint4 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row + j * AT_ONCE < rows) words[j] = load_shared(s.staged + staged_at(row + j * AT_ONCE, word));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row + j * AT_ONCE < rows) store(to + static_cast<int64_t>(row + j * AT_ONCE) * p.n * 2, words[j]);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(s.taken);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) dropless_dispatch(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    __shared__ Ragged r;
    __shared__ bool last;
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, blocks = (p.k + BK - 1) / BK;
    int epoch = static_cast<int>(p.state[3]) + 1;
    int64_t parity = epoch % 2;
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    if (threadIdx.x % 128 == 0) trace.stamp(BEGUN, p.rank, 0);
    read_offsets(r, p.offsets, p.rows);
    init(s);
    int tiles = r.highs[ALL] * ((p.cols + ALONG - 1) / ALONG);
    if (group == 0) {
        give_registers<88>();
        if (threadIdx.x == 0)
            load_tiles(p, s, r, block, tiles, parity, epoch, trace);
        else if (threadIdx.x >= 32 && threadIdx.x < 64)
            store_tiles(p, s, r, block, tiles);
        else if (threadIdx.x >= BM - SENDING)
            send_rows(p, block, parity, epoch);
    } else {
        take_registers<208>();
        Turn turn;
        int taken = 0;
        for (int t = block / CLUSTER; group <= GROUPS && t < tiles; t += p.programs / CLUSTER) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            Tile tile = ragged_tile(r, t, p.cols);
            Column at = column_at(tile.col, p.cols, WEIGHTS);
            if (BIASED && tile.owner < EXPERTS)
                add_bias(acc, p.bias[at.weight] + static_cast<int64_t>(tile.owner) * p.n * 2, at.col * BN, p.n);
#pragma unroll
            for (int i = 0; i < BN / 2; ++i)
                if (tile.owner == EXPERTS) acc[i] = 0;
            stage(s, acc, group - 1, taken);
            if (threadIdx.x % 128 == 0) trace.stamp(COMPUTED, tile.owner, t);
        }
        if (threadIdx.x % 128 == 0) trace.stamp(ENDED, p.rank, 0);
    }
    __syncwarp();
    __syncthreads();
    // The last program hears of all others and of all rows, sets all words back to 0, and ends the epoch.
    if (threadIdx.x == 0) last = count(p.state + 6) == p.programs - 1;
    __syncthreads();
    if (last) {
        int* words = p.signals[p.rank] + parity * p.signals_half;
        for (int i = threadIdx.x; i < STARTS + (p.rows + BLOCK - 1) / BLOCK; i += 384) {
            int b = i - STARTS;
            if (b >= 0)
                wait(words + i, rows_of_block(p, b), p.state, p.site * 8 + DISPATCHING, p.rank, b, epoch);
            else if (i < W)
                wait(words + i, p.programs, p.state, p.site * 8 + TELLING, i, 0, epoch);
            words[i] = 0;
        }
        __syncthreads();
        if (threadIdx.x == 0) finish(p.state, epoch);
    }
    if (CLUSTER > 1) cluster_sync();
}
