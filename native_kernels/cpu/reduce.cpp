// Reductions in rank order: sums are held in float32 in a small block, so that memory is read once, written
// once, and results are rounded once.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

// Small, so that all parts are read side by side as a few long streams.
constexpr int64_t kBlock = 256;

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

AF_INLINE int64_t width(int dtype) { return dtype == af::kFloat32 ? 4 : 2; }

struct Part {
  const char* data;
  int64_t stride;
  int dtype;
};

// One row of `n` elements. A plain function with switches inside, since target_clones takes no templates.
AF_CLONES void reduce_row(char* out, int out_dtype, const Part* parts, int n_parts, int64_t row, int64_t n,
                          float scale) {
  alignas(64) float sum[kBlock];
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t m = std::min(kBlock, n - j);
    for (int p = 0; p < n_parts; ++p) {
      const char* x = parts[p].data + (row * parts[p].stride + j) * width(parts[p].dtype);
      if (parts[p].dtype == af::kFloat32) {
        p == 0 ? fill<af::F32>(sum, x, m) : add<af::F32>(sum, x, m);
      } else if (parts[p].dtype == af::kBFloat16) {
        p == 0 ? fill<af::BF16>(sum, x, m) : add<af::BF16>(sum, x, m);
      } else {
        p == 0 ? fill<af::F16>(sum, x, m) : add<af::F16>(sum, x, m);
      }
    }
    char* y = out + j * width(out_dtype);
    if (out_dtype == af::kFloat32) {
      store<af::F32>(y, sum, scale, m);
    } else if (out_dtype == af::kBFloat16) {
      store<af::BF16>(y, sum, scale, m);
    } else {
      store<af::F16>(y, sum, scale, m);
    }
  }
}

}  // namespace

// out[i, j] = scale * (parts[0][i, j] + parts[1][i, j] + ...), strides between rows in elements.
AF_EXPORT void af_reduce_rows(void* out, int out_dtype, int64_t out_stride, const void* const* data,
                              const int64_t* strides, const int* dtypes, int n_parts, int64_t rows, int64_t cols,
                              float scale) {
  std::vector<Part> parts(n_parts);
  bool dense = out_stride == cols;
  for (int p = 0; p < n_parts; ++p) {
    parts[p] = {static_cast<const char*>(data[p]), strides[p], dtypes[p]};
    dense = dense && strides[p] == cols;
  }
  if (dense) {
    cols *= rows;
    rows = 1;
  }
  for (int64_t i = 0; i < rows; ++i) {
    char* row = static_cast<char*>(out) + i * out_stride * width(out_dtype);
    reduce_row(row, out_dtype, parts.data(), n_parts, i, cols, scale);
  }
}
