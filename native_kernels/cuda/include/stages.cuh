// What a rank makes of the sums of a tile before it sends them: a row is added, or the rounded sums are scaled.
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
