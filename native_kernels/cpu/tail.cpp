// Tails: the stages behind a reduction, a row at a time in float32. After every stage values are rounded to the
// dtype of the stage, as eager torch rounds. Values stay in registers from the sum over the ranks up to a norm, and
// in the caches between norms.
//
// A job is one array of words, which `tail.py` writes and `read` takes apart:
//   rows, columns, dtype of V, scale, segments, parts, operands, stages, results
//   a segment  columns, then of every part: data, row stride, dtype      the sum of its parts is V there
//   an operand data, row stride, column stride (0 or 1), dtype
//   a stage    code, dtype behind it, operand or -1, mask (of project: scale) or -1, number
//   a result   data, row stride                                          V, then what is kept, in its order
// Strides are in elements; float32 numbers are passed as their bits.
#include <cmath>
#include <vector>

#include "block.h"

namespace {

using namespace af;


enum Code : int64_t {
  kAdd, kSub, kRsub, kMul, kDiv, kNeg, kRelu, kTo, kWhere, kFill, kClampMin, kClampMax, kRms, kStandardize,
  kProject, kCentre, kKeep
};
constexpr int64_t kStatistics = 1;                // in place of its operand: a norm keeps its statistics

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

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

AF_INLINE void splat(float x, Floats& out) { out = x - Floats{}; }  // not 0 + x: that of -0 is 0

template <bool kFull>
AF_INLINE void load_operand(const Operand& o, int64_t r, int64_t at, Block& v, int64_t n) {
  const char* from = o.data + (r * o.row_stride + at * o.column_stride) * width(o.dtype);
  if (o.column_stride != 0) return load_block<kFull>(from, o.dtype, v, n);
  load_block<false>(from, o.dtype, v, 1);
  splat(v[0][0], v[0]);
  for (int k = 1; k < kVectors; ++k) v[k] = v[0];
}

template <bool kFull>
AF_INLINE void choose(const Operand& m, int64_t r, int64_t at, Block& v, const Block& set, const Block& unset,
                      int64_t n) {
  const auto* from = reinterpret_cast<const uint8_t*>(m.data) + r * m.row_stride + at * m.column_stride;
  for (int k = 0; k < kVectors; ++k) {
    Bytes mask{};
    if (m.column_stride != 0) {
      std::memcpy(&mask, from + k * kLanes, lanes<kFull>(n, k));
    } else {
      mask += *from;
    }
    v[k] = __builtin_convertvector(mask, Words) != 0 ? set[k] : unset[k];
  }
}

// One pointwise stage on columns [at, at + n) of row `r`. Stages are apart, so that none is contracted with the
// next one into a multiplication and addition that rounds once.
template <bool kFull> AF_INLINE void pointwise(const Job& job, const Stage& s, int64_t r, int64_t at, Block& v, int64_t n) {
  Block o;
  if (s.operand >= 0) {
    load_operand<kFull>(job.operands[s.operand], r, at, o, n);
  } else {
    for (int k = 0; k < kVectors; ++k) splat(s.number, o[k]);
  }
  switch (s.code) {
    case kAdd: for (int k = 0; k < kVectors; ++k) v[k] = v[k] + o[k]; break;
    case kSub: for (int k = 0; k < kVectors; ++k) v[k] = v[k] - o[k]; break;
    case kRsub: for (int k = 0; k < kVectors; ++k) v[k] = o[k] - v[k]; break;
    case kMul: for (int k = 0; k < kVectors; ++k) v[k] = v[k] * o[k]; break;
    case kDiv: for (int k = 0; k < kVectors; ++k) v[k] = v[k] / o[k]; break;
    case kNeg: for (int k = 0; k < kVectors; ++k) v[k] = -v[k]; break;
    case kRelu: for (int k = 0; k < kVectors; ++k) v[k] = v[k] < 0 ? Floats{} : v[k]; break;
    case kClampMin: for (int k = 0; k < kVectors; ++k) v[k] = v[k] < o[k] ? o[k] : v[k]; break;
    case kClampMax: for (int k = 0; k < kVectors; ++k) v[k] = v[k] > o[k] ? o[k] : v[k]; break;
    case kWhere: choose<kFull>(job.operands[s.mask], r, at, v, v, o, n); break;
    case kFill: choose<kFull>(job.operands[s.mask], r, at, v, o, v, n); break;
    default: break;
  }
  round_block(v, s.dtype);
}

// A run of pointwise stages and keeps, up to the next norm or the end.
struct Run {
  const Stage* begin;
  const Stage* end;
  int dtype;           // of V before it
  int64_t kept;        // results before it
  const Stage* before; // the norm before it, or null
  float mean, scale;   // of that norm; of project and centre the scale is the mean of V * X
};

AF_INLINE bool is_norm(const Stage& s) { return s.code >= kRms && s.code <= kCentre; }  // reads whole rows first

// X, which project and centre take out of V.
template <bool kFull>
AF_INLINE void load_direction(const Job& job, const Stage& s, int64_t r, int64_t at, Block& x, int64_t n) {
  load_operand<kFull>(job.operands[s.operand], r, at, x, n);
  if (s.mask < 0) return;
  Block scale;
  load_operand<kFull>(job.operands[s.mask], r, at, scale, n);
  for (int k = 0; k < kVectors; ++k) x[k] = x[k] * scale[k];
}

// Adds V * X to the sums.
template <bool kFull>
AF_INLINE void add_products(const Job& job, const Stage& s, int64_t r, int64_t at, const Block& v, int64_t n, Block& sums) {
  Block x;
  load_direction<kFull>(job, s, r, at, x, n);
  for (int k = 0; k < kVectors; ++k) {
    Floats product = v[k] * x[k];
    if (!kFull) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        if (k * kLanes + lane >= n) product[lane] = 0;
      }
    }
    sums[k] += product;
  }
}

// The run on columns [at, at + n) of row `r`, and what follows: sums for the norm behind it, or the result.
template <bool kFull>
AF_INLINE void run_block(Job& job, const Run& run, int64_t r, int64_t at, Block& v, int64_t n, Block& sums) {
  if (run.before != nullptr) {
    Floats mean, scale;
    splat(run.mean, mean);
    splat(run.scale, scale);
    if (run.before->code == kRms) {
      for (int k = 0; k < kVectors; ++k) v[k] = v[k] * scale;
    } else if (run.before->code == kStandardize) {
      for (int k = 0; k < kVectors; ++k) v[k] = (v[k] - mean) * scale;
    } else {
      Block x;
      load_direction<kFull>(job, *run.before, r, at, x, n);
      if (run.before->code == kCentre) {
        for (int k = 0; k < kVectors; ++k) v[k] = v[k] - mean;
      }
      for (int k = 0; k < kVectors; ++k) v[k] = v[k] - x[k] * scale;
    }
  }
  int dtype = run.dtype;
  int64_t kept = run.kept;
  for (const Stage* s = run.begin; s != run.end; ++s) {
    if (s->code == kKeep) {
      const Result& result = job.results[kept++];
      store_block<kFull>(result.data + (r * result.stride + at) * width(dtype), dtype, v, n);
    } else {
      pointwise<kFull>(job, *s, r, at, v, n);
      dtype = s->dtype;
    }
  }
  const Stage* next = run.end;
  if (next == job.stages.data() + job.stages.size()) {
    const Result& result = job.results[0];
    store_block<kFull>(result.data + (r * result.stride + at) * width(dtype), dtype, v, n);
    return;
  }
  store_block<float, kFull>(reinterpret_cast<char*>(job.row.data() + at), v, n);
  if (!kFull) {  // lanes behind the row do not count
    for (int k = 0; k < kVectors; ++k) load(job.row.data() + at + k * kLanes, v[k], lanes<kFull>(n, k));
  }
  if (next->code == kRms) {
    for (int k = 0; k < kVectors; ++k) sums[k] += v[k] * v[k];
  } else if (next->code == kProject) {
    add_products<kFull>(job, *next, r, at, v, n, sums);
  } else {
    for (int k = 0; k < kVectors; ++k) sums[k] += v[k];
  }
}

// V of columns [at, at + n) of a segment: its parts are added in their order, scaled, and rounded once.
template <bool kFull> AF_INLINE void sum_block(const Job& job, const Segment& s, int64_t r, int64_t at, Block& v, int64_t n) {
  for (int64_t p = 0; p < job.n_parts; ++p) {
    const Part& part = s.parts[p];
    const char* from = part.data + (r * part.stride + at) * width(part.dtype);
    if (p == 0) {
      load_block<kFull>(from, part.dtype, v, n);
    } else {
      Block more;
      load_block<kFull>(from, part.dtype, more, n);
      for (int k = 0; k < kVectors; ++k) v[k] += more[k];
    }
  }
  if (job.scale != 1) {
    for (int k = 0; k < kVectors; ++k) v[k] *= job.scale;
  }
  round_block(v, job.dtype);
}

template <bool kFull>
AF_INLINE void first_block(Job& job, const Run& run, const Segment& s, int64_t start, int64_t r, int64_t at, int64_t n,
                           Block& sums) {
  Block v{};
  sum_block<kFull>(job, s, r, at, v, n);
  run_block<kFull>(job, run, r, start + at, v, n, sums);
}

template <bool kFull> AF_INLINE void next_block(Job& job, const Run& run, int64_t r, int64_t at, int64_t n, Block& sums) {
  Block v;
  load_block<float, kFull>(reinterpret_cast<const char*>(job.row.data() + at), v, n);
  run_block<kFull>(job, run, r, at, v, n, sums);
}

AF_INLINE float total(const Block& sums) {
  float part[kLanes];
  Floats all = sums[0];
  for (int k = 1; k < kVectors; ++k) all += sums[k];
  std::memcpy(part, &all, sizeof(part));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

// The sum of squares of the row's distances from `mean`.
AF_INLINE float spread(const Job& job, float mean) {
  Block sums{};
  Floats middle;
  splat(mean, middle);
  for (int64_t at = 0; at < job.columns; at += kLanes) {
    Floats v;
    const int64_t left = job.columns - at;
    load(job.row.data() + at, v);
    v -= middle;
    v *= v;
    if (left < kLanes) {
      for (int64_t lane = left; lane < kLanes; ++lane) v[lane] = 0;
    }
    sums[at / kLanes % kVectors] += v;
  }
  return total(sums);
}

// The sum of the row's products with X, which `s` takes out of it.
AF_INLINE float products(const Job& job, const Stage& s, int64_t r) {
  const auto* row = reinterpret_cast<const char*>(job.row.data());
  Block v, sums{};
  int64_t at = 0;
  for (; at + kBlock <= job.columns; at += kBlock) {
    load_block<float, true>(row + at * sizeof(float), v, kBlock);
    add_products<true>(job, s, r, at, v, kBlock, sums);
  }
  if (at < job.columns) {
    load_block<float, false>(row + at * sizeof(float), v, job.columns - at);
    add_products<false>(job, s, r, at, v, job.columns - at, sums);
  }
  return total(sums);
}

AF_INLINE void keep_number(const Result& result, int64_t r, float number) {
  reinterpret_cast<float*>(result.data)[r * result.stride] = number;
}

// The statistics of the norm that the run before has summed for; the run behind it is the next one.
AF_INLINE void measure(Job& job, Run& run, int64_t r, const Block& sums) {
  const Stage& norm = *run.end;
  const float mean = total(sums) / job.columns;
  float second = mean;
  if (norm.code == kStandardize) second = spread(job, mean) / job.columns;
  if (norm.code == kCentre) second = products(job, norm, r) / job.columns;
  for (const Stage* s = run.begin; s != run.end; ++s) run.kept += s->code == kKeep;
  run.mean = mean;
  run.scale = norm.code <= kStandardize ? 1 / std::sqrt(second + norm.number) : second;
  if (norm.code <= kStandardize && norm.operand == kStatistics) {
    if (norm.code == kStandardize) keep_number(job.results[run.kept++], r, mean);
    keep_number(job.results[run.kept++], r, run.scale);
  }
  run.before = run.end;
  run.begin = run.end + 1;
  run.dtype = norm.dtype;
}

AF_INLINE const Stage* end_of(const Job& job, const Stage* from) {
  const Stage* end = job.stages.data() + job.stages.size();
  while (from != end && !is_norm(*from)) ++from;
  return from;
}

AF_INLINE void tail(Job& job) {
  const Stage* end = job.stages.data() + job.stages.size();
  for (int64_t r = 0; r < job.rows; ++r) {
    Run run{job.stages.data(), end_of(job, job.stages.data()), job.dtype, 1, nullptr, 0, 0};
    Block sums{};
    int64_t start = 0;
    for (const Segment& s : job.segments) {
      int64_t at = 0;
      for (; at + kBlock <= s.columns; at += kBlock) first_block<true>(job, run, s, start, r, at, kBlock, sums);
      if (at < s.columns) first_block<false>(job, run, s, start, r, at, s.columns - at, sums);
      start += s.columns;
    }
    while (run.end != end) {
      measure(job, run, r, sums);
      run.end = end_of(job, run.begin);
      for (Floats& sum : sums) sum = Floats{};
      int64_t at = 0;
      for (; at + kBlock <= job.columns; at += kBlock) next_block<true>(job, run, r, at, kBlock, sums);
      if (at < job.columns) next_block<false>(job, run, r, at, job.columns - at, sums);
    }
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
