// The update of an optimizer on scattered tensors: sums of gradients in rank order, rules, norms. A tile is a run
// of the elements that one rank owns; a segment is the part of a tile that lies in one tensor.
#include <algorithm>
#include <cmath>

#include "common.h"

namespace {

constexpr int64_t kBlock = 512;  // a block of gradients and parameters stays in the L1 cache

struct Segment {
  int64_t tensor;
  int64_t start;  // in the tensor
  int64_t count;
  int64_t at;     // in the tile
};

enum Rule : int { kAdam = 0, kAmsgrad = 1, kSgd = 2, kMomentum = 3, kLamb = 4 };
enum Action : int { kUpdate = 0, kSum = 1, kDirect = 2, kApply = 3 };

// As the Structure `Work` in optimizer.py. Pointers that end in `_of` have an entry a tensor; all others are those
// of the tile.
struct Work {
  const Segment* segments;
  int64_t n_segments;
  char* const* params_of;
  const char* const* grads_of;  // of this rank; null: the tensor has no gradient and does not change
  const int* param_dtypes_of;
  const int* grad_dtypes_of;
  const float* numbers_of;      // the row of a tensor: see lowering/update_rules.py
  int64_t row;                  // its length
  const float* trust_of;        // kApply: the factor of the tensor
  double* norms_of;             // kDirect: [2], sums of squares of parameter and direction are added
  double* squares_of;           // kSum: the sum of squares of the sums is added; or null
  float* const* states_of[3];   // whole states, or null: `states` are those of the tile
  char* const* sums_of;         // sums that are read are written here, too, in the dtype of the gradient; or null
  char* const* parts;           // gradients of peers, an entry a rank
  char* out;                    // new parameters for the peers, or null
  int64_t part_width, out_width;  // bytes between elements; an element takes as many or fewer, from the segment on
  float* states[3];
  float* master;                // or null
  const float* sums;            // what is read, if `from_sums`
  float* kept;                  // kSum writes sums here, kDirect the direction
  float scale;                  // of what is read
  int rounds;                   // kSum rounds to the dtype of the gradient
  int from_sums, world, rank, rule, action;
};

AF_INLINE int64_t width(int dtype) { return dtype == af::kFloat32 ? 4 : 2; }

template <typename T, bool kAdd>
AF_INLINE void read_as(float* __restrict to, const void* from, int64_t n) {
  const auto* x = static_cast<const typename T::type*>(from);
  for (int64_t i = 0; i < n; ++i) to[i] = kAdd ? to[i] + T::load(x[i]) : T::load(x[i]);
}

template <bool kAdd>
AF_INLINE void read(float* to, const char* from, int dtype, int64_t n) {
  if (dtype == af::kFloat32) read_as<af::F32, kAdd>(to, from, n);
  else if (dtype == af::kBFloat16) read_as<af::BF16, kAdd>(to, from, n);
  else read_as<af::F16, kAdd>(to, from, n);
}

template <typename T>
AF_INLINE void write_as(void* to, const float* __restrict from, int64_t n) {
  auto* y = static_cast<typename T::type*>(to);
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(from[i]);
}

AF_INLINE void write(char* to, const float* from, int dtype, int64_t n) {
  if (dtype == af::kFloat32) write_as<af::F32>(to, from, n);
  else if (dtype == af::kBFloat16) write_as<af::BF16>(to, from, n);
  else write_as<af::F16>(to, from, n);
}

AF_INLINE double squares(const float* x, int64_t n) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) lanes[j] += double(x[i + j]) * double(x[i + j]);
  for (; i < n; ++i) lanes[0] += double(x[i]) * double(x[i]);
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

// The rules, with the numbers of `lowering/update_rules.py`. scale: of the gradient.

template <bool kMost>
AF_INLINE void adam(float* __restrict p, const float* __restrict grad, float* __restrict m, float* __restrict v,
                    float* __restrict most, float scale, const float* h, int64_t n) {
  const float keep = h[0], decay = h[1], take1 = h[2], keep2 = h[3], take2 = h[4], root = h[5], eps = h[6],
              step = h[7];
  for (int64_t i = 0; i < n; ++i) {
    const float g = scale * grad[i] + decay * p[i];
    m[i] += take1 * (g - m[i]);
    v[i] = keep2 * v[i] + take2 * g * g;
    float second = v[i];
    if (kMost) second = most[i] = std::max(most[i], second);
    p[i] = keep * p[i] - step * (m[i] / (std::sqrt(second) * root + eps));
  }
}

AF_INLINE void sgd(float* __restrict p, const float* __restrict grad, float scale, const float* h, int64_t n) {
  const float lr = h[0], decay = h[1];
  for (int64_t i = 0; i < n; ++i) p[i] -= lr * (scale * grad[i] + decay * p[i]);
}

AF_INLINE void momentum(float* __restrict p, const float* __restrict grad, float* __restrict m, float scale,
                        const float* h, int64_t n) {
  const float lr = h[0], decay = h[1], keep = h[2], take = h[3], of_g = h[4], of_m = h[5];
  for (int64_t i = 0; i < n; ++i) {
    const float g = scale * grad[i] + decay * p[i];
    m[i] = keep * m[i] + take * g;
    p[i] -= lr * (of_g * g + of_m * m[i]);
  }
}

AF_INLINE void lamb(const float* __restrict p, const float* __restrict grad, float* __restrict m,
                    float* __restrict v, float* __restrict direction, float scale, const float* h, int64_t n) {
  const float decay = h[1], take1 = h[2], keep2 = h[3], take2 = h[4], root = h[5], eps = h[6], first = h[7];
  for (int64_t i = 0; i < n; ++i) {
    const float g = scale * grad[i];
    m[i] += take1 * (g - m[i]);
    v[i] = keep2 * v[i] + take2 * g * g;
    direction[i] = first * m[i] / (std::sqrt(v[i]) * root + eps) + decay * p[i];
  }
}

AF_INLINE void fetch(const void* from, int64_t nbytes) {
  for (int64_t line = 0; line < nbytes; line += 64) __builtin_prefetch(static_cast<const char*>(from) + line);
}

// Plain, with switches inside: target_clones takes no templates.
AF_CLONES void run(const Work& w) {
  alignas(64) float sum[kBlock], wide[kBlock];
  for (int64_t s = 0; s < w.n_segments; ++s) {
    const Segment& segment = w.segments[s];
    const int64_t t = segment.tensor;
    if (!w.grads_of[t]) continue;
    const int of_param = w.param_dtypes_of[t], of_grad = w.grad_dtypes_of[t];
    const float* h = w.numbers_of + t * w.row;
    const float scale = w.scale * (w.action == kSum ? 1.0f : h[10]);
    for (int64_t j = 0; j < segment.count; j += kBlock) {
      const int64_t n = std::min(kBlock, segment.count - j), at = segment.at + j, from = segment.start + j;
      // A block is too short for the hardware to find the streams, so the next one is asked for.
      const int64_t next = std::min(kBlock, segment.count - j - n);
      if (!w.from_sums) fetch(w.grads_of[t] + (from + n) * width(of_grad), next * width(of_grad));
      float* states[3];
      for (int i = 0; i < 3; ++i) states[i] = w.states_of[i] ? w.states_of[i][t] + from : w.states[i] + at;
      if (w.action != kSum) {
        fetch(w.params_of[t] + (from + n) * width(of_param), next * width(of_param));
        for (int i = 0; i < 2; ++i) fetch(states[i] + n, w.states_of[i] || w.states[i] ? 4 * next : 0);
      }
      const float* g = sum;
      if (w.from_sums) {
        g = w.sums + at;
        if (w.sums_of && w.sums_of[t]) write(w.sums_of[t] + from * width(of_grad), g, of_grad, n);
      } else {
        for (int r = 0; r < w.world; ++r) {
          const char* part = r == w.rank ? w.grads_of[t] + segment.start * width(of_grad)
                                         : w.parts[r] + segment.at * w.part_width;
          part += j * width(of_grad);
          r == 0 ? read<false>(sum, part, of_grad, n) : read<true>(sum, part, of_grad, n);
        }
      }
      if (w.action == kSum) {
        float* kept = w.kept + at;
        for (int64_t i = 0; i < n; ++i) kept[i] = g[i] * scale;
        if (w.rounds && of_grad != af::kFloat32) {
          write(reinterpret_cast<char*>(wide), kept, of_grad, n);
          read<false>(kept, reinterpret_cast<char*>(wide), of_grad, n);
        }
        if (w.squares_of) w.squares_of[t] += squares(kept, n);
        continue;
      }
      char* param = w.params_of[t] + from * width(of_param);
      // Floats change where they lie.
      float* p = w.master ? w.master + at : of_param == af::kFloat32 ? reinterpret_cast<float*>(param) : wide;
      if (p == wide) read<false>(p, param, of_param, n);
      float *m = states[0], *v = states[1];
      if (w.action == kDirect) {
        if (g != sum) std::memcpy(sum, g, 4 * n);  // it may lie where the direction goes
        lamb(p, sum, m, v, w.kept + at, scale, h, n);
        w.norms_of[2 * t] += squares(p, n);
        w.norms_of[2 * t + 1] += squares(w.kept + at, n);
        continue;
      }
      if (w.action == kApply) {
        const float step = h[8] * w.trust_of[t];
        for (int64_t i = 0; i < n; ++i) p[i] -= step * g[i];
      } else if (w.rule == kAdam) {
        adam<false>(p, g, m, v, nullptr, scale, h, n);
      } else if (w.rule == kAmsgrad) {
        adam<true>(p, g, m, v, states[2], scale, h, n);
      } else if (w.rule == kMomentum) {
        momentum(p, g, m, scale, h, n);
      } else {
        sgd(p, g, scale, h, n);
      }
      if (static_cast<void*>(p) != param) write(param, p, of_param, n);
      if (w.out) write(w.out + segment.at * w.out_width + j * width(of_param), p, of_param, n);
    }
  }
}

}  // namespace

AF_EXPORT void af_update(const Work* work) { run(*work); }

// Copies segments of tensors into a tile (`in`) or out of it; tensors that are null in `present` are left out.
AF_EXPORT void af_copy_segments(char* tile, int64_t step, const Segment* segments, int64_t n, char* const* tensors,
                                const int* dtypes, const char* const* present, int in) {
  for (int64_t s = 0; s < n; ++s) {
    const Segment& segment = segments[s];
    const int64_t t = segment.tensor;
    if (!present[t]) continue;
    char* there = tile + segment.at * step;
    char* here = tensors[t] + segment.start * width(dtypes[t]);
    std::memcpy(in ? there : here, in ? here : there, segment.count * width(dtypes[t]));
  }
}
