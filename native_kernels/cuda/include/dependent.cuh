// Programmatic dependent launch (native_kernels/gpu/dependent.py).
#pragma once
#include "progress.cuh"

// Waits until the kernels in front of this one have ended and their stores can be read.
__device__ inline void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel be placed if all peers have started the call. One thread of each block calls it; a kernel that does not
// call it in all blocks lets the next one be placed when it has ended.
__device__ inline void launch_dependents(const Call& call, int rank) {
    if (present(call.state, rank, call.epoch)) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
