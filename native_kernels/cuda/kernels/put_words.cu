// Stores int64 values that come as a parameter, so that a captured CUDA graph contains them.
struct alignas(64) Params {
    long long* to;
    long long count;
    long long words[MOST];
};
CHECK_PARAMS

extern "C" __global__ void __launch_bounds__(256) put_words(const __grid_constant__ Params p) {
    for (int i = threadIdx.x; i < p.count; i += 256) p.to[i] = p.words[i];
}
