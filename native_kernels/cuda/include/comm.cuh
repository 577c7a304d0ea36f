// Signals, waits and epochs as native_kernels/triton/comm.py has them, for the same memory.
#pragma once
#include "ptx.cuh"

// Kinds of events in a trace, as in comm.py.
constexpr int BEGUN = 1, WAITED = 2, COMPUTED = 3, REDUCED = 5, COPIED = 6, ENDED = 8;

// What is waited for, in the low bits of the code of a wait, as in comm.py.
constexpr int REDUCING = 1, COPYING = 2, GATHERING = 3;

// Whether a wait has given up. Copy streams must then not wait either, which have no limit of their own: the last program
// sets what they wait for.
__device__ inline bool given_up(const int64_t* state) { return *static_cast<const volatile int64_t*>(state + 2) != 0; }

// Whether one who waits for `source` goes on, after so many polls. Where it does not come in time: raise state[2], and
// record (1, code, source, index, epoch). Sums, by the code, may take half as long again, as in comm.py.
struct Patience {
    int polls = 0;
    int64_t limit = 0;
    __device__ bool goes_on(int64_t* state, int code, int source, int index, int epoch) {
        if (++polls % 64) return true;  // the clock is slow to read, most of all for what comes soon
        if (limit == 0) limit = nanoseconds() + state[0] + (code % 8 == COPYING ? state[0] / 2 : 0);
        if (given_up(state)) return false;
        if (nanoseconds() < limit) return true;
        if (atomicExch(reinterpret_cast<unsigned long long*>(state + 2), 1ull)) return false;
        int* record = reinterpret_cast<int*>(state[1]);
        record[1] = code;
        record[2] = source;
        record[3] = index;
        record[4] = epoch;
        __threadfence_system();
        *static_cast<volatile int*>(record) = 1;
        return false;
    }
};

// Bounded wait of one thread for one signal of `source`; what the others of a block may read then is behind a
// barrier of theirs.
__device__ inline void wait(
    const int* counter, int target, int64_t* state, int code, int source, int index, int epoch) {
    Patience patience;
    while (load_acquire(counter) < target && patience.goes_on(state, code, source, index, epoch)) {
    }
}

// Ends the epoch, once all others are through.
__device__ inline void finish(int64_t* state, int epoch) {
    for (int word = 4; word < 8; ++word) state[word] = 0;
    state[3] = epoch;
}

#if TRACE
// As `stamp` of comm.py, into one row of a trace.
struct Trace {
    int64_t* lane;
    int event = 0;
    __device__ void stamp(int kind, int rank, int tile) {
        int64_t* at = lane + (event < EVENTS ? event : EVENTS - 1) * 2;
        at[0] = nanoseconds();
        at[1] = static_cast<int64_t>(kind) << 32 | static_cast<int64_t>(rank & 0xff) << 24 | tile;
        ++event;
    }
};
#else
struct Trace {
    int64_t* lane;
    __device__ void stamp(int, int, int) {}
};
#endif
