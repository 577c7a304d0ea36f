// Reductions in rank order: sums are held in float32 in a block that stays in the first-level cache, so that
// memory is read once and written once, and rounded once.
#include <algorithm>
#include <type_traits>

#include "common.h"

namespace {

constexpr int64_t kBlock = 2048;

template <typename T>
AF_INLINE void fill(float* sum, const void* part, int64_t n) {
  const auto* x = static_cast<const typename T::type*>(part);
  for (int64_t i = 0; i < n; ++i) sum[i] = T::load(x[i]);
}

template <typename T>
AF_INLINE void add(float* sum, const void* part, int64_t n) {
  const auto* x = static_cast<const typename T::type*>(part);
  for (int64_t i = 0; i < n; ++i) sum[i] += T::load(x[i]);
}

template <typename T>
AF_INLINE void store(void* out, const float* sum, float scale, int64_t n) {
  auto* y = static_cast<typename T::type*>(out);
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(scale * sum[i]);
}

// target_clones wants plain functions, so the dtype is a switch around loops that vectorise.
AF_CLONES void fill_block(int dtype, float* __restrict sum, const void* part, int64_t n) {
  if (dtype == af::kFloat32) return fill<af::F32>(sum, part, n);
  if (dtype == af::kBFloat16) return fill<af::BF16>(sum, part, n);
  fill<af::F16>(sum, part, n);
}

AF_CLONES void add_block(int dtype, float* __restrict sum, const void* part, int64_t n) {
  if (dtype == af::kFloat32) return add<af::F32>(sum, part, n);
  if (dtype == af::kBFloat16) return add<af::BF16>(sum, part, n);
  add<af::F16>(sum, part, n);
}

AF_CLONES void store_block(int dtype, void* out, const float* __restrict sum, float scale, int64_t n) {
  if (dtype == af::kFloat32) return store<af::F32>(out, sum, scale, n);
  if (dtype == af::kBFloat16) return store<af::BF16>(out, sum, scale, n);
  store<af::F16>(out, sum, scale, n);
}

AF_INLINE int64_t width(int dtype) { return dtype == af::kFloat32 ? 4 : 2; }

template <typename P>
AF_INLINE P* at(P* base, int64_t element, int dtype) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return static_cast<Byte*>(base) + element * width(dtype);
}

}  // namespace

// out[i, j] = scale * (parts[0][i, j] + parts[1][i, j] + ...), strides between rows in elements.
AF_EXPORT void af_reduce_rows(void* out, int out_dtype, int64_t out_stride, const void* const* parts,
                              const int64_t* part_strides, const int* part_dtypes, int n_parts, int64_t rows,
                              int64_t cols, float scale) {
  bool dense = out_stride == cols;
  for (int p = 0; p < n_parts; ++p) dense = dense && part_strides[p] == cols;
  if (dense) {
    cols *= rows;
    rows = 1;
  }
  alignas(64) float sum[kBlock];
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; j += kBlock) {
      const int64_t n = std::min(kBlock, cols - j);
      for (int p = 0; p < n_parts; ++p) {
        const void* part = at(parts[p], i * part_strides[p] + j, part_dtypes[p]);
        (p == 0 ? fill_block : add_block)(part_dtypes[p], sum, part, n);
      }
      store_block(out_dtype, at(out, i * out_stride + j, out_dtype), sum, scale, n);
    }
  }
}
