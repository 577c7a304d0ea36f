// Tails: the stages behind a reduction, a row at a time in float32. After every stage the row is rounded to the
// dtype of the stage, as eager torch rounds. A row stays in the caches from the sum over the ranks to the results.
//
// A job is one array of words, which `tail.py` writes and `read` takes apart:
//   rows, columns, dtype of V, scale, segments, parts, operands, stages, results
//   a segment  columns, then of every part: data, row stride, dtype      the sum of its parts is V there
//   an operand data, row stride, column stride (0 or 1), dtype
//   a stage    code, dtype behind it, operand or -1, mask or -1, number
//   a result   data, row stride                                          V, then what is kept, in its order
// Strides are in elements; float32 numbers are passed as their bits.
#include <cmath>
#include <vector>

#include "vec.h"

namespace {

using namespace af;

constexpr int64_t kBlock = 256;  // columns at a time: operands are widened into a buffer of so many
constexpr int kBool = 3;         // the dtype of masks

#define AF_LAMBDA __attribute__((always_inline))

enum Code : int64_t { kAdd, kSub, kRsub, kMul, kDiv, kNeg, kRelu, kTo, kWhere, kFill, kRms, kStandardize, kKeep };
enum Keeps : int64_t { kNothing = -1, kStatistics = 1 };  // of a norm, in place of its operand

struct Part { const char* data; int64_t stride; int dtype; };
struct Segment { int64_t columns; const Part* parts; };
struct Operand { const char* data; int64_t row_stride, column_stride; int dtype; };
struct Stage { Code code; int dtype; int64_t operand, mask; float number; };
struct Result { char* data; int64_t stride; };

struct Job {
  int64_t rows, columns;
  int dtype;
  float scale;
  int64_t n_parts;
  std::vector<Part> parts;
  std::vector<Segment> segments;
  std::vector<Operand> operands;
  std::vector<Stage> stages;
  std::vector<Result> results;
  std::vector<float> row;
};

AF_INLINE int64_t width(int dtype) { return dtype == kFloat32 ? 4 : dtype == kBool ? 1 : 2; }

AF_INLINE int64_t lanes(int64_t left) { return left < kLanes ? left : kLanes; }

template <class T> AF_INLINE void widen_block(float* to, const char* from, int64_t n) {
  const T* x = reinterpret_cast<const T*>(from);
  int64_t i = 0;
  Floats v;
  for (; i + kLanes <= n; i += kLanes) load(x + i, v), store(to + i, v);
  if (i < n) load(x + i, v, n - i), store(to + i, v, n - i);
}

AF_INLINE void widen_block(float* to, const char* from, int dtype, int64_t n) {
  if (dtype == kFloat32) {
    widen_block<float>(to, from, n);
  } else if (dtype == kBFloat16) {
    widen_block<Bf16>(to, from, n);
  } else {
    widen_block<Fp16>(to, from, n);
  }
}

template <class T> AF_INLINE void add_block(float* to, const char* from, int64_t n) {
  const T* x = reinterpret_cast<const T*>(from);
  Floats sum, v;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = lanes(n - i);
    load(to + i, sum, count);
    load(x + i, v, count);
    store(to + i, sum + v, count);
  }
}

template <class T> AF_INLINE void narrow_block(char* to, const float* from, int64_t n) {
  T* y = reinterpret_cast<T*>(to);
  int64_t i = 0;
  Floats v;
  for (; i + kLanes <= n; i += kLanes) load(from + i, v), store(y + i, v);
  if (i < n) load(from + i, v, n - i), store(y + i, v, n - i);
}

AF_INLINE void narrow_block(char* to, const float* from, int dtype, int64_t n) {
  if (dtype == kFloat32) {
    narrow_block<float>(to, from, n);
  } else if (dtype == kBFloat16) {
    narrow_block<Bf16>(to, from, n);
  } else {
    narrow_block<Fp16>(to, from, n);
  }
}

// `value` has whole vectors: what lies behind the row is computed along and never stored.
template <class T> AF_INLINE void round_block(float* value, int64_t n) {
  Floats v;
  for (int64_t i = 0; i < n; i += kLanes) {
    load(value + i, v);
    round_to<T>(v);
    store(value + i, v);
  }
}

AF_INLINE void round_block(float* value, int dtype, int64_t n) {
  if (dtype == kBFloat16) round_block<Bf16>(value, n);
  if (dtype == kFloat16) round_block<Fp16>(value, n);
}

template <class F> AF_INLINE void map(float* value, int64_t n, const F& f) {
  Floats v;
  for (int64_t i = 0; i < n; i += kLanes) {
    load(value + i, v);
    f(v);
    store(value + i, v);
  }
}

template <class F> AF_INLINE void map(float* value, const float* other, int64_t n, const F& f) {
  Floats v, o;
  for (int64_t i = 0; i < n; i += kLanes) {
    load(value + i, v);
    load(other + i, o);
    f(v, o);
    store(value + i, v);
  }
}

AF_INLINE void splat(float x, Floats& out) { out = x - Floats{}; }  // not 0 + x: that of -0 is 0

AF_INLINE float total(const Floats& values) {
  float part[kLanes];
  std::memcpy(part, &values, sizeof(part));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

// The sum of f(V) over a row, in 64 running sums.
template <class F> AF_INLINE float sum_row(const float* value, int64_t n, const F& f) {
  Floats sums[4] = {}, v;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      load(value + i + k * kLanes, v);
      f(v);
      sums[k] += v;
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    load(value + i, v);
    f(v);
    sums[0] += v;
  }
  const Floats all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = total(all);
  if (i < n) {
    load(value + i, v, n - i);
    f(v);
    for (int64_t lane = 0; lane < n - i; ++lane) sum += v[lane];
  }
  return sum;
}

// Columns [at, at + n) of row `r` of an operand as float32: in place, or in `buffer`.
AF_INLINE const float* operand_block(const Operand& o, int64_t r, int64_t at, int64_t n, float* buffer) {
  const char* from = o.data + (r * o.row_stride + at * o.column_stride) * width(o.dtype);
  if (o.column_stride == 0) {
    float one;
    Floats all;
    widen_block(&one, from, o.dtype, 1);
    splat(one, all);
    for (int64_t i = 0; i < n; i += kLanes) store(buffer + i, all);
    return buffer;
  }
  if (o.dtype == kFloat32 && n % kLanes == 0) return reinterpret_cast<const float*>(from);
  widen_block(buffer, from, o.dtype, n);  // lanes behind the row are computed along
  return buffer;
}

AF_INLINE void choose(float* value, const Operand& m, int64_t r, int64_t at, int64_t n, const float* other, bool where) {
  const auto* mask = reinterpret_cast<const uint8_t*>(m.data) + r * m.row_stride + at * m.column_stride;
  for (int64_t i = 0; i < n; ++i) {
    const bool set = mask[i * m.column_stride] != 0;
    value[i] = set == where ? value[i] : other[i];
  }
}

AF_INLINE void pointwise(Job& job, const Stage& s, int64_t r, int64_t at, int64_t n) {
  alignas(64) float buffer[kBlock];
  if (n % kLanes != 0) std::memset(buffer, 0, sizeof(buffer));
  float* value = job.row.data() + at;
  const float* other = buffer;
  if (s.operand >= 0) {
    other = operand_block(job.operands[s.operand], r, at, n, buffer);
  } else if (s.code <= kDiv || s.code == kWhere || s.code == kFill) {
    Floats all;
    splat(s.number, all);
    for (int64_t i = 0; i < n; i += kLanes) store(buffer + i, all);
  }
  switch (s.code) {
    case kAdd: map(value, other, n, [](Floats& v, const Floats& o) AF_LAMBDA { v = v + o; }); break;
    case kSub: map(value, other, n, [](Floats& v, const Floats& o) AF_LAMBDA { v = v - o; }); break;
    case kRsub: map(value, other, n, [](Floats& v, const Floats& o) AF_LAMBDA { v = o - v; }); break;
    case kMul: map(value, other, n, [](Floats& v, const Floats& o) AF_LAMBDA { v = v * o; }); break;
    case kDiv: map(value, other, n, [](Floats& v, const Floats& o) AF_LAMBDA { v = v / o; }); break;
    case kNeg: map(value, n, [](Floats& v) AF_LAMBDA { v = -v; }); break;
    case kRelu: map(value, n, [](Floats& v) AF_LAMBDA { v = v < 0 ? Floats{} : v; }); break;
    case kWhere: choose(value, job.operands[s.mask], r, at, n, other, true); break;
    case kFill: choose(value, job.operands[s.mask], r, at, n, other, false); break;
    default: break;
  }
  round_block(value, s.dtype, n);
}

// V of row `r`: the parts are added in their order, scaled, and rounded once.
AF_INLINE void sum_parts(Job& job, int64_t r) {
  float* value = job.row.data();
  for (const Segment& s : job.segments) {
    for (int64_t at = 0; at < s.columns; at += kBlock) {
      const int64_t n = s.columns - at < kBlock ? s.columns - at : kBlock;
      for (int64_t p = 0; p < job.n_parts; ++p) {
        const Part& part = s.parts[p];
        const char* from = part.data + (r * part.stride + at) * width(part.dtype);
        if (p == 0) {
          widen_block(value + at, from, part.dtype, n);
        } else if (part.dtype == kFloat32) {
          add_block<float>(value + at, from, n);
        } else if (part.dtype == kBFloat16) {
          add_block<Bf16>(value + at, from, n);
        } else {
          add_block<Fp16>(value + at, from, n);
        }
      }
    }
    value += s.columns;
  }
  value = job.row.data();
  Floats scale;
  splat(job.scale, scale);
  if (job.scale != 1) map(value, job.columns, [&](Floats& v) AF_LAMBDA { v *= scale; });
  round_block(value, job.dtype, job.columns);
}

AF_INLINE void keep_number(const Result& result, int64_t r, float number) {
  reinterpret_cast<float*>(result.data)[r * result.stride] = number;
}

AF_INLINE int64_t norm(Job& job, const Stage& s, int64_t r, int64_t kept) {
  float* value = job.row.data();
  const int64_t n = job.columns;
  Floats mean{};
  float variance;
  const bool keeps = s.operand == kStatistics;
  if (s.code == kRms) {
    variance = sum_row(value, n, [](Floats& v) AF_LAMBDA { v *= v; }) / n;
  } else {
    const float m = sum_row(value, n, [](Floats&) AF_LAMBDA {}) / n;
    splat(m, mean);
    variance = sum_row(value, n, [&](Floats& v) AF_LAMBDA { v = (v - mean) * (v - mean); }) / n;
    if (keeps) keep_number(job.results[kept++], r, m);
  }
  const float root = 1 / std::sqrt(variance + s.number);
  Floats scale;
  splat(root, scale);
  if (s.code == kRms) {
    map(value, n, [&](Floats& v) AF_LAMBDA { v *= scale; });
  } else {
    map(value, n, [&](Floats& v) AF_LAMBDA { v = (v - mean) * scale; });
  }
  if (keeps) keep_number(job.results[kept++], r, root);
  return kept;
}

AF_INLINE void store_row(const Job& job, const Result& result, int64_t r, int dtype) {
  narrow_block(result.data + r * result.stride * width(dtype), job.row.data(), dtype, job.columns);
}

AF_INLINE void tail(Job& job) {
  for (int64_t r = 0; r < job.rows; ++r) {
    sum_parts(job, r);
    int64_t kept = 1;
    int dtype = job.dtype;
    for (const Stage& s : job.stages) {
      if (s.code == kKeep) {
        store_row(job, job.results[kept++], r, dtype);
      } else if (s.code == kRms || s.code == kStandardize) {
        kept = norm(job, s, r, kept);
      } else {
        for (int64_t at = 0; at < job.columns; at += kBlock) {
          pointwise(job, s, r, at, job.columns - at < kBlock ? job.columns - at : kBlock);
        }
      }
      dtype = s.dtype;
    }
    store_row(job, job.results[0], r, dtype);
  }
}

AF_DISPATCH(leaf, Job, tail)

float number_of(int64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  float number;
  std::memcpy(&number, &low, sizeof(number));
  return number;
}

Job read(const int64_t* at) {
  const auto next = [&] { return *at++; };
  const auto data = [&] { return reinterpret_cast<char*>(next()); };
  Job job;
  job.rows = next();
  job.columns = next();
  job.dtype = static_cast<int>(next());
  job.scale = number_of(next());
  const int64_t n_segments = next();
  job.n_parts = next();
  const int64_t n_operands = next(), n_stages = next(), n_results = next();
  job.parts.resize(n_segments * job.n_parts);
  for (int64_t i = 0; i < n_segments; ++i) {
    Part* parts = job.parts.data() + i * job.n_parts;
    job.segments.push_back({next(), parts});
    for (int64_t p = 0; p < job.n_parts; ++p) {
      parts[p].data = data();
      parts[p].stride = next();
      parts[p].dtype = static_cast<int>(next());
    }
  }
  for (int64_t i = 0; i < n_operands; ++i) {
    Operand o;
    o.data = data();
    o.row_stride = next();
    o.column_stride = next();
    o.dtype = static_cast<int>(next());
    job.operands.push_back(o);
  }
  for (int64_t i = 0; i < n_stages; ++i) {
    Stage s;
    s.code = static_cast<Code>(next());
    s.dtype = static_cast<int>(next());
    s.operand = next();
    s.mask = next();
    s.number = number_of(next());
    job.stages.push_back(s);
  }
  for (int64_t i = 0; i < n_results; ++i) {
    Result result;
    result.data = data();
    result.stride = next();
    job.results.push_back(result);
  }
  job.row.resize((job.columns + kLanes - 1) / kLanes * kLanes);
  return job;
}

}  // namespace

AF_EXPORT void af_tail(const int64_t* words) {
  Job job = read(words);
  leaf()(job);
}
