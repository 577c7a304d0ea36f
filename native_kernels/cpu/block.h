// Blocks of columns of a row, in registers: loads, stores and roundings of any dtype.
#pragma once

#include "vec.h"
namespace af {

constexpr int kVectors = 4;                       // vectors that stay in registers between steps
constexpr int64_t kBlock = kVectors * kLanes;     // columns
constexpr int kBool = 3;                          // the dtype of masks

typedef Floats Block[kVectors];

AF_INLINE int64_t width(int dtype) { return dtype == kFloat32 ? 4 : dtype == kBool ? 1 : 2; }

// Lanes of vector `k` of a block of `n` columns; all of a block that is full.
template <bool kFull> AF_INLINE int64_t lanes(int64_t n, int k) {
  const int64_t left = n - k * kLanes;
  return kFull || left > kLanes ? kLanes : left < 0 ? 0 : left;
}

template <class T, bool kFull> AF_INLINE void load_block(const char* from, Block& v, int64_t n) {
  const T* x = reinterpret_cast<const T*>(from);
  for (int k = 0; k < kVectors; ++k) load(x + k * kLanes, v[k], lanes<kFull>(n, k));
}

template <bool kFull> AF_INLINE void load_block(const char* from, int dtype, Block& v, int64_t n) {
  if (dtype == kFloat32) {
    load_block<float, kFull>(from, v, n);
  } else if (dtype == kBFloat16) {
    load_block<Bf16, kFull>(from, v, n);
  } else {
    load_block<Fp16, kFull>(from, v, n);
  }
}

template <class T, bool kFull> AF_INLINE void store_block(char* to, const Block& v, int64_t n) {
  T* y = reinterpret_cast<T*>(to);
  for (int k = 0; k < kVectors; ++k) store(y + k * kLanes, v[k], lanes<kFull>(n, k));
}

// Of values that are rounded already: the upper halves of their bits.
template <bool kFull> AF_INLINE void store_upper_halves(char* to, const Block& v, int64_t n) {
  for (int k = 0; k < kVectors; ++k) {
    const Halves upper = __builtin_convertvector((Words)v[k] >> 16, Halves);
    std::memcpy(to + k * sizeof(upper), &upper, 2 * lanes<kFull>(n, k));
  }
}

template <bool kFull> AF_INLINE void store_block(char* to, int dtype, const Block& v, int64_t n) {
  if (dtype == kFloat32) {
    store_block<float, kFull>(to, v, n);
  } else if (dtype == kBFloat16) {
    store_upper_halves<kFull>(to, v, n);
  } else {
    store_block<Fp16, kFull>(to, v, n);
  }
}

AF_INLINE void round_block(Block& v, int dtype) {
  if (dtype == kBFloat16) {
    for (int k = 0; k < kVectors; ++k) {
      const Words bits = (Words)v[k];
      const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
      v[k] = v[k] == v[k] ? (Floats)rounded : (Floats)(bits | 0x400000u);
    }
  } else if (dtype == kFloat16) {
    for (int k = 0; k < kVectors; ++k) round_to<Fp16>(v[k]);
  }
}

}  // namespace af
