// Tiles of experts with any number of rows, which only the device knows; plain C++, as order.cuh.
//
// Expert e has rows starts[e] to starts[e + 1] and, for a cluster, rows highs[e] to highs[e + 1] of tiles: ACROSS tiles
// of `height` rows each, which share a block of the weight. Behind the last expert come the rows of none.
#pragma once
#include "order.cuh"

__device__ inline int high_of(int rows, int across, int height) {
    return (rows + across * height - 1) / (across * height);
}

// The last of `count` ascending numbers that is at most `value`; the first is.
__device__ inline int find(const int* numbers, int count, int value) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (numbers[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// What block (m, n) of a cluster computes as the cluster's tile number `t`: whose, from which row of all on, and which
// columns. Tiles of an expert come together, so that its weight is read once.
__device__ inline Tile ragged_tile_at(
    int t, int m, int n, const int* starts, const int* highs, int count, int cols, int across, int along, int height) {
    int wide = (cols + along - 1) / along, expert = find(highs, count, t / wide);
    Tile tile = chunk_tile_at(t - highs[expert] * wide, highs[expert + 1] - highs[expert], wide, GROUP / across);
    return {expert, starts[expert] + (tile.row * across + m) * height, tile.col * along + n};
}
