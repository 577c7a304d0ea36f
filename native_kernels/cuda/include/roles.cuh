// The roles of the threads of a block of frame.cuh, and what they do so that the kernel makes progress beside others: counting
// and claiming at the start, the gate before tickets, shares of blocks that do not run.
#pragma once
#include "gemm.cuh"
#include "progress.cuh"

constexpr int THREADS = 384, GROUP_THREADS = 128;    // of a block, of a warpgroup
constexpr int LOADER = 0, STORER = 32, HELPER = 64;  // first threads of the roles
constexpr int HELPERS = GROUP_THREADS - HELPER, HELPER_WARPS = HELPERS / 32;
constexpr int FEW_REGISTERS = 88, MANY_REGISTERS = 208;  // of a thread of the first warpgroup, of a thread that multiplies

// Numbers of named barriers; 0 is __syncthreads. Team i has TEAM_BARRIER + i.
constexpr int TEAM_BARRIER = 1, STORER_BARRIER = 4, END_BARRIER = 5;
constexpr int HELPER_WARP_BARRIER = 2;  // and 3, of SENDERS: one a warp
constexpr int ROUNDS_AHEAD = 64;        // of pieces, that the loader may be ahead of the other roles
static_assert(ROUNDS_AHEAD > 2 * STAGES + 2, "loaders of a row and a column of a cluster, and a staged tile");

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

// What the roles of a block tell each other.
struct Progress {
    int owned;    // 1: the share of sends is ours; 2: another block has it
    int next;     // 1 + the share of sends that comes next; 0: none
    int going;    // of the margin: 1: all peers are here, and the tiles are ours; 2: others have them
    int stopped;  // 1 + the number of tiles after which the loader has stopped
    int idle;     // warpgroups that have multiplied
    int gate;     // 1: tickets may be drawn; 2: this block ends without any; 3: as 1, and it is the last one
    int pieces[ROUNDS_AHEAD];  // of the cluster's round r, entry r % ROUNDS_AHEAD: see `taken`
};

__device__ inline Progress& progress() {
    __shared__ Progress found;
    return found;
}

// An entry of `Progress::pieces`: the round, from 1 on, and 1 + the piece that the cluster has taken; 0: no more.
constexpr int ROUND_SHIFT = 16;
__device__ inline int taken(int round, int piece) { return round + 1 << ROUND_SHIFT | piece + 1; }

__device__ inline int await_piece(const Progress& progress, int round) {
    int word;
    do word = peek(progress.pieces[round % ROUNDS_AHEAD]);
    while (word >> ROUND_SHIFT != round + 1);
    return (word & (1 << ROUND_SHIFT) - 1) - 1;
}

// The storer of each block counts it as started and claims its share of sends, before the block has made its barriers; the
// answers are needed later.
template <class Kernel>
struct Start {
    int64_t before = 0;
    int taken = 0;
    __device__ explicit Start(const Kernel& k) {
        if (threadIdx.x != STORER) return;
        before = atomicAdd(reinterpret_cast<unsigned long long*>(k.p.state + STATE_STARTED), 1ull);
        if (Kernel::SENDS) taken = atomicExch(claims(k.p.state, CLAIM_A) + k.block, 1);
    }

    // Once shared memory is 0. The first block tells the peers that the call has started. Of the margin, the first block of a
    // cluster waits for theirs.
    __device__ void tell(const Kernel& k, int tiles) const {
        if (threadIdx.x != STORER) return;
        if (Kernel::SENDS && !taken) count_claim(k.p.state, CLAIM_A);
        if (Kernel::SENDS) poke(progress().owned, taken ? 2 : 1);
        if (before == 0) tell_presence(k.p.state, k.p.rank, k.epoch);
        if (!Kernel::WAITS || !k.margin || (CLUSTER > 1 && cluster_rank() > 0)) return;
        int64_t end = nanoseconds() + YIELD_NS;
        bool here;
        do here = present(k.p.state, k.p.rank, k.epoch);
        while (!here && nanoseconds() < end);
        bool goes = here && claim_pieces(k.p.state, k.block / CLUSTER, k.pieces_of(tiles));
        for (int r = 0; r < CLUSTER; ++r) poke_at(progress().going, r, goes ? 1 : 2);
    }
};

// Team 0 decides for its block when tickets may be drawn. A ticket may wait for all blocks of this rank, and for all peers: for
// blocks that have not started this one makes room once it has multiplied its tiles, and in the margin for a peer as well. The
// last block that is left stays.
template <class Kernel>
__device__ inline int gate_of(const Kernel& k) {
    int64_t begun = nanoseconds();
    if (Kernel::WAITS && k.margin) await(progress().going);  // the last block sets the claims back
    while (true) {
        bool all = load_relaxed(k.p.state + STATE_STARTED) >= k.p.programs;
        if (all && (!k.margin || present(k.p.state, k.p.rank, k.epoch))) return 1;
        bool waited = nanoseconds() - begun > (all ? YIELD_NS : START_NS);
        if (waited && peek(progress().idle) == 2) return is_last(k.p.state, k.p.programs) ? 3 : 2;
    }
}

template <class Kernel, int SIZE>
__device__ inline void exchange_by_tickets(Kernel& k, Team<SIZE> team) {
    if (team.leads()) {
        if (team.number)
            atomicAdd(&progress().idle, 1);
        else
            poke(progress().gate, gate_of(k));
        await(progress().gate);
    }
    team.meet();
    if (peek(progress().gate) != 2) k.exchange(team);
}

// work(share) for a first share, then for those that nobody has claimed, by the helpers.
template <class Params, class Work>
__device__ inline void each_share(const Params& p, Team<HELPERS> team, int kind, int first, Work work) {
    int64_t begun = nanoseconds();
    for (int share = first; share >= 0;) {
        work(share);
        team.meet();
        if (team.leads()) {
            while (claimed(p.state, kind) < p.programs && nanoseconds() - begun < START_NS) {
            }
            bool all = claimed(p.state, kind) >= p.programs;
            poke(progress().next, all ? 0 : 1 + unclaimed(p.state, kind, 0, p.programs));
            poke(progress().owned, 1);
        }
        team.meet();
        share = peek(progress().next) - 1;
    }
}
