// Signals, waits and epochs, as native_kernels/triton/comm.py has them, for the same memory. Names that begin with STATE_,
// RECORD_, WAIT_ and EVENT_ are macros from native_kernels/gpu/state.py.
#pragma once
#include "epoch.cuh"
#include "ptx.cuh"

// One call of a kernel, as its waits know it.
struct Call {
    int64_t* state;
    int site;
    int64_t epoch;
};

__device__ inline int64_t epoch_of(const int64_t* state) { return state[STATE_EPOCH] + 1; }

__device__ inline int64_t exchange(int64_t* at, int64_t value) {
    return static_cast<int64_t>(
        atomicExch(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value)));
}

// Whether a wait has given up. Copy streams wait without a limit of their own: the last program then raises their flags.
__device__ inline bool given_up(const int64_t* state) {
    return *static_cast<const volatile int64_t*>(state + STATE_GIVEN_UP) != 0;
}

// The bound of one wait. `goes_on` is asked after each poll. It returns false where the wait gives up: after its limit, where
// another wait of this rank has given up, or where the host says so (RECORD_STOP). The first one writes the failure record.
struct Patience {
    int polls = 0;
    int64_t begun = 0;
    __device__ bool goes_on(const Call& call, int what, int source, int index) {
        if (__builtin_expect(++polls % 64 != 0, 1)) return true;  // reading the clock takes longer than a poll
        if (polls == 64) begun = nanoseconds();
        int64_t* state = call.state;
        volatile int* record = reinterpret_cast<volatile int*>(state[STATE_RECORD]);
        int64_t waited = nanoseconds() - begun, limit = state[STATE_LIMIT];
        int code = call.site * CODES_PER_SITE + what;
        bool stop = given_up(state) || (polls % POLLS_PER_STOP == 0 && (record[RECORD_STOP] >> source & 1));
        if (__builtin_expect(!stop && waited < limit, 1)) {
            if (waited >= min(limit / 2, static_cast<int64_t>(SLOW_NS)) && raise(state + STATE_SLOW))
                record[RECORD_SLOW] = (source << SLOW_SOURCE_BIT) + code + 1;
            return true;
        }
        if (waited >= LONG_NS) record[RECORD_WAITED + source] = code + 1;
        if (!raise(state + STATE_GIVEN_UP)) return false;
        record[RECORD_CODE] = code;
        record[RECORD_SOURCE] = source;
        record[RECORD_INDEX] = index;
        record[RECORD_EPOCH] = static_cast<int>(call.epoch);
        __threadfence_system();
        record[RECORD_RAISED] = 1;
        return false;
    }

private:
    // True for who sets the word first.
    static __device__ bool raise(int64_t* word) { return !atomicExch(reinterpret_cast<unsigned long long*>(word), 1ull); }
};

// One thread waits until `counter` is at least `target`, the signals of `source`. Other threads of the block may read what
// was signalled behind a barrier.
__device__ inline void wait(const Call& call, const int* counter, int target, int what, int source, int index) {
    Patience patience;
    while (load_acquire(counter) < target && patience.goes_on(call, what, source, index)) {
    }
}

// One thread counts its program as through; true for the last of `programs`.
__device__ inline bool is_last(int64_t* state, int programs) { return count(state + STATE_THROUGH) == programs - 1; }

// The last program ends the call; word `kept` of state stays as it is. It tells if another launch has ended it before: two calls
// of a group ran at once.
__device__ inline void finish(const Call& call, int kept = -1) {
    for (int word = STATE_FINISHED; word < STATE_FIRM; ++word)
        if (word != kept) call.state[word] = 0;
    int64_t before = exchange(call.state + STATE_EPOCH, call.epoch);
    if (before == call.epoch - 1) return;
    int64_t what = static_cast<int64_t>(call.site * CODES_PER_SITE + WAIT_OVERLAP) << 48;
    *(reinterpret_cast<volatile int64_t*>(call.state[STATE_RECORD]) + BAD_INPUT_WORD) = what | (call.epoch & 0xffffffff);
}

// Copy engines may store to this rank again: each peer gets a credit, `credit` counters behind `counters` of its own. Where
// a wait has given up, our own streams must not wait either: their credit is raised here. Threads 0 to W - 1 call it.
__device__ inline void give_credit(const Call& call, int* const* counters, int credit, int rank, bool gives, int thread) {
    if (gives && thread != rank) add_release(counters[thread] + credit + rank);
    if (given_up(call.state)) counters[rank][credit + thread] = 1;
}

#if TRACE
// Events of one row of a trace; `stamp` of comm.py writes the same.
struct Trace {
    int64_t* row;
    int event = 0;
    __device__ void stamp(int kind, int rank, int tile) {
        int64_t* at = row + (event < EVENTS ? event : EVENTS - 1) * 2;
        at[0] = nanoseconds();
        at[1] = static_cast<int64_t>(kind) << 32 | static_cast<int64_t>(rank & 0xff) << 24 | tile;
        ++event;
    }
};
#else
struct Trace {
    int64_t* row;
    __device__ void stamp(int, int, int) {}
};
#endif
