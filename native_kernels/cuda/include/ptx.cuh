// Single instructions of sm_90 that CUDA C++ has no name for.
#pragma once

using int32_t = int;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

// What cuTensorMapEncodeTiled has made.
struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ inline uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ inline int cluster_rank() {
    int r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Of `threads` threads of the block, by number of the barrier; some may arrive only.
__device__ inline void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ inline void named_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// --- mbarriers ---

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void barrier_inits_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the same barrier of block `rank` of the cluster. Orders nothing: with a scope wider than the block, arriving and
// waiting become fences of the whole GPU, a microsecond each.
__device__ inline void barrier_arrive_at(uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [a]; }" ::"r"(barrier), "r"(rank)
        : "memory");
}

// The same, after what this thread has read or stored in shared memory of the cluster.
__device__ inline void barrier_release_at(uint32_t barrier, int rank) {
    asm volatile(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }" ::"r"(barrier), "r"(rank)
        : "memory");
}

// The address, for the cluster, of the same place in the shared memory of block `rank`.
__device__ inline uint32_t shared_of(uint32_t at, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

// 16 bytes to shared memory of the cluster, and on a barrier there.
__device__ inline void store_async(uint32_t to, const float* v, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
        : "memory");
}

__device__ inline uint4 load_shared(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

__device__ inline void store_shared(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Whether the phase with this parity is over.
__device__ inline bool barrier_is_over(uint32_t barrier, int parity) {
    int over;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return over;
}

// Until the phase with this parity is over.
__device__ inline void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "POLL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra POLL; }" ::"r"(barrier), "r"(parity)
        : "memory");
}

// --- TMA ---

__device__ inline void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a matrix to shared memory, and its bytes on a barrier; of several SHARERS, to the same place in all blocks
// of the cluster that are in `mask`.
template <int SHARERS>
__device__ inline void load_share(
    uint32_t to, const TensorMap* map, int row, int col, uint32_t barrier, uint16_t mask) {
    if (SHARERS > 1)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(col), "r"(row), "r"(barrier), "h"(mask)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            ::"r"(to), "l"(map), "r"(col), "r"(row), "r"(barrier)
            : "memory");
}

// The same of a stack of matrices: what lies outside of matrix `matrix` is 0.
template <int SHARERS>
__device__ inline void load_share(
    uint32_t to, const TensorMap* map, int matrix, int row, int col, uint32_t barrier, uint16_t mask) {
    if (SHARERS > 1)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(col), "r"(row), "r"(matrix), "r"(barrier),
            "h"(mask)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(col), "r"(row), "r"(matrix), "r"(barrier)
            : "memory");
}

// A box of shared memory to a stack of matrices; what lies outside of these is not stored.
__device__ inline void store_box(const TensorMap* map, int matrix, int row, int col, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(col),
                 "r"(row), "r"(matrix), "r"(from)
                 : "memory");
}

// `bytes` (a multiple of 16) of shared memory to global memory, of this GPU or of a peer.
__device__ inline void store_bulk(void* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// The same, added to the 16-bit floats that are there.
__device__ inline void add_bulk(void* to, uint32_t from, int bytes) {
#if FP16
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
#else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
#endif
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the memory that was stored from may be written again.
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between ordinary accesses and those of TMA, to any memory, or to shared memory alone.
__device__ inline void fence_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void fence_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- tensor cores ---

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Shared memory as TMA writes it with a swizzle of 128 bytes; `leading`, `stride`: bytes between its atoms.
__device__ inline uint64_t matrix_at(uint32_t at, int leading, int stride) {
    return static_cast<uint64_t>((at & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}

// Four 8 x 8 matrices; each lane has the address of one of 32 rows.
__device__ inline void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// Two 8 x 8 matrices, transposed; each of the first 16 lanes has the address of a row of the result.
__device__ inline void store_transposed(uint32_t at, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

template <int REGISTERS>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// --- approximations, which flush denormal values to 0 ---

__device__ inline float exp2_of(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

__device__ inline float reciprocal(float v) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
    return inverse;
}

// --- 16-bit floats, two in a word, the first in the low half ---

__device__ inline uint32_t pair(float low, float high) {
    uint32_t w;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#endif
    return w;
}

__device__ inline float low_of(uint32_t w) {
#if FP16
    float f;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(w));
    return f;
#else
    return __uint_as_float(w << 16);
#endif
}

__device__ inline float high_of(uint32_t w) {
#if FP16
    float f;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(w));
    return f;
#else
    return __uint_as_float(w & 0xffff0000u);
#endif
}

// --- memory that peers store to ---

__device__ inline int load_acquire(const int* at) {
    int v;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ inline int load_relaxed(const int* at) {
    int v;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ inline int64_t load_relaxed(const int64_t* at) {
    int64_t v;
    asm volatile("ld.relaxed.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ inline void store_relaxed(int* at, int v) {
    asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// Add n after all that this thread, and those it has met at a barrier, stored before.
__device__ inline void add_release(int* at, int n = 1) {
    asm volatile("red.release.sys.global.add.s32 [%0], %1;" ::"l"(at), "r"(n) : "memory");
}

// The same at counters of several ranks: one fence for all, which takes microseconds while much is on its way.
__device__ inline void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void add_relaxed(int* at, int n = 1) {
    asm volatile("red.relaxed.sys.global.add.s32 [%0], %1;" ::"l"(at), "r"(n) : "memory");
}

// Past the L1 cache.
__device__ inline uint4 load_l2(const void* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ inline int load_l2(const int* at) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ inline void store(int* at, int v) {
    asm volatile("st.global.s32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ inline void store(void* at, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// 16 bytes that another GPU may read or write meanwhile: every word of 4 bytes is whole.
__device__ inline void store_relaxed(void* at, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ inline uint4 load_relaxed(const void* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Adds 1 to what programs of this GPU count, once they have read all that they read of others. A release would wait,
// for microseconds, for what is still on its way to other GPUs; the end of the kernel does.
__device__ inline int64_t count(int64_t* at) {
    int64_t before;
    asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(at) : "memory");
    return before;
}

// The same, of what this thread has stored before.
__device__ inline int count_stored(int* at) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return before;
}

__device__ inline int64_t nanoseconds() {
    int64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
