// Shared by all CPU kernels: the export macro, element types, and signal slots in shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#define AF_EXPORT extern "C" __attribute__((visibility("default")))
#define AF_INLINE inline __attribute__((always_inline))

// One binary for every x86-64: the loader picks the widest version of a function that the machine can run.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define AF_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define AF_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define AF_CLONES
#endif

namespace af {

// The codes that Python passes for dtypes.
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

template <typename To, typename From>
AF_INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// Element types: `load` to float is exact, `store` rounds to nearest even. Free of branches, so loops vectorise.
struct F32 {
  using type = float;
  static AF_INLINE float load(float x) { return x; }
  static AF_INLINE float store(float x) { return x; }
};

struct BF16 {
  using type = uint16_t;
  static AF_INLINE float load(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
  static AF_INLINE uint16_t store(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return uint16_t((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

struct F16 {
  using type = uint16_t;
  static AF_INLINE float load(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16;
    const uint32_t magnitude = uint32_t(x & 0x7fff) << 13;
    const uint32_t normal = magnitude + (112u << 23);  // exponent bias 15 -> 127
    const uint32_t special = magnitude + (224u << 23);  // inf and nan: exponent 31 -> 255
    const float tiny = bits<float>(magnitude + (113u << 23)) - bits<float>(113u << 23);
    const uint32_t finite = magnitude < (1u << 23) ? bits<uint32_t>(tiny) : normal;
    return bits<float>(sign | (magnitude >= (31u << 23) ? special : finite));
  }
  static AF_INLINE uint16_t store(float x) {
    const uint32_t u = bits<uint32_t>(x) & 0x7fffffff;
    const uint32_t sign = (bits<uint32_t>(x) >> 16) & 0x8000;
    const uint32_t magic = 126u << 23;  // 0.5: one unit in its last place is half's smallest subnormal
    const uint32_t tiny = bits<uint32_t>(bits<float>(u) + bits<float>(magic)) - magic;
    const uint32_t normal = (u - (112u << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
    const uint32_t finite = u < (113u << 23) ? tiny : normal;
    const uint32_t special = u > 0x7f800000 ? 0x7e00 : 0x7c00;
    return uint16_t(sign | (u >= (143u << 23) ? special : finite));
  }
};

// A signal: the destination waits until `epoch` reaches a value. One cache line, so that no two share one.
struct alignas(64) Slot {
  std::atomic<uint64_t> epoch;
  std::atomic<uint32_t> waiters;
};

// What a rank publishes of its present call; the text that follows is for error messages only.
struct Header {
  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> hash;
  uint64_t length;
  char text[1000];
};

static_assert(sizeof(Slot) == 64 && sizeof(Header) == 1024, "Python addresses these by size");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "locks do not work across processes");

enum Status : int { kOk = 0, kTimedOut = 1, kMismatch = 2 };

}  // namespace af

// Raise a slot to `value`: everything stored before is visible to whoever sees it.
AF_EXPORT void af_signal(af::Slot* slot, uint64_t value);

// Wait until `slot` reaches `value`. `peer` (may be null) is the header of the rank that will raise it:
// kMismatch when that rank is in the same `epoch` with another `hash`. kTimedOut after `timeout_ms`.
AF_EXPORT int af_wait(af::Slot* slot, uint64_t value, const af::Header* peer, uint64_t epoch, uint64_t hash,
                      int spin_us, int timeout_ms);
