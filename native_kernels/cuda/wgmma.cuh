// The tensor cores' instruction, in the widths in use: d [64, N] = A [64, 16] @ B [16, N] (+ d), fp32.
#pragma once
#include "ptx.cuh"

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
// B lies in shared memory as [N, 16] (TRANSPOSED) or as [16, N].
#if TRANSPOSED
#define B_BY_COLUMNS "0"
#else
#define B_BY_COLUMNS "1"
#endif
#define ACC8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])

// a, b: descriptors of shared memory; add: whether to add to d.
template <int N>
__device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int add);

template <>
__device__ inline void multiply<64>(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, " B_BY_COLUMNS "; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24)
        : "l"(a), "l"(b), "r"(add));
}

template <>
__device__ inline void multiply<128>(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, " B_BY_COLUMNS "; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24),
        ACC8(32), ACC8(40), ACC8(48), ACC8(56)
        : "l"(a), "l"(b), "r"(add));
}

template <>
__device__ inline void multiply<256>(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
        "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
        "%126, %127"
        "}, %128, %129, p, 1, 1, 0, " B_BY_COLUMNS "; }"
        : ACC8(0), ACC8(8), ACC8(16), ACC8(24),
        ACC8(32), ACC8(40), ACC8(48), ACC8(56),
        ACC8(64), ACC8(72), ACC8(80), ACC8(88),
        ACC8(96), ACC8(104), ACC8(112), ACC8(120)
        : "l"(a), "l"(b), "r"(add));
}

// The weight as the left operand, 8 tokens as the right one: d [64, 8] = w [16, 64]^T @ x [8, 16]^T (+ d).
__device__ inline void multiply_weight(float (&d)[4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0, %1, %2, %3}, %4, %5, p, 1, 1, " B_BY_COLUMNS
        ", 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "l"(a), "l"(b), "r"(add));
}

// A value that was computed before, and is not read sooner: else the compiler makes the tensor cores wait for every
// instruction.
__device__ inline float settled(float value) {
    float same;
    asm volatile("mov.b32 %0, %1;" : "=f"(same) : "f"(value));
    return same;
}
