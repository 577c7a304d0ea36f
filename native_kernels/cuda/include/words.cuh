// Flag-in-payload: a word of two 16-bit values is its own flag. A word other than 0 has arrived, so there is neither a signal
// nor a fence, and a wait takes one way across the link.
//
// The memory is 0 between calls. A sender flips the signs of both values. The result is 0 only for (-0, -0), which the sender
// replaces by (0, 0) before. The receiver takes a word, flips the signs back and stores 0. Two halves that calls use in turn
// are enough: a peer stores to the half of call e again in call e + 2, which it starts only after it has received the words of
// this rank for call e + 1, which this rank sends after it has emptied the half of call e.
#pragma once
#include "comm.cuh"

constexpr uint32_t SIGNS = 0x80008000;

// `v` with (0, 0) for (-0, -0), as the receiver gets it.
__device__ inline uint4 sendable(uint4 v) {
    return {v.x == SIGNS ? 0 : v.x, v.y == SIGNS ? 0 : v.y, v.z == SIGNS ? 0 : v.z, v.w == SIGNS ? 0 : v.w};
}

__device__ inline uint4 flip(uint4 v) { return {v.x ^ SIGNS, v.y ^ SIGNS, v.z ^ SIGNS, v.w ^ SIGNS}; }

// Stores eight `sendable` values to the memory of a peer or of this rank.
__device__ inline void put(void* to, uint4 v) { store_relaxed(to, flip(v)); }

// Whether all four words have arrived.
__device__ inline bool is_whole(uint4 v) { return v.x && v.y && v.z && v.w; }

// Waits until the four words at `at` have arrived; `seen`: what an earlier load has found.
__device__ inline uint4 arrived(
    const void* at, uint4 seen, const Call& call, int what, int source, int index) {
    Patience patience;
    while (!is_whole(seen) && patience.goes_on(call, what, source, index)) seen = load_relaxed(at);
    return seen;
}

// Waits for the words at place(i) of this rank's memory, for each i with wanted(i), and clears them. One poll loads all that
// are missing, so that their latencies overlap. `v`: 0 before.
template <int N, class Wanted, class Place, class Source>
__device__ inline void take_all(
    uint4 (&v)[N], Wanted wanted, Place place, const Call& call, int what, Source source, int index) {
    Patience patience;
    int missing;
    do {
        missing = -1;
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (wanted(i) && !is_whole(v[i])) v[i] = load_relaxed(place(i));
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (wanted(i) && !is_whole(v[i])) missing = i;
    } while (missing >= 0 && patience.goes_on(call, what, source(missing), index));
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (wanted(i)) store(place(i), {0, 0, 0, 0});
}

// Stores four fp32 values in the same way; each is a word.
__device__ inline void put_sums(void* to, const float* v) {
    auto word = [&](int i) { return (v[i] == 0 ? 0u : __float_as_uint(v[i])) ^ 0x80000000u; };
    store_relaxed(to, {word(0), word(1), word(2), word(3)});
}

__device__ inline float sum_of(uint32_t word) { return __uint_as_float(word ^ 0x80000000u); }

// The sums of eight values of each rank: in the order of the ranks, in fp32, scaled, and rounded once.
template <int COUNT>
__device__ inline uint4 sum(const uint4 (&words)[COUNT]) {
    float total[8] = {};
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
        const uint32_t word[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            total[2 * e] += low_of(word[e]);
            total[2 * e + 1] += high_of(word[e]);
        }
    }
    constexpr float SCALE = MEAN ? 1.0f / W : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] *= SCALE;
    return {pair(total[0], total[1]), pair(total[2], total[3]), pair(total[4], total[5]), pair(total[6], total[7])};
}
