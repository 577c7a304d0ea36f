// Sixteen floats at a time: loads and stores of float32, bfloat16 and float16 with one rounding (to nearest,
// ties to even). All of it is inlined into leaf functions, which AF_DISPATCH compiles for several machines.
#pragma once

#include "common.h"
namespace af {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

AF_INLINE void widen(const Floats& in, Floats& out, float) { out = in; }

AF_INLINE void widen(const Halves& in, Floats& out, Bf16) {
  out = (Floats)(__builtin_convertvector(in, Words) << 16);
}

AF_INLINE void widen(const Halves& in, Floats& out, Fp16) {
  const Words half = __builtin_convertvector(in, Words);
  const Words magnitude = (half & 0x7fff) << 13;
  Words bits = (Words)((Floats)magnitude * 0x1p112f);           // moves the exponent, subnormals included
  bits |= (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;      // inf and nan
  out = (Floats)(bits | (half & 0x8000) << 16);
}

AF_INLINE void narrow(const Floats& in, Floats& out, float) { out = in; }

AF_INLINE void narrow(const Floats& in, Halves& out, Bf16) {
  const Words bits = (Words)in;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = (Words)(in != in);
  out = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Halves);
}

AF_INLINE void narrow(const Floats& in, Halves& out, Fp16) {
  const Words bits = (Words)in & 0x7fffffff;
  const Words sign = ((Words)in >> 16) & 0x8000;
  const Words huge = (Words)(bits >= 0x47800000u), tiny = (Words)(bits < 0x38800000u);
  const Words nan = (Words)(in != in);
  const Words normal = (bits - 0x38000000u + 0xfff + ((bits >> 13) & 1)) >> 13;
  const Words subnormal = (Words)((Floats)bits + 0.5f) - 0x3f000000u;  // the addition rounds at 2^-24
  const Words finite = (tiny & subnormal) | (~tiny & normal);
  out = __builtin_convertvector(sign | (huge & (0x7c00u | (nan & 0x0200u))) | (~huge & finite), Halves);
}

template <class T> struct Packed { using type = Halves; };
template <> struct Packed<float> { using type = Floats; };

// `count` < kLanes only at the end of a row.
template <class T> AF_INLINE void load(const T* from, Floats& out, int64_t count = kLanes) {
  typename Packed<T>::type packed{};
  std::memcpy(&packed, from, count * sizeof(T));
  widen(packed, out, T{});
}

template <class T> AF_INLINE void store(T* to, const Floats& in, int64_t count = kLanes) {
  typename Packed<T>::type packed;
  narrow(in, packed, T{});
  std::memcpy(to, &packed, count * sizeof(T));
}

template <class T> AF_INLINE void round_to(Floats& values) {
  typename Packed<T>::type packed;
  narrow(values, packed, T{});
  widen(packed, values, T{});
}

// AF_DISPATCH(name, Args, body) defines name(), which returns body(Args&) as compiled for this machine.
// Leaves stay out of line: inlined into the loops around them they would lose their registers to those.
#if defined(__x86_64__)
AF_INLINE int isa_level() {
  static const int level = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? 4
                           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")        ? 3
                                                                                                     : 1;
  return level;
}
#define AF_LEAF(...) __attribute__((noinline, target(__VA_ARGS__))) static void
#define AF_DISPATCH(name, Args, body)                                                  \
  AF_LEAF("avx512bw,avx512vl,avx512dq,fma") name##_v4(Args& a) { body(a); }            \
  AF_LEAF("avx2,fma") name##_v3(Args& a) { body(a); }                                  \
  __attribute__((noinline)) static void name##_v1(Args& a) { body(a); }                \
  static auto name() { return isa_level() == 4 ? name##_v4 : isa_level() == 3 ? name##_v3 : name##_v1; }
#else
#define AF_DISPATCH(name, Args, body)                                   \
  __attribute__((noinline)) static void name##_v1(Args& a) { body(a); } \
  static auto name() { return name##_v1; }
#endif

}  // namespace af
