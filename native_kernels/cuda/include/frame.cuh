// The frame of kernels that multiply tiles and exchange data with peers at the same time.
//
// A block has three warpgroups. The first one gives registers away and splits into
//   - the loader, thread 0:    loads operands into the stages of shared memory (`produce` of gemm.cuh),
//   - the storer, warp 1:      stores the tiles that have been staged,
//   - the helpers, warps 2, 3: exchange data with peers.
// The other two warpgroups multiply (`consume`) and stage tiles in shared memory. Blocks take tiles in turns, and a tile has a
// sum of products, the terms, in one accumulator.
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
//         void exchange(Team<HELPERS> team);    // of TEAMS: a template, template <int SIZE> void exchange(Team<SIZE> team)
//         template <class Meet>                 // in the last program of a call: set counters to 0, give credit;
//         void clear(int thread, int threads, Meet meet);  // meet() is a barrier of these threads
//         static constexpr int STORERS = 32;    // where a whole warp stores, not one thread
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
// Stages before and behind a reduction are two more hooks, which do nothing unless a kernel has its own:
//   - before_store(acc, tile):  maps an accumulator before it is rounded and stored (a bias, an activation),
//   - before_output(sums, row, col): maps eight sums of ranks before they are rounded, in kernels that reduce.
//
// All blocks run at once, so that a role may wait for other ranks and for other blocks. A role issues all stores that a wait of
// a peer depends on before it waits itself (docs/kernels.md, "Ordering").
#pragma once
#include "comm.cuh"
#include "gemm.cuh"
#include "order.cuh"

constexpr int THREADS = 384, GROUP_THREADS = 128;    // of a block, of a warpgroup
constexpr int LOADER = 0, STORER = 32, HELPER = 64;  // first threads of the roles
constexpr int HELPERS = GROUP_THREADS - HELPER, HELPER_WARPS = HELPERS / 32;
constexpr int FEW_REGISTERS = 88, MANY_REGISTERS = 208;  // of a thread of the first warpgroup, of a thread that multiplies

// Numbers of named barriers; 0 is __syncthreads. Team i has TEAM_BARRIER + i.
constexpr int TEAM_BARRIER = 1, STORER_BARRIER = 4, END_BARRIER = 5;
constexpr int HELPER_WARP_BARRIER = 2;  // and 3, of SENDERS: one a warp

enum Kind { SENDERS, TEAMS };

// Threads that exchange data together.
template <int SIZE>
struct Team {
    int number, thread;
    __device__ explicit Team(int number)
        : number(number), thread(SIZE == HELPERS ? threadIdx.x - HELPER : threadIdx.x % GROUP_THREADS) {}
    __device__ bool leads() const { return thread == 0; }
    __device__ void meet() const { named_barrier(TEAM_BARRIER + number, SIZE); }
};

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

// A warp copies a row of `pieces` times 16 bytes, eight of a lane on their way at once.
__device__ inline void copy_row(char* to, const char* from, int pieces, int lane) {
    constexpr int AHEAD = 8;
    for (int i = lane; i < pieces; i += AHEAD * 32) {
        uint4 held[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (i + a * 32 < pieces) held[a] = load_l2(from + (i + a * 32) * 16);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (i + a * 32 < pieces) store(to + (i + a * 32) * 16, held[a]);
    }
}

template <class Params, Kind KIND, bool HALVES = true>
struct Frame {
    static constexpr Kind kind = KIND;
    static constexpr int STORERS = 1;  // threads that store: one, by bulk stores, or a warp
    const Params& p;
    Shared s;
    int block, group;  // of the grid; the warpgroup of this thread
    int64_t epoch;
    int64_t parity;  // the half of the memory that this call uses; without HALVES 0
    Trace trace;

    __device__ explicit Frame(const Params& p)
        : p(p),
          s(shared_memory()),
          block(blockIdx.x),
          group(threadIdx.x / GROUP_THREADS),
          epoch(epoch_of(p.state)),
          parity(HALVES ? half_of(epoch) : 0),
          trace{p.trace + (group * p.programs + block) * 2 * EVENTS} {
        // A row of a trace for each warpgroup; that of the first one is the loader's, or of TEAMS team 0's.
        if (threadIdx.x % GROUP_THREADS == (group || KIND == SENDERS ? 0 : HELPER)) trace.stamp(EVENT_BEGUN, p.rank, 0);
    }

    // The place of this block in its cluster, as gemm.cuh numbers it.
    __device__ int cluster_row() const { return CLUSTER > 1 ? cluster_rank() / ALONG : 0; }
    __device__ int cluster_col() const { return CLUSTER > 1 ? cluster_rank() % ALONG : 0; }

    // work(t) for each tile of this block.
    template <class Work>
    __device__ void each_tile(int tiles, Work work) const {
        for (int t = block / CLUSTER; t < tiles; t += p.programs / CLUSTER) work(t);
    }

    __device__ void wait(const int* counter, int target, int what, int source, int index) const {
        ::wait(call(), counter, target, what, source, index);
    }

    __device__ Call call() const { return {p.state, p.site, epoch}; }

    __device__ void before_store(float (&)[BN / 2], const Tile&) const {}
    __device__ void before_output(float (&)[8], int, int) const {}

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
    // Team 0 of a block has the ticket of the block's number.
    __device__ Tickets(const Params& p, Team<SIZE> team) : p(p), team(team), number(blockIdx.x) {
        if (!team.number) return;
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
        return p.programs + atomicAdd(reinterpret_cast<unsigned long long*>(p.state + STATE_TICKETS), 1ull);
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
        if (team.leads()) *last = is_last(k.p.state, k.p.programs);
        team.meet();
        if (*last) {
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
    k.each_tile(tiles, [&](int t) {
        consume(k.s, turn, acc, k.group - 1, blocks);
        Tile tile = k.tile_of(t);
        k.before_store(acc, tile);
        stage(k.s, acc, k.group - 1, staged);
        if (threadIdx.x % GROUP_THREADS == 0)
            k.trace.stamp(EVENT_COMPUTED, Kernel::kind == TEAMS ? -1 : tile.owner, Kernel::kind == TEAMS ? t * CLUSTER : t);
    });
}

// Runs a kernel: each thread of the block takes its role.
template <class Kernel, class Params>
__device__ inline void run(const Params& p) {
    Kernel k(p);
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
            k.store_tiles(tiles);
            if (Kernel::kind == TEAMS && STORER_MEETS) named_arrive(END_BARRIER, MEETING);
        } else if (threadIdx.x >= HELPER) {
            Team<HELPERS> team(0);
            k.exchange(team);
            if constexpr (Kernel::kind == TEAMS) end_by_teams(k, team, MEETING);
        }
    } else {
        take_registers<MANY_REGISTERS>();
        multiply_tiles(k, tiles);
        if constexpr (Kernel::kind == TEAMS) {
            Team<GROUP_THREADS> team(k.group);
            k.exchange(team);
            end_by_teams(k, team, MEETING);
        } else if (threadIdx.x % GROUP_THREADS == 0) {
            k.trace.stamp(EVENT_ENDED, p.rank, 0);
        }
    }
    __syncwarp();
    if constexpr (Kernel::kind == SENDERS) end_by_block(k);
    if (CLUSTER > 1) cluster_sync();
}
