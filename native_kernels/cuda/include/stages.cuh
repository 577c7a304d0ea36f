// Stages of reductions. Before a rank sends its product, it adds a row to it, or scales the rounded product. Before a rank
// stores a rounded sum of all ranks, it adds a matrix to it.
#pragma once
#include "gemm.cuh"

// BIASED: p.bias is [n]. SCALED: torch rounds a product before it multiplies. first: the first column of the tile.
template <class P>
__device__ inline void apply_stages(float (&acc)[BN / 2], const P& p, int first) {
    if (BIASED) add_bias(acc, p.bias, first, p.n);
    if (SCALED) {
#pragma unroll
        for (int i = 0; i < BN / 2; i += 2) {
            uint32_t two = pair(acc[i], acc[i + 1]);
            acc[i] = low_of(two) * p.scale;
            acc[i + 1] = high_of(two) * p.scale;
        }
    }
}

// ADDED: eight values of p.added, which lies as the output does, for those at p.out + `at`.
template <class P>
__device__ inline uint4 added_at(const P& p, int64_t at) {
    return ADDED ? load_l2(p.added + at) : uint4{};
}

// Eight values of a sum as they are stored.
__device__ inline uint4 with_added(uint4 sum, uint4 added) {
    if (!ADDED) return sum;
    auto two = [](uint32_t a, uint32_t b) { return pair(low_of(a) + low_of(b), high_of(a) + high_of(b)); };
    return {two(sum.x, added.x), two(sum.y, added.y), two(sum.z, added.z), two(sum.w, added.w)};
}
