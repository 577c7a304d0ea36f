// Where in its STAGES of shared memory a producer or a consumer is, and in which round.
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
