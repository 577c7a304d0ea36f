// Rows and tiles of fixed experts, [E, R = (outer, W, run)]; plain C++, as order.cuh.
//
// A tile has `height` rows of one run or, SPANNING, of several runs of one expert. Tiles of one expert follow each other, so
// that its weight is read once.
#pragma once
#include "order.cuh"

struct Runs {
    int rows, run, outer;     // rows of an expert and of a run; runs that an expert has for each rank
    int stretch, per, group;  // rows of tiles: of a run or, spanning, an expert; of an expert; visited together
    int height;               // rows of a tile
};

// `count` rows of expert `expert` from row `first` on; no rows if `count` is not above 0.
struct Rows {
    int expert, first, count;
};

// The rows of row `row` of tiles, of the chunk for `owner`.
__device__ inline Rows rows_of(const Runs& r, int row, int owner, int world, bool spanning) {
    int expert = row / r.per, i = row % r.per, low = i % r.stretch * r.height;
    int first = spanning ? low : (i / r.stretch * world + owner) * r.run + low;
    int left = (spanning ? r.rows : r.run) - low;
    return {expert, first, left < r.height ? left : r.height};
}

// Where row `row` of an expert goes: to row `at` of the part of `owner`, as do the `left` - 1 rows behind it.
struct Run {
    int owner, at, left;
};

__device__ inline Run run_at(const Runs& r, int expert, int row, int world) {
    int run = row / r.run, low = row % r.run;
    return {run % world, (expert * r.outer + run / world) * r.run + low, r.run - low};
}

// The row of a part where row `row` of tiles begins; spanning, of an expert's first tile.
__device__ inline int part_row_at(const Runs& r, int row, bool spanning) {
    int expert = row / r.per, i = row % r.per, low = i % r.stretch * r.height;
    if (spanning) return expert * r.outer * r.run;
    return (expert * r.outer + i / r.stretch) * r.run + (low < r.run ? low : r.run);
}

// Row `row` of the part of `source` among the rows of all experts.
__device__ inline long long exchanged_row_at(const Runs& r, int source, int row, int world) {
    return (static_cast<long long>(row / r.run) * world + source) * r.run + row % r.run;
}

// Whether any of `count` rows from row `first` of an expert on are for `owner`.
__device__ inline bool has_rows_for(const Runs& r, int owner, int first, int count, int world) {
    int run = first / r.run, last = (first + count - 1) / r.run;
    return (owner + world - run % world) % world <= last - run;
}

// What block (m, n) of a cluster computes as the cluster's tile number `t`. Spanning, there is one chunk, for all, and
// the blocks that share a block of the weight work on neighbouring rows of an expert.
__device__ inline Tile combined_tile_at(
    int t, int m, int n, int rank, int world, int rows, int cols, int visit, int across, int along, int order,
    int group, bool spanning) {
    if (!spanning) return tile_at(t, m, n, rank, world, rows, cols, visit, across, along, order, group);
    Tile tile = tile_at(t, 0, n, 0, 1, rows / across, cols, visit, 1, along, DIRECT, group / across);
    return {0, tile.row * across + m, tile.col};
}

// The source and the rows that a rank copies as number `t`, in about the order in which they are computed. `sources`: how many
// ranks rows come from, all or all others.
__device__ inline Tile arriving_tile_at(
    int t, int rank, int world, int sources, int rows, int cols, int visit, int along, int order, int group) {
    Tile tile = tile_at(t / along, 0, t % along, 0, sources, rows, cols, visit, 1, along, OBLIVIOUS, group);
    int away = 1 + tile.owner;
    return {(order == DIRECT ? rank + world - away : rank + away) % world, tile.row, tile.col};
}

// What block (m, n) of a cluster computes as the cluster's tile number `t` of a dispatch: as `gathered_tile_at`, tiles
// of an expert together. Spanning, all is one part, that arrives slice by slice.
__device__ inline Tile dispatched_tile_at(
    int t, int m, int n, int rank, int world, int rows, int cols, int slice_rows, int across, int along, bool within,
    int group, bool spanning) {
    return gathered_tile_at(t, m, n, rank, spanning ? 1 : world, rows, cols, slice_rows, across, along, within,
                            within ? group / across : group);
}
