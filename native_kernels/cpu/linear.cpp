// out = x @ w^T for a few rows of x in float32: every row of w is read from memory once, in order, and nothing
// is packed, which costs a matmul library more than the product itself when there are few rows.
#include <algorithm>

#include "vec.h"

namespace {

using namespace af;

struct Job {
  float* out;
  const float* x;
  const float* w;
  int64_t out_stride, x_stride, w_stride;  // between rows, in elements; columns are adjacent
  int64_t m, n, k;
};

// Rows of x and of w at a time. Their 24 sums, four rows of w and one of x fit the 32 registers, and a step
// loads ten vectors for 24 multiplications, few enough for the second-level cache that x is read from.
constexpr int kM = 6, kN = 4;

AF_INLINE float add_lanes(const Floats& values) {
  float part[kLanes];
  std::memcpy(part, &values, sizeof(part));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

// out[i, j] for `kX` rows i of x and `kW` rows j of w.
template <int kX, int kW> AF_INLINE void corner(const Job& job, int64_t i, int64_t j) {
  const float* x = job.x + i * job.x_stride;
  const float* w = job.w + j * job.w_stride;
  Floats sum[kX][kW] = {};
  const auto step = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
    Floats a, b[kW];
    for (int c = 0; c < kW; ++c) load(w + c * job.w_stride + at, b[c], count);
    for (int r = 0; r < kX; ++r) {
      load(x + r * job.x_stride + at, a, count);
      for (int c = 0; c < kW; ++c) sum[r][c] += a * b[c];
    }
  };
  const int64_t whole = job.k / kLanes * kLanes;
  for (int64_t at = 0; at < whole; at += kLanes) step(at, kLanes);
  if (whole < job.k) step(whole, job.k - whole);
  for (int r = 0; r < kX; ++r) {
    for (int c = 0; c < kW; ++c) job.out[(i + r) * job.out_stride + j + c] = add_lanes(sum[r][c]);
  }
}

template <int kW> AF_INLINE void columns(const Job& job, int64_t j) {
  int64_t i = 0;
  for (; i + kM <= job.m; i += kM) corner<kM, kW>(job, i, j);
  switch (job.m - i) {
    case 5: return corner<5, kW>(job, i, j);
    case 4: return corner<4, kW>(job, i, j);
    case 3: return corner<3, kW>(job, i, j);
    case 2: return corner<2, kW>(job, i, j);
    case 1: return corner<1, kW>(job, i, j);
  }
}

AF_INLINE void linear(Job& job) {
  int64_t j = 0;
  for (; j + kN <= job.n; j += kN) columns<kN>(job, j);
  for (; j < job.n; ++j) columns<1>(job, j);
}

AF_DISPATCH(leaf, Job, linear)

}  // namespace

AF_EXPORT void af_linear(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* w,
                         int64_t w_stride, int64_t m, int64_t n, int64_t k) {
  Job job{out, x, w, out_stride, x_stride, w_stride, m, n, k};
  leaf()(job);
}

// Whether this machine has the registers that `linear` counts on.
AF_EXPORT int af_linear_is_fast() {
#if defined(__x86_64__)
  return isa_level() == 4;
#else
  return 0;
#endif
}
