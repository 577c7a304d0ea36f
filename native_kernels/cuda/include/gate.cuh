// The gate of a pair of products, as gated experts have it: act(first) * second.
//
// The first half of an accumulator's columns are of one weight, the second half are the same columns of the other weight.
#pragma once
#include "gemm.cuh"

// The result is in the first half. It is rounded to 16 bits before, between and after, as ops of torch do it. The tensor cores
// wait meanwhile, so silu takes two instructions of 2^-22 relative error in place of exp and a division.
__device__ inline void gate(float (&acc)[BN / 2]) {
    constexpr float LOG2_E = 1.44269504f;
    auto silu = [](float v) { return v * reciprocal(1 + exp2_of(v * -LOG2_E)); };
#pragma unroll
    for (int i = 0; i < BN / 4; i += 2) {
        uint32_t first = pair(acc[i], acc[i + 1]), second = pair(acc[i + BN / 4], acc[i + BN / 4 + 1]);
        uint32_t act = pair(silu(low_of(first)), silu(high_of(first)));
        acc[i] = low_of(act) * low_of(second);
        acc[i + 1] = high_of(act) * high_of(second);
    }
}
