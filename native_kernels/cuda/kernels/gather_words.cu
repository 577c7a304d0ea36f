// all_gather_matmul of at most 256 tokens, in one kernel. Each rank sends its part of x to all ranks as flag-in-payload words
// (words.cuh), while the weight is being loaded already.
//
// A block computes G * 64 columns of Y, over a piece of K, as their transpose: the weight is the left operand of the tensor
// cores, with 64 rows a warpgroup, and x the right one, with a column for each token. One thread loads the weight by TMA. A warp
// loads x by TMA as it arrived, with flipped signs, so that products are negative. Checker warps look for words of x that had
// not arrived when TMA loaded them, and fetch these. The blocks of a tile send each other their partial sums as words, and each
// block adds up some of the tokens.
//
// SIGNALLED: with many tokens, checking takes longer than a signal, and the kernel waits for a signal of each rank instead.
//
// How x travels, and through which memory, is in words_of_x.cuh; which tiles a block multiplies, also where a peer is late, in
// lent_tiles.cuh.
#include "lent_tiles.cuh"
#include "wgmma.cuh"
#include "words_of_x.cuh"

constexpr int W_BYTES = G * 64 * ROW, X_BYTES = TOKENS * ROW;
constexpr int ACCS = TOKENS / 2, EIGHTS = TOKENS / 8;  // accumulators of a thread, four for every eight tokens

struct Params {
    TensorMap w, x;  // of our memory: [3, M, K]
    const char* part;
    const char* bias;
    char* out;
    char* kept;       // where x [M, K] is stored for the caller; nullptr if it is not kept
    char* memory[8];  // of every rank: x, three thirds
    int* signals[8];  // and counters [W], two halves
    char* words;      // our own: partial sums, two halves
    int64_t* state;
    int64_t* calls;  // how many there were, and how many lines each third has
    int64_t* trace;
    int64_t third, half, signals_half;  // bytes, counters
    int m, n, k, rank, site;
    int chunk, tiles;
    int out_pitch, programs;
};
CHECK_PARAMS

// A ring of stages in shared memory, and the position of a thread in it. Barriers of a stage: landed (TMA has written it), full
// (it is complete), empty (it may be written again).
template <int STAGES, int BYTES>
struct Ring {
    uint32_t stages, barriers;
    int stage = 0, parity = 0;
    __device__ uint32_t here() const { return stages + stage * BYTES; }
    __device__ uint32_t full() const { return barriers + 8 * stage; }
    __device__ uint32_t empty() const { return barriers + 8 * (STAGES + stage); }
    __device__ uint32_t landed() const { return barriers + 8 * (2 * STAGES + stage); }
    __device__ void next(int by = 1) {
        stage += by;
        if (stage < STAGES) return;
        parity ^= stage / STAGES % 2;
        stage %= STAGES;
    }
};
using WeightRing = Ring<W_STAGES, W_BYTES>;
using TokenRing = Ring<X_STAGES, X_BYTES>;

// At most AHEAD blocks are on their way at once, since x would have to wait behind them.
__device__ void load_weight(const Params& p, WeightRing ring, const Work& work) {
    WeightRing behind = ring;
    prefetch(&p.w);
    for (int b = work.first; b < work.last; ++b, ring.next()) {
        if (b - work.first >= AHEAD) {
            barrier_wait(behind.full(), behind.parity);
            behind.next();
        }
        barrier_wait(ring.empty(), ring.parity ^ 1);
        barrier_expect(ring.full(), W_BYTES);
        for (int g = 0; g < G; ++g) {
            int col = (work.tile * G + g) * 64;
#if TRANSPOSED
            load_share<1>(ring.here() + g * 64 * ROW, &p.w, col, b * BK, ring.full(), 0);
#else
            load_share<1>(ring.here() + g * 64 * ROW, &p.w, b * BK, col, ring.full(), 0);
#endif
        }
    }
}

// Loads the weight for each tile that this block multiplies.
__device__ void load_weights(const Params& p, const WeightRing& ring, Work work) {
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        WeightRing of_tile = ring;
        of_tile.next(turn * work.blocks());
        load_weight(p, of_tile, work);
        int next = await(progress().turns[turn]) - 2;
        if (next < 0) return;
        // Until then rows of the tile before lie in stages of the weight.
        while (peek(progress().finished) < (turn + 1) * G) {
        }
        work.tile = next;
    }
}

__device__ void load_x(const Params& p, TokenRing ring, const Work& work, int64_t number) {
    bool looked_at = is_looked_at(p, work);
    int third = third_of(number);
    prefetch(&p.x);
    for (int b = work.first; b < work.last; ++b, ring.next()) {
        uint32_t barrier = looked_at ? ring.landed() : ring.full();
        barrier_wait(ring.empty(), ring.parity ^ 1);
        barrier_expect(barrier, X_BYTES);
        load_share<1>(ring.here(), &p.x, third, 0, b * BK, barrier, 0);
    }
}

// A warp waits for x, decides about the tile of this block if it is lent, and loads x for each tile that this block multiplies:
// its own, and those of equal number in the stretches of lent tiles that nobody else multiplies.
__device__ void bring_x(
    const Params& p, const Call& call, const TokenRing& ring, Work work, int64_t number, Trace& trace) {
    Progress& told = progress();
    int kept = kept_tiles(p), who = 0;
    bool is_lent = work.tile >= kept;
    auto arrives = [&](Wait& wait) {
        return SIGNALLED ? wait_for_x(p, call, work, wait) : look_for_x(p, call, work, number, wait);
    };
    for (Wait wait{is_lent}; !arrives(wait); wait.is_lent = false) {
        if (threadIdx.x == X_LOADER) who = decide(p, work.tile, OTHERS);
        who = __shfl_sync(~0u, who, 0);
        if (who == OTHERS) break;
    }
    if (threadIdx.x != X_LOADER) return;
    if (who == OTHERS) {
        poke(told.turns[0], 1);
        poke(told.x, 2);
        return;
    }
    poke(told.x, 1);
    trace.stamp(EVENT_WAITED, -1, 0);
    int tile = work.tile, turn = 0;
#pragma unroll 1
    while (tile < p.tiles) {
        TokenRing of_tile = ring;
        of_tile.next(turn * work.blocks());
        work.tile = tile;
        load_x(p, of_tile, work, number);
        // The answer is needed when the tile is stored.
        if (turn == 0) poke(told.lent, is_lent ? decide(p, tile, OWN_BLOCKS) : OWN_BLOCKS);
        tile = tile_after(p, tile, kept, is_lent);
        poke(told.turns[turn++], tile < p.tiles ? tile + 2 : 1);
    }
}

__device__ void multiply_blocks(WeightRing weight, TokenRing tokens, const Work& work, float (&acc)[ACCS], int group) {
    uint32_t weight_before = 0, tokens_before = 0;  // barriers of the stages that become free once the next block is on its way
    auto release = [&] {
        if (threadIdx.x % 128) return;
        barrier_arrive(weight_before);
        barrier_arrive(tokens_before);
    };
    for (int b = work.first; b < work.last; ++b, weight.next(), tokens.next()) {
        uint32_t w = weight.here() + group * 64 * ROW, x = tokens.here();
        barrier_wait(weight.full(), weight.parity);
        barrier_wait(tokens.full(), tokens.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) {
#if TRANSPOSED
            uint64_t left = matrix_at(w + i * 32, 16, 1024);
#else
            uint64_t left = matrix_at(w + i * 16 * ROW, 64 * ROW, 1024);
#endif
            multiply_weight<TOKENS>(acc, left, matrix_at(x + i * 32, 16, 1024), b > work.first || i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (b > work.first) release();
        weight_before = weight.empty();
        tokens_before = tokens.empty();
    }
    wgmma_wait<0>();
    release();
}

// A block that ends without x takes the weight that is on its way to its shared memory.
__device__ void take_weight(WeightRing ring, const Work& work) {
    for (int b = work.first; b < work.last; ++b, ring.next()) {
        barrier_wait(ring.full(), ring.parity);
        if (threadIdx.x % 128 == 0) barrier_arrive(ring.empty());
    }
}

// Piece j % PIECES of a tile adds up the tokens 8 j to 8 j + 7, in the order of the pieces, and stores rows of Y. `staged`: the
// memory of stages of the weight, which this warpgroup does not need any more; 64 tokens a stage.
__device__ void finish_tile(
    const Params& p, const Call& call, const Work& work, float (&acc)[ACCS], int group, int64_t half, uint32_t staged) {
    constexpr int MINE = (EIGHTS + PIECES - 1) / PIECES;
    constexpr int WORDS = TOKENS > 128 && PIECES == 2 ? 8 : 16;  // as many as a thread has registers for
    constexpr int AT_ONCE = MINE * PIECES > WORDS ? WORDS / PIECES : MINE;
    int thread = threadIdx.x % 128, lane = thread % 32, first = (work.tile * G + group) * 64;
    auto slot = [&](int j, int from) {
        int64_t at = ((static_cast<int64_t>(work.tile) * G + group) * EIGHTS + j) * PIECES + from;
        return p.words + half + (at * 128 + thread) * 16;
    };
    float mine[MINE][4];
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
        if (j % PIECES != work.piece) {
            put_sums(slot(j, work.piece), acc + 4 * j);
            continue;
        }
        for (int i = 0; i < 4; ++i) mine[j / PIECES][i] = acc[4 * j + i];
    }
    // Of a thread: columns c, c, c + 8, c + 8 of Y, tokens t, t + 1, t, t + 1.
    float bias[2] = {};
    for (int i = 0; BIASED && i < 2; ++i) {
        int col = first + thread / 32 * 16 + lane / 4 + i * 8;
        if (col < p.n) bias[i] = low_of(reinterpret_cast<const uint16_t*>(p.bias)[col]);
    }
    // Where columns 8 * piece and on of token number `token` lie, so that eight tokens are in different banks.
    auto place = [&](int token, int piece) {
        return staged + token / 64 * W_BYTES + token % 64 * ROW + (piece ^ token % 8) * 16;
    };
#pragma unroll
    for (int begun = 0; begun < MINE; begun += AT_ONCE) {
        uint4 sums[AT_ONCE * PIECES] = {};
        if (PIECES > 1) {
            auto eight = [&](int i) { return (begun + i / PIECES) * PIECES + work.piece; };
            auto from = [&](int i) { return slot(eight(i), i % PIECES); };
            auto wanted = [&](int i) { return i % PIECES != work.piece && eight(i) < EIGHTS; };
            take_all(sums, wanted, from, call, WAIT_REDUCING, [&](int) { return p.rank; }, work.tile);
        }
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a) {
            float total[4] = {};
#pragma unroll
            for (int from = 0; from < PIECES; ++from) {
                const uint4& sum = sums[a * PIECES + from];
                const uint32_t words[4] = {sum.x, sum.y, sum.z, sum.w};
                for (int i = 0; i < 4; ++i) total[i] += from == work.piece ? mine[begun + a][i] : sum_of(words[i]);
            }
            for (int i = 0; i < 4; ++i) total[i] = bias[i / 2] - total[i];
            store_transposed(place((begun + a) * 8 + lane % 8, thread / 32 * 2 + lane / 8 % 2), pair(total[0], total[1]),
                             pair(total[2], total[3]));
        }
    }
    named_barrier(STAGED_ROWS + group, 128);
#pragma unroll
    for (int i = thread; i < MINE * 64; i += 128) {
        int number = i / 8, j = number / 8 * PIECES + work.piece, token = j * 8 + number % 8, col = first + i % 8 * 8;
        if (j < EIGHTS && token < p.m && col < p.n)
            store(p.out + static_cast<int64_t>(token) * p.out_pitch + col * 2, load_shared(place(number, i % 8)));
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) gather_words(const __grid_constant__ Params p) {
    extern __shared__ char memory[];
    uint32_t at = (shared_address(memory) + 1023) / 1024 * 1024, tokens_at = at + W_STAGES * W_BYTES;
    uint32_t barriers = tokens_at + X_STAGES * X_BYTES;
    WeightRing weight{at, barriers};
    TokenRing tokens{tokens_at, barriers + 2 * W_STAGES * 8};
    int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    Call call{p.state, p.site, epoch_of(p.state)};
    int64_t number = p.calls[0], used = p.calls[1 + third_of(number + 2)];
    Work work(p);
    // Rows of events: of the first warpgroup that multiplies, and of the thread that loads x.
    Trace trace{p.trace + ((threadIdx.x == X_LOADER) * p.programs + blockIdx.x) * 2 * EVENTS};
    bool traces = threadIdx.x == 0 || threadIdx.x == X_LOADER;
    if (traces) trace.stamp(EVENT_BEGUN, p.rank, 0);
    int taken = 0;
    for (int i = threadIdx.x; i < sizeof(Progress) / 4; i += THREADS) poke((&progress().owned)[i], 0);
    if (threadIdx.x == X_LOADER) taken = atomicExch(claims(p.state, CLAIM_A) + blockIdx.x, 1);
    if (threadIdx.x == 0) {
        auto init = [](auto ring, int stages, int filling) {
            for (int i = 0; i < stages; ++i, ring.next()) {
                barrier_init(ring.full(), 1);
                barrier_init(ring.empty(), G);
                if (filling) barrier_init(ring.landed(), 1);
            }
        };
        init(weight, W_STAGES, false);
        init(tokens, X_STAGES, true);
        barrier_inits_done();
    }
    __syncthreads();
    if (threadIdx.x == W_LOADER) load_weights(p, weight, work);
    __syncwarp();
    if (warp == X_LOADER / 32) {
        if (threadIdx.x == X_LOADER) {
            poke(progress().owned, taken ? 2 : 1);
            if (!taken) count_claim(p.state, CLAIM_A);
        }
        bring_x(p, call, tokens, work, number, trace);
    } else if (warp != W_LOADER / 32) {
        send_part(p, number, used, half_of(call.epoch));
        if (warp == FIRST_CHECKER / 32) {
            send_unclaimed(p, number, half_of(call.epoch));
            __syncwarp();
            if (threadIdx.x == FIRST_CHECKER) poke(progress().claimed, 1);
        }
    }
    int checker = warp - FIRST_CHECKER / 32;
    if (checker >= 0 && checker < CHECKERS && is_looked_at(p, work)) {
        auto check = [&](const Work& at, int turn) {
            if (is_looked_at(p, at)) check_x(p, call, tokens, at, checker, number, turn * at.blocks());
        };
        each_tile(work, check, [] {});
    }
    if (group < G) {
        auto multiply = [&](const Work& at, int turn) {
            float acc[ACCS] = {};  // else the compiler keeps those of the tile before
            WeightRing of_weight = weight;
            TokenRing of_x = tokens;
            of_weight.next(turn * at.blocks());
            of_x.next(turn * at.blocks());
            multiply_blocks(of_weight, of_x, at, acc, group);
            for (int i = 0; i < ACCS; ++i) acc[i] = settled(acc[i]);
            if (traces) trace.stamp(EVENT_COMPUTED, -1, blockIdx.x);
            if (await(progress().lent) == OTHERS) return;
            finish_tile(p, call, at, acc, group, half_of(call.epoch) * p.half, weight.stages + group * 64 * ROW);
        };
        // The rows of a tile lay where the weight of the next one comes.
        each_tile(work, multiply, [&] {
            fence_proxy_shared();
            named_barrier(STAGED_ROWS + group, 128);
            if (threadIdx.x % 128 == 0) atomicAdd(&progress().finished, 1);
        });
        if (peek(progress().x) == 2) take_weight(weight, work);
    }
    // The last program that needs neither the counters nor the number of the call any more ends the call.
    if (threadIdx.x == X_LOADER && await(progress().claimed) && is_last(p.state, p.programs)) {
        for (int r = 0; SIGNALLED && r < W; ++r) p.signals[p.rank][half_of(call.epoch) * p.signals_half + r] = 0;
        clear_claims(p.state, p.programs, 0, 1);
        p.calls[0] = number + 1;
        p.calls[1 + third_of(number)] = static_cast<int64_t>(p.m) * (p.k / 8);
        finish(call);
    }
    if (traces) trace.stamp(EVENT_ENDED, p.rank, 0);
}
