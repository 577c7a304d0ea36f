// expert_matmul_all_to_all of experts with a fixed capacity, in one persistent kernel over frame.cuh. The storer sends rows to
// the ranks that they are for, and signals. Teams copy what has arrived into the output, beside the tensor cores.
//
// A tile is a sum of TERMS products, each with a K of its own.
//
// A rank has two halves each of an inbox [W, columns / 64, rows of a part, 64], where the pieces of a row lie as they were
// staged, and of the counters [W, rows * cols] of tiles that have arrived. SPANNING: a tile holds rows for several ranks.
#include "expert_order.cuh"
#include "frame.cuh"

struct Params {
    TensorMap x[TERMS], w[TERMS];  // stacks, a matrix an expert
    TensorMap y;                   // our own part of the output, a matrix a run
    char* out;
    const char* bias;
    char* inbox[8];  // of every rank
    int* signals[8];
    int64_t* state;
    int64_t* trace;
    int64_t inbox_half;    // bytes
    int64_t signals_half;  // counters
    Runs runs;
    int n, k[TERMS], rank, site, part_rows;
    int rows, cols, visit, programs;  // tiles of a chunk
};
CHECK_PARAMS

constexpr int SOURCES = SPANNING ? W : W - 1;  // ranks whose rows come through the inbox
constexpr int WIDE = BN / 8;                   // pieces of 16 bytes in a row of a tile

struct ExpertCombine : Frame<Params, TEAMS> {
    using Frame::Frame;

    __device__ int tiles() const { return (SPANNING ? 1 : W) * p.rows / ACROSS * ((p.cols + ALONG - 1) / ALONG); }
    __device__ int blocks() const { return blocks_of(p.k); }

    __device__ Tile tile_of(int t) const {
        return combined_tile_at(t, cluster_row(), cluster_col(), p.rank, W, p.rows, p.cols, p.visit, ACROSS, ALONG, ORDER,
                                p.runs.group, SPANNING);
    }

    // Where rows of a part of `source` begin in an inbox, of the 64 columns number `box`.
    __device__ int64_t inbox_at(int source, int box, int row) const {
        int64_t rows = (static_cast<int64_t>(source) * p.cols * BOXES + box) * p.part_rows + row;
        return parity * p.inbox_half + rows * 128;
    }

    __device__ int* arrived(int rank) const { return p.signals[rank] + parity * p.signals_half; }

    __device__ void load_tiles(int tiles) const {
        for (int i = 0; i < TERMS; ++i) prefetch(&p.x[i]), prefetch(&p.w[i]);
        Turn turn;
        each_tile_loaded(*this, tiles, [&](int t) {
            Tile tile = tile_of(t);
            Rows rows = rows_of(p.runs, tile.row, tile.owner, W, SPANNING);
            for (int i = 0; i < TERMS; ++i)
                produce<true>(s, turn,
                              {{&p.x[i], rows.expert}, {&p.w[i], rows.expert}, rows.first, tile.col * BN, 0, p.k[i]});
        });
    }

    __device__ void before_store(float (&acc)[BN / 2], const Tile& tile) const {
        if (BIASED) add_bias(acc, p.bias + static_cast<int64_t>(tile.row / p.runs.per) * p.n * 2, tile.col * BN, p.n);
    }

    __device__ void store_tiles(int tiles) const {
        Staged staged{s};
        each_tile_after<WAITS>(tiles, [&] { return barrier_is_over(s.ready, staged.parity); }, [&](int t) {
            Tile tile = tile_of(t);
            Rows rows = rows_of(p.runs, tile.row, tile.owner, W, SPANNING);
            int number = (p.rank * p.rows + tile.row) * p.cols + tile.col;
            int boxes = (p.n - tile.col * BN + 63) / 64;
            if (boxes > BOXES) boxes = BOXES;
            uint32_t sent = 0;  // a bit a rank
            staged.wait();
            for (int r = 0; r < rows.count && boxes > 0;) {
                Run run = run_at(p.runs, rows.expert, rows.first + r, W);
                int count = run.left < rows.count - r ? run.left : rows.count - r;
                for (int i = 0; i < boxes; ++i) {
                    uint32_t from = s.staged + (i * HIGH + r) * 128;
                    if (!SPANNING && run.owner == p.rank)
                        store_box(&p.y, run.at / p.runs.run, run.at % p.runs.run, tile.col * BN + i * 64, from);
                    else
                        store_bulk(p.inbox[run.owner] + inbox_at(p.rank, tile.col * BOXES + i, run.at), from,
                                   count * 128);
                }
                if (SPANNING || run.owner != p.rank) sent |= 1 << run.owner;
                r += count;
            }
            staged.free_after_bulk();
            if (!sent) return;
            staged.arrived();
            fence_sys();
            for (int owner = 0; owner < W; ++owner)
                if (sent >> owner & 1) add_relaxed(arrived(owner) + number);
        });
    }

    // A team copies what has arrived, a part of a tile a ticket.
    template <int SIZE>
    __device__ void exchange(Team<SIZE> team) {
        constexpr int AHEAD = 8, PARTS = ROWS / PART;
        int wide = (p.cols + ALONG - 1) / ALONG * ALONG, tickets = SOURCES * p.rows * wide * PARTS;
        for (Tickets ticket(p, team); ticket.number < tickets; ticket.next()) {
            Tile tile = arriving_tile_at(ticket.number / PARTS, p.rank, W, SOURCES, p.rows, p.cols, p.visit, ALONG,
                                         ORDER, p.runs.group);
            int source = tile.owner, number = (source * p.rows + tile.row) * p.cols + tile.col;
            Rows rows = rows_of(p.runs, tile.row, p.rank, W, SPANNING);
            int low = ticket.number % PARTS * PART, high = low + PART < rows.count ? low + PART : rows.count;
            bool is_part = low < high && tile.col < p.cols &&
                           (!SPANNING || has_rows_for(p.runs, p.rank, rows.first + low, high - low, W));
            if (is_part && team.leads()) wait(arrived(p.rank) + number, 1, WAIT_COMBINING, source, number);
            ticket.draw();
            if (team.leads()) trace.stamp(EVENT_WAITED, source, number);
            // A thread copies one piece of 16 bytes of every STEP-th row; a few have none where a row is no power of two.
            constexpr int STEP = SIZE / WIDE;
            int piece = team.thread % WIDE, col = tile.col * BN + piece * 8;
            if (col >= p.n || team.thread >= STEP * WIDE) is_part = false;
            int start = SPANNING ? 0 : run_at(p.runs, rows.expert, rows.first, W).at;
            const char* from = p.inbox[p.rank] + inbox_at(source, tile.col * BOXES + piece / 8, start);
            char* to = p.out + ((static_cast<int64_t>(source) * p.part_rows + start) * p.n + col) * 2;
            // Row `row` of the tile, counted from `start`; false if it is none of ours.
            auto place = [&](int row, int64_t& at) {
                at = row;
                if (row >= high) return false;
                if (!SPANNING) return true;
                Run run = run_at(p.runs, rows.expert, rows.first + row, W);
                at = run.at;
                return run.owner == p.rank;
            };
            for (int row = low + team.thread / WIDE; is_part && row < high; row += AHEAD * STEP) {
                uint4 held[AHEAD];
                int64_t at;
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    int r = row + a * STEP;
                    if (place(r, at)) held[a] = load_l2(from + at * 128 + (piece % 8 ^ r % 8) * 16);
                }
#pragma unroll
                for (int a = 0; a < AHEAD; ++a)
                    if (place(row + a * STEP, at)) store(to + at * p.n * 2, held[a]);
            }
            if (team.leads()) trace.stamp(EVENT_COPIED, source, number);
        }
    }

    template <class Meet>
    __device__ void clear(int thread, int threads, Meet) const {
        for (int i = thread; i < W * p.rows * p.cols; i += threads) arrived(p.rank)[i] = 0;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_combine(const __grid_constant__ Params p) {
    run<ExpertCombine>(p);
}
