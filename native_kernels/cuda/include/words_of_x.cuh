// How x travels in gather_words.cu: each rank sends its part to all ranks as words (words.cuh). A receiver looks at the words
// or, SIGNALLED, waits for a signal of each rank.
//
// Many blocks read a word of x, so none of them can clear it. A rank has memory for x [M, K] in three thirds and, before them,
// the number of calls and how much each third holds. Call c fills third c % 3 and clears the third of call c - 1. A peer fills
// that third again in call c + 2. It starts c + 2 only after it has received this rank's part in call c + 1, which this rank
// sends after it is through with call c.
//
// A share is what a block sends of x. Blocks claim their own; a checker warp of each block sends those of blocks that have not
// started.
#pragma once
#include "lent_tiles.cuh"
#include "words.cuh"

// Threads of a block: those that multiply, a warp that loads the weight, one that loads x, and others, of which CHECKERS warps
// check x. All warps but the two that load send x; the last one signals.
constexpr int THREADS = 384, W_LOADER = G * 128, X_LOADER = W_LOADER + 32, FIRST_CHECKER = X_LOADER + 32;
constexpr int SENDERS = THREADS - 64, SIGNALLER = THREADS / 32 - 1;
// Named barriers; the last one and the next are those of a warpgroup each.
enum Barrier { SENT = 1, RESENT, STAGED_ROWS };
// A stage always has the same checker, which has waited for each earlier round of the stage.
static_assert(CHECKERS * 32 <= THREADS - FIRST_CHECKER && X_STAGES % CHECKERS == 0, "warps that look at x");

// A lane of sending warp number `sender` stores its lines of a share to all ranks. A line has 16 bytes. `owns` is asked after
// the first load.
template <class Params, class Owns>
__device__ inline void send_lines(const Params& p, int64_t number, int share, int sender, Owns owns) {
    int lines = p.chunk * (p.k / 8);
    int64_t there = third_of(number) * p.third + static_cast<int64_t>(p.rank) * lines * 16;
    for (int i = (sender * p.programs + share) * 32 + threadIdx.x % 32; i < lines; i += p.programs * SENDERS) {
        uint4 v = sendable(load_l2(p.part + static_cast<int64_t>(i) * 16));
        if (!owns()) return;
        for (int r = 1; r <= W; ++r) put(p.memory[(p.rank + r) % W] + there + static_cast<int64_t>(i) * 16, v);
    }
}

// All warps but the two that load store this rank's part to all ranks, and clear the `used` lines of the call before.
template <class Params>
__device__ inline void send_part(const Params& p, int64_t number, int64_t used, int parity) {
    int sender = threadIdx.x < W_LOADER ? threadIdx.x : threadIdx.x - 64, lane = threadIdx.x % 32;
    int begin = (sender / 32 * p.programs + blockIdx.x) * 32 + lane, step = p.programs * SENDERS;
    send_lines(p, number, blockIdx.x, sender / 32, [] { return await(progress().owned) == 1; });
    if (SIGNALLED && threadIdx.x / 32 == SIGNALLER) {
        named_barrier(SENT, SENDERS);
        if (lane < W && await(progress().owned) == 1) add_release(p.signals[lane] + parity * p.signals_half + p.rank);
    } else if (SIGNALLED) {
        named_arrive(SENT, SENDERS);
    }
    char* old = p.memory[p.rank] + third_of(number + 2) * p.third;
    for (int64_t i = begin; i < used; i += step) store(old + i * 16, {0, 0, 0, 0});
}

// A warp waits until all shares have been claimed, and sends those that stay unclaimed.
template <class Params>
__device__ inline void send_unclaimed(const Params& p, int64_t number, int parity) {
    int64_t begun = nanoseconds();
    while (claimed(p.state, CLAIM_A) < p.programs) {
        if (nanoseconds() - begun < START_NS) continue;
        int share = 0;
        if (threadIdx.x % 32 == 0) share = unclaimed(p.state, CLAIM_A, 0, p.programs);
        share = __shfl_sync(~0u, share, 0);
        if (share < 0) return;
        for (int sender = 0; sender < SENDERS / 32; ++sender) send_lines(p, number, share, sender, [] { return true; });
        named_barrier(RESENT, 32);
        if (SIGNALLED && threadIdx.x % 32 < W)
            add_release(p.signals[threadIdx.x % 32] + parity * p.signals_half + p.rank);
    }
}

// A warp polls some lines of every source until they have arrived; false if the wait is over before. A line that TMA loads too
// early must be fetched again.
template <class Params>
__device__ inline bool look_for_x(const Params& p, const Call& call, const Work& work, int64_t number, Wait& wait) {
    constexpr int EACH = 8, LOOKS = EACH * 32 / W;  // of a lane, and from a source
    int lane = threadIdx.x % 32, row = p.k / 8, first = work.first * 8;
    int width = (work.last * 8 < row ? work.last * 8 : row) - first;
    const char* mine = p.memory[p.rank] + third_of(number) * p.third;
    uint32_t seen[EACH];
    const char* at[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int source = (i * 32 + lane) % W, look = (i * 32 + lane) / W % LOOKS;
        int line = (static_cast<int64_t>(look + 1) * p.chunk * width + LOOKS - 1) / LOOKS - 1;  // of those of this piece
        at[i] = mine + (static_cast<int64_t>(source * p.chunk + line / width) * row + first + line % width) * 16;
        seen[i] = 0;
    }
    Patience patience;
    bool waits = true;
    while (__any_sync(~0u, waits)) {
        int missing = -1;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (waits && !seen[i]) seen[i] = load_relaxed(at[i]).w;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (!seen[i]) missing = i * 32 + lane;
        waits = waits && missing >= 0 &&
                patience.goes_on(call, WAIT_GATHERING, missing % W, work.tile);
        if (__any_sync(~0u, waits && wait.is_over())) return false;
    }
    return true;
}

// The same by the signals of all ranks.
template <class Params>
__device__ inline bool wait_for_x(const Params& p, const Call& call, const Work& work, Wait& wait) {
    int lane = threadIdx.x % 32;
    bool here = true;
    if (lane < W) {
        const int* counter = p.signals[p.rank] + half_of(call.epoch) * p.signals_half + lane;
        Patience patience;
        while (load_acquire(counter) < p.programs && patience.goes_on(call, WAIT_GATHERING, lane, work.tile)) {
            here = !wait.is_over();
            if (!here) break;
        }
    }
    here = __all_sync(~0u, here);
    fence_proxy();
    return here;
}

// Whether checker warps look at x after it has landed. They also store x where the caller keeps it.
template <class Params>
__device__ inline bool is_looked_at(const Params& p, const Work& work) {
    return !SIGNALLED || (p.kept && work.tile == 0);
}

// Checker warp number `checker` looks at every CHECKERS-th block of x, and fetches the lines that TMA had loaded too early.
// before: blocks of x that this block has loaded for other tiles.
template <class Params, class Ring>
__device__ inline void check_x(
    const Params& p, const Call& call, Ring ring, const Work& work, int checker, int64_t number, int before) {
    constexpr int EACH = TOKENS / 4, AT_ONCE = EACH < 8 ? EACH : 8;  // lines of 8 values, of a lane
    int lane = threadIdx.x % 32, row = p.k / 8;
    const char* mine = p.memory[p.rank] + third_of(number) * p.third;
    bool keeps = p.kept && work.tile == 0;
    int begin = (checker + CHECKERS - before % CHECKERS) % CHECKERS;
    ring.next(before + begin);
    for (int b = work.first + begin; b < work.last; b += CHECKERS, ring.next(CHECKERS)) {
        int lines = b * 8 + lane % 8 < row ? (p.m - lane / 8 + 3) / 4 : 0;  // that there are
        bool fetched = false;
        barrier_wait(ring.landed(), ring.parity);
        for (int first = 0; first < EACH; first += AT_ONCE) {
            uint4 seen[AT_ONCE];
            // Swizzled as TMA does.
            auto token = [&](int e) { return (first + e) * 4 + lane / 8; };
            auto here = [&](int e) { return ring.here() + token(e) * ROW + (lane % 8 ^ token(e) % 8) * 16; };
            uint32_t least = 1;
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e) seen[e] = load_shared(here(e));
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e)
                if (first + e < lines) least = min(least, min(min(seen[e].x, seen[e].y), min(seen[e].z, seen[e].w)));
            if (least && !keeps) continue;
#pragma unroll
            for (int e = 0; e < AT_ONCE; ++e) {
                if (first + e >= lines) continue;
                int64_t at = (static_cast<int64_t>(token(e)) * row + b * 8 + lane % 8) * 16;
                if (!is_whole(seen[e])) {
                    seen[e] = arrived(mine + at, seen[e], call, WAIT_GATHERING, token(e) / p.chunk, b);
                    store_shared(here(e), seen[e]);
                    fetched = true;
                }
                if (keeps) store(p.kept + at, flip(seen[e]));
            }
        }
        if (fetched) fence_proxy_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.full());
    }
}
