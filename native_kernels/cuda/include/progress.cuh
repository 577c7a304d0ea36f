// Progress beside other kernels: a kernel that was given a part of the GPU does what its peers wait for, and one whose peers
// are missing leaves room (docs/gpu.md, "Beside other kernels"). Claims, counters and presence in the words of `state`.
#pragma once
#include "comm.cuh"

// How long blocks that have nothing else to do wait for blocks that have not been placed.
constexpr int64_t START_NS = 20000;

// Of the part of a share that waits for no peer; of the part that may, by pieces; of a third part, in the second half of the
// same row; and with stamps.
enum Claim { CLAIM_A, CLAIM_B, CLAIM_C, STAMPED };

__device__ inline int* claims(int64_t* state, int kind) {
    constexpr int FIRST[] = {0, MOST_SHARES, MOST_SHARES * 3 / 2, MOST_SHARES * 2};
    return reinterpret_cast<int*>(state + STATE_WORDS) + FIRST[kind];
}

// Where claims are counted.
__device__ inline int claim_word(int kind) { return kind == CLAIM_C ? STATE_JOINED : STATE_CLAIMED_A + kind; }

// How many shares have been claimed.
__device__ inline int claimed(const int64_t* state, int kind) {
    return static_cast<int>(load_relaxed(state + claim_word(kind)));
}

__device__ inline void count_claim(int64_t* state, int kind, int claims = 1) {
    atomicAdd(reinterpret_cast<unsigned long long*>(state + claim_word(kind)), static_cast<unsigned long long>(claims));
}

// Takes a share; false if somebody has it.
__device__ inline bool claim(int64_t* state, int kind, int share) {
    if (atomicExch(claims(state, kind) + share, 1)) return false;
    count_claim(state, kind);
    return true;
}

// Takes a share from `first` to before `last` that nobody has; -1 if there is none.
__device__ inline int unclaimed(int64_t* state, int kind, int first, int last) {
    constexpr int AT_ONCE = 16;
    for (int share = first; share < last; share += AT_ONCE) {
        int seen[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            seen[i] = share + i < last ? load_relaxed(claims(state, kind) + share + i) : 1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (!seen[i] && claim(state, kind, share + i)) return share + i;
    }
    return -1;
}

// Tells all peers that this rank has started call `epoch`.
__device__ inline void tell_presence(const int64_t* state, int rank, int64_t epoch) {
    for (int r = 0; r < W; ++r)
        if (r != rank) store_relaxed(reinterpret_cast<int*>(state[STATE_PRESENCE + r]) + rank, static_cast<int>(epoch));
}

// Whether all peers have started call `epoch`.
__device__ inline bool present(const int64_t* state, int rank, int64_t epoch) {
    const int* told = reinterpret_cast<const int*>(state[STATE_PRESENCE + rank]);
    bool all = true;
    for (int r = 0; r < W; ++r)
        if (r != rank) all &= static_cast<int>(load_relaxed(told + r) - static_cast<uint32_t>(epoch)) >= 0;
    return all;
}

// A share of tiles that wait for peers is cut into pieces. The claim word of the share counts the pieces that clusters have
// claimed. The cluster that owns the share claims all pieces by one atomic; if it leaves early, it claims the pieces that it
// has stored. Another cluster claims one piece at a time, always the first piece that is unclaimed.
//
// Claims pieces 0 to `count` - 1 of a share for its owner. Returns false if another cluster has claimed a piece before.
__device__ inline bool claim_pieces(int64_t* state, int share, int count) {
    if (atomicCAS(claims(state, CLAIM_B) + share, 0, count)) return false;
    count_claim(state, CLAIM_B, count);
    return true;
}

// Claims one unclaimed piece of the shares from `first` to `last` - 1. A share has `pieces` pieces. The search begins at share
// `begin` and wraps around. Returns share * pieces + the number of the piece in its share; -1 if every piece is claimed.
__device__ inline int unclaimed_piece(int64_t* state, int first, int last, int begin, int pieces) {
    constexpr int AT_ONCE = 16;
    int* words = claims(state, CLAIM_B);
    auto share_at = [&](int i) { return begin + i < last ? begin + i : begin + i - (last - first); };
    for (int i = 0; i < last - first; i += AT_ONCE) {
        int seen[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) seen[j] = i + j < last - first ? load_relaxed(words + share_at(i + j)) : pieces;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (seen[j] >= pieces) continue;
            int share = share_at(i + j), piece = atomicAdd(words + share, 1);
            if (piece >= pieces) continue;
            count_claim(state, CLAIM_B);
            return share * pieces + piece;
        }
    }
    return -1;
}

// The last block of a call sets its claims back.
__device__ inline void clear_claims(int64_t* state, int shares, int thread, int threads) {
    for (int i = 4 * thread; i < shares; i += 4 * threads) {
        store(claims(state, CLAIM_A) + i, uint4{});
        store(claims(state, CLAIM_B) + i, uint4{});
        store(claims(state, CLAIM_C) + i, uint4{});
    }
}

// The same for kernels that end their epoch early. Claims carry the epoch, and calls count them in one of two words: the call
// before has cleared it.
__device__ inline int held_word(int64_t epoch) { return STATE_HELD_EVEN + half_of(epoch); }

__device__ inline int stamp_of(const Call& call) {  // `tag_of` of triton/comm.py, which is never 0
    uint64_t folded = (call.epoch & 0xffffffff) + (call.epoch >> 32);
    return static_cast<int>((folded & 0xffffffff) + (folded >> 32));
}

__device__ inline bool claim_stamped(const Call& call, int share) {
    int stamp = stamp_of(call);
    if (atomicExch(claims(call.state, STAMPED) + share, stamp) == stamp) return false;
    atomicAdd(reinterpret_cast<unsigned long long*>(call.state + held_word(call.epoch)), 1ull);
    return true;
}

__device__ inline int held(const Call& call) {
    return static_cast<int>(load_relaxed(call.state + held_word(call.epoch)));
}

// What the threads of a block, or of a cluster, tell each other: words of shared memory that are 0 at first.
__device__ inline int peek(const int& word) {
    int v;
    asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(&word)) : "memory");
    return v;
}

__device__ inline void poke(const int& word, int v) {
    asm volatile("st.volatile.shared.s32 [%0], %1;" ::"r"(shared_address(&word)), "r"(v) : "memory");
}

// The word of block `rank` of the cluster.
__device__ inline void poke_at(const int& word, int rank, int v) {
    asm volatile("st.relaxed.cluster.shared::cluster.s32 [%0], %1;" ::"r"(shared_of(shared_address(&word), rank)), "r"(v)
                 : "memory");
}

__device__ inline int await(const int& word) {
    int v;
    while (!(v = peek(word))) {
    }
    return v;
}
