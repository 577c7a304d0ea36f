// Tiles of experts with any number of rows, which follow from offsets on the device.
#pragma once
#include "ptx.cuh"
#include "ragged_order.cuh"

constexpr int ALL = EXPERTS + 1;  // the experts, and one more for the rows behind the last expert

struct Ragged {
    int starts[ALL + 1], highs[ALL + 1];
};

// All threads of the block compute where the rows and tiles of each expert begin. `offsets`: [EXPERTS], where the rows of each
// end; nullptr if all experts have the same number.
__device__ inline void read_offsets(Ragged& r, const int* offsets, int rows) {
    for (int e = threadIdx.x; e <= ALL; e += blockDim.x) {
        int end = e == 0 ? 0 : e == ALL ? rows : offsets ? offsets[e - 1] : rows / EXPERTS * e;
        r.starts[e] = end < 0 ? 0 : end > rows ? rows : end;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int total = 0;
        for (int first = 0; first <= ALL; first += 32) {
            int e = first + threadIdx.x;
            int high = e > 0 && e <= ALL ? high_of(r.starts[e] - r.starts[e - 1], ACROSS, ROWS) : 0;
            for (int step = 1; step < 32; step *= 2) {
                int below = __shfl_up_sync(~0u, high, step);
                if (threadIdx.x >= step) high += below;
            }
            if (e <= ALL) r.highs[e] = total + high;
            total += __shfl_sync(~0u, high, 31);
        }
    }
    __syncthreads();
}

__device__ inline Ragged& shared_offsets() {
    __shared__ Ragged offsets;
    return offsets;
}

__device__ inline Tile ragged_tile(const Ragged& r, int t, int cols) {
    int me = ACROSS * ALONG > 1 ? cluster_rank() : 0;
    return ragged_tile_at(t, me / ALONG, me % ALONG, r.starts, r.highs, ALL, cols, ACROSS, ALONG, ROWS);
}

// Each lane of a warp adds 1 to its counter; lanes with the same counter add together. All lanes call it, behind a fence.
__device__ inline void count_rows(int* counter) {
    uint32_t alike = __match_any_sync(~0u, reinterpret_cast<unsigned long long>(counter));
    if (counter && threadIdx.x % 32 == __ffs(alike) - 1) add_relaxed(counter, __popc(alike));
}
