// The order in which clusters visit tiles, as in native_kernels/triton/gemm.py; plain C++, so that tests can run it.
//
// A matrix is cut into a chunk for each rank, a chunk into rows x cols tiles. The ACROSS blocks of a cluster that share a block
// of the weight compute the same place in the chunks of ACROSS owners. The ALONG blocks that share a block of x compute
// neighbouring columns of one chunk.
#pragma once

#ifndef __CUDACC_RTC__
#define __device__
#endif

constexpr int DIRECT = 0, RING = 1, OBLIVIOUS = 2;
constexpr int GROUP = 16;
constexpr int MOST_WEIGHTS = 2;  // of one kernel

struct Tile {
    int owner, row, col;
};

// The weight, and the column in it, of column `col` of tiles; all `cols` columns go through `weights` of equal width.
struct Column {
    int weight, col;
};

__device__ inline Column column_at(int col, int cols, int weights) {
    if (weights == 1) return {0, col};
    int wide = cols / weights;
    return {col / wide, col % wide};
}

// The owner whose chunk is visited at `stage` of a turn.
__device__ inline int owner_at(int stage, int rank, int world, int order) {
    if (order == OBLIVIOUS) return stage;
    if (order == RING) return (rank + 2 * world - 1 - stage) % world;
    return (rank + 1 + stage) % world;
}

// Tile number `t` of a chunk: down `group` rows at a time, which stay in the cache.
__device__ inline Tile chunk_tile_at(int t, int rows, int cols, int group = GROUP) {
    int first = t / (group * cols) * group;
    int here = rows - first < group ? rows - first : group;
    t %= group * cols;
    return {0, first + t % here, t / here};
}

// The number of the tile at a row and a column of a chunk.
__device__ inline int chunk_number_of(int row, int col, int rows, int cols) {
    int first = row / GROUP * GROUP;
    int here = rows - first < GROUP ? rows - first : GROUP;
    return first * cols + col * here + row - first;
}

// What block (m, n) of a cluster computes as the cluster's tile number `t`. A turn visits all chunks, each for
// `visit` tiles.
__device__ inline Tile tile_at(
    int t, int m, int n, int rank, int world, int rows, int cols, int visit, int across, int along, int order,
    int group = GROUP) {
    int groups = world / across, wide = (cols + along - 1) / along;
    int turn = t / (groups * visit);
    int left = rows * wide - turn * visit;
    int here = left < visit ? left : visit;
    t %= groups * visit;
    Tile tile = chunk_tile_at(turn * visit + t % here, rows, wide, group);
    return {owner_at(t / here * across + m, rank, world, order), tile.row, tile.col * along + n};
}

// What block (m, n) of a cluster computes as the cluster's tile number `t` of a gather: first the parts of its first
// `across` sources, our own among them; then those of the others, slice by slice, in the order in which they arrive.
// WITHIN: the blocks that share a block of the weight work on neighbouring rows of one part.
__device__ inline Tile gathered_tile_at(
    int t, int m, int n, int rank, int world, int rows, int cols, int slice_rows, int across, int along, bool within,
    int group_rows = GROUP) {
    int groups = within ? world : world / across, wide = (cols + along - 1) / along;
    int high = within ? (rows + across - 1) / across : rows, here = high, first = 0, group = 0;
    if (t >= high * wide) {
        t -= high * wide;
        int step = within ? (slice_rows + across - 1) / across : slice_rows;
        int turn = step * (groups - 1) * wide;
        first = t / turn * step;
        here = high - first < step ? high - first : step;
        t %= turn;
        group = 1 + t / (here * wide);
        t %= here * wide;
    }
    Tile tile = chunk_tile_at(t, here, wide, group_rows);
    int row = first + tile.row;
    int source = (rank + 2 * world - (within ? group : group * across + m)) % world;
    return {source, within ? row * across + m : row, tile.col * along + n};
}
