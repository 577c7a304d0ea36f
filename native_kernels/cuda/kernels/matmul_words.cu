// matmul_all_reduce and matmul_reduce_scatter in one kernel over gemm.cuh, for products of a few waves of tiles. Each rank
// multiplies, and sends the rows of its product to the owners of these rows as flag-in-payload words (words.cuh). An owner adds
// up the rows of all ranks once its block has multiplied its last tile. Of an all_reduce, it sends the sums to all ranks as
// words.
//
// Each half of a rank's words holds parts [W, height, n] by source and, of an all_reduce, sums [W, height, n] by owner; owner r
// has the rows from r * height on. ONCE: each rank sends its whole product to all ranks, and every rank adds up all rows.
//
// A product is a sum of TERMS matmuls, each with a K of its own; it is rounded once.
//
// A share is what a cluster does: the tiles it multiplies, and sums in the same columns. Of an owner's rows, a tile in row i of
// tiles stands for number i of equal slices. Blocks that have multiplied while others have not started, or while a peer is
// missing and they are of the margin, end and leave their sums to those that stay.
#include "dependent.cuh"
#include "gemm.cuh"
#include "progress.cuh"
#include "stages.cuh"
#include "words.cuh"

struct Params {
    TensorMap x[TERMS], w[TERMS];
    char* out;
    const char* bias;   // BIASED: [n], which this rank adds to its product
    const char* added;  // ADDED: as `out`, which is added to the sums
    char* words[8];  // of every rank
    int64_t* state;
    int64_t* trace;
    int64_t half;  // bytes
    int m, n, k[TERMS], rank, site;
    int height, slice;        // rows of an owner (ONCE: all), and of a slice of them
    int rows, cols;           // tiles
    int out_pitch, programs;  // bytes of a row of the output
    float scale;              // SCALED
};
CHECK_PARAMS

constexpr int THREADS = 384, DECIDER = 64, MOST_ROUNDS = 144;
// Warps 1 and 3 send tiles while the warpgroups multiply the next ones.
constexpr int SENDERS = 64;
enum Barrier { SENDING = 1, STAGED_ROWS };
// The blocks of a cluster that splits K have parts of a tile each, which they send themselves.
constexpr bool SENDS_BESIDE = SPLIT == 1;

// Tile number t of a cluster, as this block has it: blocks that load the weight for each other have rows of tiles that follow
// one another.
struct At {
    int row, col;
};

__device__ inline int tiles(const Params& p) { return (p.rows + ACROSS - 1) / ACROSS * p.cols; }

__device__ inline At tile_at(const Params& p, int t) {
    int high = (p.rows + ACROSS - 1) / ACROSS;
    return {t % high * ACROSS + (SHARING > 1 ? cluster_rank() : 0), t / high};
}

struct Progress {
    int idle;                 // 1: this block has multiplied
    int going;                // 1: this cluster adds up its share; 2: others do
    int shares[MOST_ROUNDS];  // 1: no more; 2 + the share that comes next
};

__device__ inline Progress& progress() {
    __shared__ Progress found;
    return found;
}

// One thread of a cluster decides what the cluster adds up, while others multiply.
struct Decider {
    const Params& p;
    const Call& call;
    int share, clusters;
    bool decided = false, ended = false;
    int seen = 0;       // shares that were claimed when this cluster began to add up
    int64_t begun = 0;  // when there was nothing left but to wait
    __device__ Decider(const Params& p, const Call& call)
        : p(p), call(call), share(blockIdx.x / CLUSTER), clusters(p.programs / CLUSTER) {}
    __device__ void tell(const int& word, int v) const {
        for (int r = 0; r < CLUSTER; ++r) poke_at(word, r, v);
    }
    // All blocks have started once the epoch has ended. The first to claim stays whoever is missing, so that somebody does.
    __device__ void look() {
        bool all = load_relaxed(p.state + STATE_EPOCH) >= call.epoch;
        bool firm = share < static_cast<int>(p.state[STATE_FIRM]) / CLUSTER;
        bool stays = all && (firm || present(p.state, p.rank, call.epoch));
        if (!stays) {
            if (!peek(progress().idle)) return;
            if (!begun) begun = nanoseconds();
            if (nanoseconds() - begun < (all ? YIELD_NS : START_NS)) return;
            stays = all && held(call) == 0;
        }
        bool going = stays && claim_stamped(call, share);
        tell(progress().going, going ? 1 : 2);
        decided = true;
        if (!going) end(0);
    }
    __device__ void end(int round) {
        tell(progress().shares[round], 1);
        ended = true;
    }
    // After a share has been added up: takes one that nobody has.
    __device__ void next(int round) {
        if (ended) return;
        for (int other = 0; other < clusters && seen < clusters; ++other, seen = held(call))
            if (load_relaxed(claims(p.state, STAMPED) + other) != stamp_of(call) && claim_stamped(call, other)) {
                tell(progress().shares[round], other + 2);
                return;
            }
        end(round);
    }
};

// The K of all terms, one behind the other, where each term begins with a block of its own.
__device__ inline int whole_k(const Params& p) {
    int k = 0;
    for (int i = 0; i < TERMS - 1; ++i) k += blocks_of(p.k[i]) * BK;
    return k + p.k[TERMS - 1];
}

__device__ void load_tiles(const Params& p, const Shared& s, int block) {
    for (int i = 0; i < TERMS; ++i) prefetch(&p.x[i]), prefetch(&p.w[i]);
    Turn turn;
    int first, last;
    split(whole_k(p), first, last);
    for (int t = block / CLUSTER; t < tiles(p); t += p.programs / CLUSTER) {
        At at = tile_at(p, t);
        int begin = 0;  // of a term
        for (int i = 0; i < TERMS; ++i) {
            int from = first - begin, to = last - begin;
            if (TERMS > 1 && from < 0) from = 0;
            if (TERMS > 1 && to > p.k[i]) to = p.k[i];
            produce(s, turn, {{&p.x[i]}, {&p.w[i]}, at.row * BM, at.col * BN, from, to});
            begin += blocks_of(p.k[i]) * BK;
        }
    }
}

// `threads` threads send `rows` rows of a staged tile, those from `first` on, to their owners: in the order in which the owners
// add them up.
__device__ void send_rows(
    const Params& p, const Shared& s, At tile, int first, int rows, int thread, int threads, int64_t half) {
    constexpr int WIDE = BN / 8;  // words of 16 bytes in a row
    int line = p.n / 8;
#pragma unroll 4
    for (int i = thread; i < rows * WIDE; i += threads) {
        int in_tile = first + i / WIDE, row = tile.row * BM + in_tile, owner = row / p.height;
        int word = tile.col * WIDE + i % WIDE;
        if (row >= p.m || word >= line) continue;
        int64_t at = half + (static_cast<int64_t>(p.rank * p.height + row % p.height) * line + word) * 16;
        uint4 value = sendable(load_shared(s.staged + staged_at(in_tile, i % WIDE)));
        if (!ONCE) put(p.words[owner] + at, value);
        for (int r = 1; ONCE && r <= W; ++r) put(p.words[(p.rank + r) % W] + at, value);
    }
}

// Two warps send the tiles of this block, all but the last one, which those that multiply send.
__device__ void send_tiles(const Params& p, const Shared& s, int block, int64_t half) {
    int step = p.programs / CLUSTER, parity = 0, thread = threadIdx.x / 64 * 32 + threadIdx.x % 32;
    for (int t = block / CLUSTER; t + step < tiles(p); t += step) {
        barrier_wait(s.ready, parity);
        parity ^= 1;
        send_rows(p, s, tile_at(p, t), 0, HIGH, thread, SENDERS, half);
        named_barrier(SENDING, SENDERS);
        if (thread == 0) barrier_arrive(s.taken);
    }
}

// A piece of 16 bytes: its row among those of an owner, and its number in that row; row -1: none.
struct Piece {
    int row, word;
};

// Pieces that a thread takes at once, so that their loads are on their way together. A piece has a word of each rank: with more
// than two ranks these are enough.
constexpr int MOST_PIECES = (HIGH * BN / 8 + SPLIT * THREADS - 1) / (SPLIT * THREADS);  // of a tile, a thread
constexpr int AT_ONCE = W > 2 ? 1 : MOST_PIECES < 4 ? MOST_PIECES : 4;

// Calls `work(pieces)` for all pieces of `rows` rows of an owner, AT_ONCE at a time, in the columns that this block's cluster
// has multiplied. Blocks of the same number on the peers send these pieces at about the same time.
template <class Work>
__device__ inline void each_pieces(const Params& p, int share, int rows, Work work) {
    constexpr int WIDE = BN / 8, STEP = SPLIT * THREADS;
    int me = SPLIT > 1 ? cluster_rank() : 0;
    for (int t = share; t < tiles(p); t += p.programs / CLUSTER) {
        At tile = tile_at(p, t);
        int first = tile.row * p.slice, left = rows - first;
        int count = (left < p.slice ? left : p.slice) * WIDE;
        for (int i = me * THREADS + threadIdx.x; i < count; i += AT_ONCE * STEP) {
            Piece pieces[AT_ONCE];
#pragma unroll
            for (int a = 0; a < AT_ONCE; ++a) {
                int j = i + a * STEP, row = first + j / WIDE, word = tile.col * WIDE + j % WIDE;
                pieces[a] = {j < count && word < p.n / 8 ? row : -1, word};
            }
            work(pieces);
        }
    }
}

// Adds up the rows of this rank.
__device__ void reduce_rows(const Params& p, const Call& call, int share, int64_t half) {
    int line = p.n / 8, begin = ONCE ? 0 : p.rank * p.height;
    int rows = p.m - begin < p.height ? p.m - begin : p.height;  // may be 0 or less
    int64_t part = static_cast<int64_t>(p.height) * line;
    char* mine = p.words[p.rank] + half;
    each_pieces(p, share, rows, [&](const Piece (&pieces)[AT_ONCE]) {
        uint4 words[AT_ONCE * W] = {}, added[AT_ONCE] = {};
        auto exists = [&](int a) { return pieces[a].row >= 0; };
        auto number = [&](int a) { return pieces[a].row * line + pieces[a].word; };
        auto to = [&](int a) {
            return static_cast<int64_t>(pieces[a].row + (ALL ? begin : 0)) * p.out_pitch + pieces[a].word * 16;
        };
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a)
            if (exists(a)) added[a] = added_at(p, to(a));
        take_all(
            words, [&](int i) { return exists(i / W); },
            [&](int i) { return mine + (i % W * part + number(i / W)) * 16; }, call, WAIT_REDUCING,
            [](int i) { return i % W; }, number(0));
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            if (!exists(a)) continue;
            uint4 terms[W];
            for (int r = 0; r < W; ++r) terms[r] = flip(words[a * W + r]);
            uint4 value = sum(terms);
            if (ALL && !ONCE) {
                value = sendable(value);
                for (int r = 1; r < W; ++r)
                    put(p.words[(p.rank + r) % W] + half + ((W + p.rank) * part + number(a)) * 16, value);
            }
            store(p.out + to(a), with_added(value, added[a]));
        }
    });
}

// Copies the sums that the other owners send.
__device__ void copy_rows(const Params& p, const Call& call, int share, int64_t half) {
    constexpr int PEERS = W > 1 ? W - 1 : 1, COUNT = AT_ONCE * PEERS;
    int line = p.n / 8;
    int64_t part = static_cast<int64_t>(p.height) * line;
    char* mine = p.words[p.rank] + half;
    each_pieces(p, share, p.height, [&](const Piece (&pieces)[AT_ONCE]) {
        uint4 words[COUNT] = {}, added[COUNT];
        auto source = [&](int i) { return (p.rank + 1 + i % PEERS) % W; };
        auto row = [&](int i) { return source(i) * p.height + pieces[i / PEERS].row; };
        auto wanted = [&](int i) { return W > 1 && pieces[i / PEERS].row >= 0 && row(i) < p.m; };
        auto number = [&](int i) { return pieces[i / PEERS].row * line + pieces[i / PEERS].word; };
        auto place = [&](int i) { return mine + ((W + source(i)) * part + number(i)) * 16; };
        auto to = [&](int i) { return static_cast<int64_t>(row(i)) * p.out_pitch + pieces[i / PEERS].word * 16; };
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (wanted(i)) added[i] = added_at(p, to(i));
        take_all(words, wanted, place, call, WAIT_COPYING, source, number(0));
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (wanted(i)) store(p.out + to(i), with_added(flip(words[i]), added[i]));
    });
}

extern "C" __global__ void __launch_bounds__(384, 1) matmul_words(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    Shared s = shared_memory(memory);
    int block = blockIdx.x, group = threadIdx.x / 128, first, last;
    split(whole_k(p), first, last);
    int blocks = blocks_of(last - first);
    grid_wait();
    Call call{p.state, p.site, epoch_of(p.state)};
    int64_t half = half_of(call.epoch) * p.half;
    Trace trace{p.trace + (group * p.programs + block) * 2 * EVENTS};
    if (threadIdx.x % 128 == 0) trace.stamp(EVENT_BEGUN, p.rank, 0);
    for (int i = threadIdx.x; i < sizeof(Progress) / 4; i += THREADS) poke((&progress().idle)[i], 0);
    Decider decider(p, call);
    bool decides = threadIdx.x == DECIDER && (CLUSTER == 1 || cluster_rank() == 0);
    init(s);
    if (threadIdx.x == 0) load_tiles(p, s, block);
    // Words need no counters, so the last program that has read the epoch ends the call.
    if (threadIdx.x == 32) {
        int64_t before = count(p.state + STATE_THROUGH);
        if (before == p.programs - 1) finish(call, held_word(call.epoch));
        if (before == 0) tell_presence(p.state, p.rank, call.epoch);
    }
    if (SENDS_BESIDE && threadIdx.x < 128 && threadIdx.x / 32 % 2) send_tiles(p, s, block, half);
    while (decides && !decider.decided) decider.look();
    if (group > 0 && group <= GROUPS) {
        Turn turn;
        int done = 0, staged = 0, step = p.programs / CLUSTER;
        for (int t = block / CLUSTER; t < tiles(p); t += step) {
            float acc[BN / 2];
            consume(s, turn, acc, group - 1, blocks);
            auto staged_sums = [&] { apply_stages(acc, p, tile_at(p, t).col * BN); };
            if (SPLIT == 1) staged_sums();
            if (SENDS_BESIDE && t + step < tiles(p)) {
                stage(s, acc, group - 1, staged);
                if (threadIdx.x % 128 == 0) trace.stamp(EVENT_COMPUTED, -1, t);
                continue;
            }
            if (SPLIT > 1) add_partials(s, acc, group - 1, done++);
            if (!adds_up(group - 1)) continue;
            if (SPLIT > 1) staged_sums();
            if (SENDS_BESIDE) barrier_wait(s.taken, staged ^ 1);
            stage_rows(s, acc, group - 1);
            constexpr int SENDING_THREADS = SPLIT_WARPS * 32;
            named_barrier(STAGED_ROWS, SENDING_THREADS);
            int me = SPLIT > 1 ? cluster_rank() : 0;
            int rows = HIGH - me * SPLIT_ROWS < SPLIT_ROWS ? HIGH - me * SPLIT_ROWS : SPLIT_ROWS;
            int thread = (threadIdx.x - 128) % SENDING_THREADS;
            send_rows(p, s, tile_at(p, t), me * SPLIT_ROWS, rows, thread, SENDING_THREADS, half);
            if (t + step < tiles(p)) named_barrier(STAGED_ROWS, SENDING_THREADS);
            if (threadIdx.x % 128 == 0) trace.stamp(EVENT_COMPUTED, -1, t);
        }
    }
    if (threadIdx.x == 128) poke(progress().idle, 1);
    __syncwarp();
    __syncthreads();
    if (threadIdx.x == 0) launch_dependents(call, p.rank);
    // All sums are computed before one of a peer is waited for: the peer may wait for any of ours.
    int own = block / CLUSTER, rounds = 0;  // shares that this block adds up
    if (decides && !decider.ended) decider.seen = held(call);  // on its way while parts are added up
    if (await(progress().going) == 1)
        for (int share = own; share >= 0; share = await(progress().shares[rounds++]) - 2) {
            reduce_rows(p, call, share, half);
            if (decides) decider.next(rounds);
        }
    for (int i = 0; ALL && !ONCE && i < rounds; ++i)
        copy_rows(p, call, i ? peek(progress().shares[i - 1]) - 2 : own, half);
    if (threadIdx.x % 128 == 0) {
        trace.stamp(EVENT_REDUCED, p.rank, 0);
        trace.stamp(EVENT_ENDED, p.rank, 0);
    }
    if (CLUSTER > 1) cluster_sync();
}
