// The frame of kernels that multiply tiles and exchange data with peers at the same time.
//
// A block has three warpgroups. The first one gives registers away and splits into
//   - the loader, thread 0:    loads operands into the stages of shared memory (`produce` of gemm.cuh),
//   - the storer, warp 1:      stores the tiles that have been staged; nothing with STORES_OWN,
//   - the helpers, warps 2, 3: exchange data with peers.
// The other two warpgroups multiply (`consume`). They stage tiles in shared memory for the storer, or with STORES_OWN store
// their rows themselves. Blocks take tiles in turns, and a tile has a sum of products, the terms, in one accumulator.
//
// A kernel is a struct over `Frame` that says what it loads, stores and exchanges, and is started by `run`:
//
//     struct MyKernel : Frame<Params, SENDERS> {
//         using Frame::Frame;
//         Tile tile_of(int t);                  // what this block computes as tile number t of its cluster
//         int tiles();                          // of a cluster, in all
//         int blocks();                         // blocks of K of all terms: blocks_of(p.k)
//         void load_tiles(int tiles);           // for each tile, wait for its rows, then `produce` each term
//         void store_tiles(int tiles);          // for each tile: Staged::wait, stores, Staged::free or free_after_bulk
//         void store_rows(float (&acc)[BN / 2], const Tile& tile);  // of STORES_OWN, by all warps that multiply
//         void exchange(Team<HELPERS> team, int share);  // sends share `share` once owns() says so; of TEAMS: a template,
//                                               // template <int SIZE> void exchange(Team<SIZE> team)
//         bool waits(int t);                    // of WAITS: whether tile t of this block or another of the cluster does
//         template <class Meet>                 // in the last program of a call: set counters to 0, give credit;
//         void clear(int thread, int threads, Meet meet);  // meet() is a barrier of these threads
//         static constexpr int STORERS = 32;    // where a whole warp stores, not one thread
//         static constexpr bool STORES_OWN = true;  // where warps that multiply store
//         static constexpr bool WAITS = true;   // whether tiles wait for peers
//         static constexpr bool KEEPS = false;  // of WAITS that store no tile before all peers are there
//         static constexpr bool SENDS = false;  // of SENDERS whose helpers do nothing
//     };
//     extern "C" __global__ void __launch_bounds__(THREADS, 1) my_kernel(const __grid_constant__ Params p) {
//         run<MyKernel>(p);
//     }
//
// `Params` has at least state, trace, rank, site and programs, and CHECK_PARAMS stands behind it: static_asserts that the
// ctypes structure of the launcher has the same layout. There are two kinds of kernels:
//   - SENDERS: the helpers send and are done. Threads of the whole block end the call.
//   - TEAMS: the helpers are team 0; warpgroups that have multiplied join as teams 1 and 2. Teams draw tickets
//     (`Tickets`), each of which is a part that has to be reduced or copied. Team 0 ends the call.
//
// One more hook does nothing unless a kernel has its own: before_store(acc, tile) maps an accumulator before it is rounded and
// stored (a bias, a scale).
//
// Not all blocks need to run at once: other kernels may hold a part of the GPU, and while a peer is missing the clusters of the
// margin leave (progress.cuh). What a block does is its share.
//   - SENDERS: helpers claim shares of what is to be sent, first that of their block, then those of blocks that do not run.
//   - TEAMS: a block draws tickets once all blocks have started. If some have not although it has multiplied its tiles, it ends
//     and gives them its place.
//   - WAITS: a cluster of the margin claims its tiles when all peers have started the call; those that it multiplies before
//     wait for nobody. If a peer does not come it ends, and clusters before the margin take its tiles piece by piece.
// A role issues all stores that a wait of a peer depends on before it waits itself (docs/kernels.md, "Ordering").
#pragma once
#include "order.cuh"
#include "roles.cuh"

static_assert(BN % 64 == 0 || OVERLAPPING, "these kernels store whole boxes, or whole tiles");

// Tiles that the warpgroups have staged, as the storer takes them.
struct Staged {
    const Shared& s;
    int parity = 0;
    __device__ void wait() {
        barrier_wait(s.ready, parity);
        parity ^= 1;
    }
    // After bulk stores by one thread: staged memory may be written again once they have read it.
    __device__ void free_after_bulk() const {
        bulk_commit();
        bulk_wait_read();
        free();
    }
    // After reads by one thread, or by a warp that has met.
    __device__ void free() const { barrier_arrive(s.taken); }
    // The bulk stores before are where their receivers find them, and signals may follow.
    __device__ void arrived() const {
        bulk_wait();
        fence_proxy();
    }
};

// A thread of the helpers stores this many pieces of 16 bytes to peers before it loads again. The wait for its loads, one
// microsecond, paces the stores of all multiprocessors to what the links take. More stores would queue in the multiprocessor,
// and the loads of the tiles would wait behind them.
constexpr int STORES_AHEAD = 3;

// A warp copies a row of `pieces` times 16 bytes to a peer. It stores if goes_on(), and returns whether it has.
template <int AHEAD = STORES_AHEAD, class GoesOn>
__device__ inline bool copy_row(char* to, const char* from, int pieces, int lane, GoesOn goes_on) {
    for (int i = lane; i < pieces; i += AHEAD * 32) {
        uint4 held[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (i + a * 32 < pieces) held[a] = load_l2(from + (i + a * 32) * 16);
        if (!goes_on()) return false;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (i + a * 32 < pieces) store(to + (i + a * 32) * 16, held[a]);
    }
    return true;
}

template <class Params, Kind KIND, bool HALVES = true>
struct Frame {
    static constexpr Kind kind = KIND;
    static constexpr int STORERS = 1;  // threads that store: one, by bulk stores, or a warp
    static constexpr bool STORES_OWN = false;
    static constexpr bool WAITS = false, KEEPS = true, SENDS = KIND == SENDERS;
    const Params& p;
    Shared s;
    int block, group;  // of the grid; the warpgroup of this thread
    int clusters, firm;  // of the grid; of those, how many come before the margin
    bool margin;         // whether this one is behind
    bool first = false;  // of a storing warp: whether its block has started before all others
    int64_t epoch;
    int64_t parity;  // the half of the memory that this call uses; without HALVES 0
    Trace trace;

    __device__ explicit Frame(const Params& p)
        : p(p),
          s(shared_memory()),
          block(blockIdx.x),
          group(threadIdx.x / GROUP_THREADS),
          clusters(p.programs / CLUSTER),
          firm(static_cast<int>(p.state[STATE_FIRM]) / CLUSTER),
          margin(block / CLUSTER >= firm),
          epoch(epoch_of(p.state)),
          parity(HALVES ? half_of(epoch) : 0),
          trace{p.trace + (group * p.programs + block) * 2 * EVENTS} {
        // A row of a trace for each warpgroup; that of the first one is the loader's, or of TEAMS team 0's.
        if (threadIdx.x % GROUP_THREADS == (group || KIND == SENDERS ? 0 : HELPER)) trace.stamp(EVENT_BEGUN, p.rank, 0);
    }

    // The place of this block in its cluster, as gemm.cuh numbers it.
    __device__ int cluster_row() const { return CLUSTER > 1 ? cluster_rank() / ALONG : 0; }
    __device__ int cluster_col() const { return CLUSTER > 1 ? cluster_rank() % ALONG : 0; }

    // The share of a cluster of the margin that leaves goes to other clusters in pieces: `pieces_of` in a share, `piece_tiles`
    // tiles in each; `first_of` is the first tile of a piece.
    __device__ int piece_tiles(int tiles) const {
        constexpr int MOST_PIECES = 32;
        return ((tiles + clusters - 1) / clusters + MOST_PIECES - 1) / MOST_PIECES;
    }
    __device__ int pieces_of(int tiles) const {
        int each = piece_tiles(tiles);
        return each ? ((tiles + clusters - 1) / clusters + each - 1) / each : 1;
    }
    __device__ int first_of(int piece, int tiles) const {
        int pieces = pieces_of(tiles);
        return piece / pieces + piece % pieces * piece_tiles(tiles) * clusters;
    }

    // work(t) for each tile of this block: the tiles of its share and, before the margin, those of the pieces that its cluster
    // takes. A cluster of the margin asks goes_on(number, t) before each tile. next(round) is the next piece; -1: none is left.
    template <class GoesOn, class Next, class Work>
    __device__ void each_tile(int tiles, GoesOn goes_on, Next next, Work work) const {
        int number = 0, t = block / CLUSTER, end = tiles;
        for (int round = 0;; ++round) {
            for (; t < end; t += clusters, ++number) {
                if (margin && !goes_on(number, t)) return;
                work(t);
            }
            int piece = margin || firm >= clusters ? -1 : next(round);
            if (piece < 0) return;
            t = first_of(piece, tiles);
            end = t + piece_tiles(tiles) * clusters;
            if (end > tiles) end = tiles;
        }
    }

    template <class Kernel, class Work>
    __device__ void each_tile_loaded(const Kernel& k, int tiles, Work work) const {
        if constexpr (Kernel::WAITS) {
            int seen = 0, pieces = pieces_of(tiles), all = (clusters - firm) * pieces;
            auto goes_on = [&](int number, int t) {
                if (!k.waits(t) || await(progress().going) == 1) return true;
                poke(progress().stopped, number + 1);
                bool tells = Kernel::KEEPS && (CLUSTER == 1 || cluster_rank() == 0);
                if (tells && number) claim_pieces(p.state, block / CLUSTER, number / piece_tiles(tiles));  // these are done
                return false;
            };
            auto next = [&](int round) {
                if (CLUSTER > 1 && cluster_rank() > 0) return await_piece(progress(), round);
                int piece;
                do {
                    piece = -1;
                    if (seen < all) seen = claimed(p.state, CLAIM_B);
                    int begin = firm + (block / CLUSTER + round) % (clusters - firm);
                    if (seen < all) piece = unclaimed_piece(p.state, firm, clusters, begin, pieces);
                } while (piece >= 0 && first_of(piece, tiles) >= tiles);
                for (int r = 0; r < CLUSTER; ++r) poke_at(progress().pieces[round % ROUNDS_AHEAD], r, taken(round, piece));
                return piece;
            };
            each_tile(tiles, goes_on, next, [&](int t) {
                if (seen < all) seen = claimed(p.state, CLAIM_B);
                work(t);
            });
        } else {
            for (int t = block / CLUSTER; t < tiles; t += clusters) work(t);
        }
    }

    // The other roles follow the loader; `barrier` and `parity` say what they wait for before a tile.
    template <bool WAITS, class Barrier, class Work>
    __device__ void each_tile_after(int tiles, Barrier barrier, Work work) const {
        if constexpr (WAITS) {
            auto goes_on = [&](int number, int) {
                while (!barrier())
                    if (peek(progress().stopped) == number + 1) return false;
                return true;
            };
            each_tile(tiles, goes_on, [&](int round) { return await_piece(progress(), round); }, work);
        } else {
            for (int t = block / CLUSTER; t < tiles; t += clusters) work(t);
        }
    }

    __device__ void wait(const int* counter, int target, int what, int source, int index) const {
        ::wait(call(), counter, target, what, source, index);
    }

    __device__ Call call() const { return {p.state, p.site, epoch}; }

    // Of SENDERS: whether this block sends the share that it has begun. Asked before the first store to a peer, so that the
    // answer comes while the first loads are on their way.
    __device__ bool owns() const { return await(progress().owned) == 1; }

    __device__ void send(Team<HELPERS>) const {}  // what the helpers send once they have told peers something
    __device__ void before_store(float (&)[BN / 2], const Tile&) const {}

private:
    static __device__ Shared shared_memory() {
        extern __shared__ char memory[];
        return ::shared_memory(memory);
    }
};

// Shared memory of the teams, an int each.
__device__ inline int* team_numbers() {
    __shared__ int numbers[3];
    return numbers;
}

// The tickets that a team draws, in about their order: numbers that one team of all blocks has each.
//
// All come from a counter, so that a block that does not run keeps none.
//
//     for (Tickets ticket(p, team); ticket.number < tickets; ticket.next()) {
//         if (team.leads()) wait(..);
//         ticket.draw();  // barrier of the team; the next number is on its way from here on
//         ..
//     }
template <int SIZE, class Params>
struct Tickets {
    const Params& p;
    Team<SIZE> team;
    int number, following = 0;
    __device__ Tickets(const Params& p, Team<SIZE> team) : p(p), team(team) {
        if (team.leads()) team_numbers()[team.number] = fetch();
        team.meet();
        number = team_numbers()[team.number];
    }
    __device__ void draw() {
        team.meet();
        if (team.leads()) following = fetch();
    }
    __device__ void next() {
        if (team.leads()) team_numbers()[team.number] = following;
        team.meet();
        number = team_numbers()[team.number];
    }

private:
    __device__ int fetch() const {
        return atomicAdd(reinterpret_cast<unsigned long long*>(p.state + STATE_TICKETS), 1ull);
    }
};

// Teams end a call: team 0 waits for the others of the block (`threads` in all); in the last program it clears.
template <int SIZE, class Kernel>
__device__ inline void end_by_teams(Kernel& k, Team<SIZE> team, int threads) {
    if (team.number) {
        named_arrive(END_BARRIER, threads);
    } else {
        named_barrier(END_BARRIER, threads);
        int* last = team_numbers();
        int gate = peek(progress().gate);
        if (team.leads()) *last = gate == 3 || (gate == 1 && is_last(k.p.state, k.p.programs));
        team.meet();
        if (*last) {
            clear_claims(k.p.state, k.clusters, team.thread, SIZE);
            k.clear(team.thread, SIZE, [&] { team.meet(); });
            if (team.leads()) finish(k.call());
        }
    }
    if (team.leads()) k.trace.stamp(EVENT_ENDED, k.p.rank, 0);
}

// All threads of the block end a call; in the last program they clear.
template <class Kernel>
__device__ inline void end_by_block(Kernel& k) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = is_last(k.p.state, k.p.programs);
    __syncthreads();
    if (last) {
        clear_claims(k.p.state, k.p.programs, threadIdx.x, THREADS);
        k.clear(threadIdx.x, THREADS, [] { __syncthreads(); });
        if (threadIdx.x == 0) finish(k.call());
    }
}

// A warpgroup multiplies and stages the tiles of its block.
template <class Kernel>
__device__ inline void multiply_tiles(Kernel& k, int tiles) {
    Turn turn;
    int staged = 0, blocks = k.blocks();
    if (GROUPS < 2 && k.group > GROUPS) return;
    // Declared outside of the loop, so that the compiler changes accumulators in place. Inside of it, a kernel with
    // `before_store` spills copies of them.
    float acc[BN / 2];
    auto loaded = [&] { return barrier_is_over(k.s.full + 8 * turn.stage, turn.parity); };
    k.template each_tile_after<Kernel::WAITS>(tiles, loaded, [&](int t) {
        consume(k.s, turn, acc, k.group - 1, blocks);
        Tile tile = k.tile_of(t);
        k.before_store(acc, tile);
        if constexpr (Kernel::STORES_OWN)
            k.store_rows(acc, tile);
        else
            stage(k.s, acc, k.group - 1, staged);
        if (threadIdx.x % GROUP_THREADS == 0)
            k.trace.stamp(EVENT_COMPUTED, Kernel::kind == TEAMS ? -1 : tile.owner, Kernel::kind == TEAMS ? t * CLUSTER : t);
    });
}

// Runs a kernel: each thread of the block takes its role.
template <class Kernel, class Params>
__device__ inline void run(const Params& p) {
    Kernel k(p);
    const Start<Kernel> start(k);
    for (int i = threadIdx.x; i < sizeof(Progress) / 4; i += THREADS) poke((&progress().owned)[i], 0);
    init(k.s);
    int tiles = k.tiles();
    // Of TEAMS, all threads that read counters or exchange data meet before the end; a storing warp reads them, too.
    constexpr bool STORER_MEETS = Kernel::STORERS > 1;
    constexpr int MEETING = HELPERS + 2 * GROUP_THREADS + (STORER_MEETS ? Kernel::STORERS : 0);
    if (k.group == 0) {
        give_registers<FEW_REGISTERS>();
        if (threadIdx.x == LOADER) {
            k.load_tiles(tiles);
        } else if (threadIdx.x >= STORER && threadIdx.x < STORER + Kernel::STORERS) {
            start.tell(k, tiles);
            if (STORER_MEETS) k.first = __shfl_sync(~0u, static_cast<int>(start.before), 0) == 0;
            if constexpr (!Kernel::STORES_OWN) k.store_tiles(tiles);
            if (Kernel::kind == TEAMS && STORER_MEETS) named_arrive(END_BARRIER, MEETING);
        } else if (threadIdx.x >= HELPER) {
            Team<HELPERS> team(0);
            if constexpr (Kernel::kind == TEAMS) {
                exchange_by_tickets(k, team);
                end_by_teams(k, team, MEETING);
            } else if constexpr (Kernel::SENDS) {
                each_share(p, team, CLAIM_A, k.block, [&](int share) { k.exchange(team, share); });
                k.send(team);
            }
        }
    } else {
        take_registers<MANY_REGISTERS>();
        multiply_tiles(k, tiles);
        if constexpr (Kernel::kind == TEAMS) {
            Team<GROUP_THREADS> team(k.group);
            exchange_by_tickets(k, team);
            end_by_teams(k, team, MEETING);
        } else if (threadIdx.x % GROUP_THREADS == 0) {
            k.trace.stamp(EVENT_ENDED, p.rank, 0);
        }
    }
    __syncwarp();
    if constexpr (Kernel::kind == SENDERS) end_by_block(k);
    if (CLUSTER > 1) cluster_sync();
}
