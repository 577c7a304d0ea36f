// The tensor cores' instruction, in the widths in use: d [64, N] = A [64, 16] @ B [16, N] (+ d), fp32.
#pragma once
#include "ptx.cuh"

#if FP16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
// The weight lies in shared memory as [N, 16] (TRANSPOSED) or as [16, N].
#if TRANSPOSED
#define BY_COLUMNS "0"
#else
#define BY_COLUMNS "1"
#endif
#define D4 "%0, %1, %2, %3"
#define D8 D4 \
    ", %4, %5, %6, %7"
#define D16 D8 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D32 D16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D48 D32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define D64 D48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D80 D64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define D96 D80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D112 D96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define D128 D112 \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC8(i) ACC4(i), ACC4(i + 4)
#define ACC16(i) ACC8(i), ACC8(i + 8)
#define ACC32(i) ACC16(i), ACC16(i + 16)
#define ACC48(i) ACC32(i), ACC16(i + 32)
#define ACC64(i) ACC32(i), ACC32(i + 32)
#define ACC80(i) ACC64(i), ACC16(i + 64)
#define ACC96(i) ACC64(i), ACC32(i + 64)
#define ACC112(i) ACC96(i), ACC16(i + 96)
#define ACC128(i) ACC64(i), ACC64(i + 64)

// NAME<N>, of H = N / 2 accumulators a thread; the operands a, b and add have the numbers after those.
#define MULTIPLY(NAME, N, H, A, B, ADD, LEFT, RIGHT)                                                         \
    template <>                                                                                              \
    __device__ inline void NAME<N>(float (&d)[H], uint64_t a, uint64_t b, int add) {                         \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N     \
                     "k16.f32." TYPE "." TYPE " {" D##H "}, %" #A ", %" #B ", p, 1, 1, " LEFT ", " RIGHT "; }" \
                     : ACC##H(0)                                                                             \
                     : "l"(a), "l"(b), "r"(add));                                                            \
    }

// x as the left operand: d [64, N] = x [64, 16] @ w [16, N] (+ d). a, b: descriptors of shared memory; add: whether to
// add to d.
template <int N>
__device__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int add);
MULTIPLY(multiply, 64, 32, 32, 33, 34, "0", BY_COLUMNS)
MULTIPLY(multiply, 96, 48, 48, 49, 50, "0", BY_COLUMNS)
MULTIPLY(multiply, 128, 64, 64, 65, 66, "0", BY_COLUMNS)
MULTIPLY(multiply, 160, 80, 80, 81, 82, "0", BY_COLUMNS)
MULTIPLY(multiply, 192, 96, 96, 97, 98, "0", BY_COLUMNS)
MULTIPLY(multiply, 224, 112, 112, 113, 114, "0", BY_COLUMNS)
MULTIPLY(multiply, 256, 128, 128, 129, 130, "0", BY_COLUMNS)

// The weight as the left operand, N tokens as the right one: d [64, N] = w [16, 64]^T @ x [N, 16]^T (+ d).
template <int N>
__device__ void multiply_weight(float (&d)[N / 2], uint64_t a, uint64_t b, int add);
MULTIPLY(multiply_weight, 8, 4, 4, 5, 6, BY_COLUMNS, "0")
MULTIPLY(multiply_weight, 16, 8, 8, 9, 10, BY_COLUMNS, "0")
MULTIPLY(multiply_weight, 32, 16, 16, 17, 18, BY_COLUMNS, "0")
MULTIPLY(multiply_weight, 64, 32, 32, 33, 34, BY_COLUMNS, "0")
MULTIPLY(multiply_weight, 128, 64, 64, 65, 66, BY_COLUMNS, "0")
MULTIPLY(multiply_weight, 256, 128, 128, 129, 130, BY_COLUMNS, "0")

// A value that was computed before, and is not read sooner: else the compiler makes the tensor cores wait for every
// instruction.
__device__ inline float settled(float value) {
    float same;
    asm volatile("mov.b32 %0, %1;" : "=f"(same) : "f"(value));
    return same;
}
