// The stage, of STAGES in shared memory, that a producer or consumer is at, and the parity of its round.
#pragma once

struct Turn {
    int stage = 0, parity = 0;
    __device__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
