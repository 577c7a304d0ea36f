// Blocks that hold a multiprocessor each, until they are told to end.
struct alignas(64) Params {
    volatile int* held;    // [blocks], 1: it runs
    volatile int* ending;  // 1: end; both in memory of the host
};
CHECK_PARAMS

extern "C" __global__ void hold(const __grid_constant__ Params p) {
    p.held[blockIdx.x] = 1;
    __threadfence_system();
    while (!*p.ending) __nanosleep(1000);
}
