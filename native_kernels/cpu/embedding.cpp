// Embedding bags. Pooling stores every pooled row where its reader wants it, whoever's memory that is; the
// gradient scatter-adds rows, or gives every entry its own where it is sparse. Both go table by table, since one table may fit into a cache where all do not,
// and prefetch rows beyond the end of the bag.
#include <algorithm>

#include "vec.h"

namespace {

using namespace af;

constexpr int64_t kAhead = 16;  // table rows prefetched ahead
constexpr int kWide = 4;        // vectors of a pooled row that stay in registers

enum Mode : int64_t { kSum = 0, kMean = 1, kMax = 2 };
enum Error : int { kOk = 0, kBadIndex = 1, kBadOffset = 2 };

struct Table {
  char* rows;           // [num_rows, dim]: weights when pooling, else gradients
  int64_t num_rows, dim;
  const char* indices;  // [num_indices]
  int64_t num_indices;
  const char* offsets;  // [total], or one more
  const char* weights;  // [num_indices], or null
  int64_t column;       // of the table in a row of bags
};

struct Bags {
  int64_t first, count, total;  // this call's bags, and all of them
  int64_t stride;               // elements between the rows of two bags
  int64_t last_offset;          // 1 if offsets has an entry behind the last bag
  int64_t mode, padding;
};

struct Failure {
  int64_t table, value;
};

template <class I> struct Bag {
  const I* begin;
  const I* end;
};

template <class I> AF_INLINE bool find_bag(const Table& t, const Bags& bags, int64_t bag, Bag<I>& out) {
  const I* offsets = reinterpret_cast<const I*>(t.offsets);
  const I* indices = reinterpret_cast<const I*>(t.indices);
  const int64_t start = offsets[bag];
  const int64_t stop = bag + 1 < bags.total || bags.last_offset ? int64_t(offsets[bag + 1]) : t.num_indices;
  out = {indices + start, indices + stop};
  return 0 <= start && start <= stop && stop <= t.num_indices;
}

// The work of one leaf: all bags of one table.
struct Job {
  const Table& table;
  const Bags& bags;
  DType wire;
  char* out;
  Error error;
  int64_t bad;
};

template <class T> AF_INLINE float scalar(const char* values, int64_t i) {
  Floats one;
  load(reinterpret_cast<const T*>(values) + i, one, 1);
  return one[0];
}

AF_INLINE void store_as(DType dtype, char* to, int64_t at, const Floats& values, int64_t count) {
  if (dtype == kFloat32) {
    store(reinterpret_cast<float*>(to) + at, values, count);
  } else if (dtype == kBFloat16) {
    store(reinterpret_cast<Bf16*>(to) + at, values, count);
  } else {
    store(reinterpret_cast<Fp16*>(to) + at, values, count);
  }
}

// Pools `kVectors` vectors of columns from `column` on, the last of `tail` elements, into out + at. kFast: a
// sum without weights whose wire has the table's dtype. A bad index ends it and is returned, otherwise null.
template <class T, class I, int kVectors, bool kFast>
AF_INLINE const I* pool_columns(const Job& job, const Bag<I>& bag, int64_t column, int64_t tail, int64_t at) {
  const Table& t = job.table;
  const I* first = reinterpret_cast<const I*>(t.indices);
  const I* last = first + t.num_indices - 1;
  const T* rows = reinterpret_cast<const T*>(t.rows) + column;
  const int64_t dim = t.dim, num_rows = t.num_rows, padding = job.bags.padding, mode = job.bags.mode;
  int64_t used = 0;
  Floats sum[kVectors], values;
  for (int v = 0; v < kVectors; ++v) sum[v] = Floats{} - (!kFast && mode == kMax ? __builtin_inff() : 0.0f);
  for (const I* i = bag.begin; i < bag.end; ++i) {
    const char* ahead = reinterpret_cast<const char*>(rows + int64_t(*std::min(i + kAhead, last)) * dim);
    for (size_t line = 0; line < kVectors * kLanes * sizeof(T); line += 64) __builtin_prefetch(ahead + line);
    if (__builtin_expect(uint64_t(*i) >= uint64_t(num_rows), 0)) return i;
    if (*i == padding) continue;
    ++used;
    const T* row = rows + int64_t(*i) * dim;
    const float weight = !kFast && t.weights ? scalar<T>(t.weights, i - first) : 1.0f;
    for (int v = 0; v < kVectors; ++v) {
      load(row + v * kLanes, values, v + 1 < kVectors ? kLanes : tail);
      if (kFast) {
        sum[v] += values;
      } else if (mode == kMax) {
        const Ints keep = (sum[v] >= values) | (sum[v] != sum[v]);  // nan wins
        sum[v] = (Floats)(((Ints)sum[v] & keep) | ((Ints)values & ~keep));
      } else {
        sum[v] += weight * values;
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t count = v + 1 < kVectors ? kLanes : tail;
    if (kFast) {
      store(reinterpret_cast<T*>(job.out) + at + column + v * kLanes, sum[v], count);
      continue;
    }
    if (mode == kMax && !used) sum[v] = Floats{};
    if (mode == kMean && used > 1) sum[v] /= Floats{} + float(used);
    round_to<T>(sum[v]);
    store_as(job.wire, job.out, at + column + v * kLanes, sum[v], count);
  }
  return nullptr;
}

template <class T, class I, bool kFast> AF_INLINE void pool_table(Job& job) {
  const int64_t dim = job.table.dim;
  for (int64_t n = 0; n < job.bags.count; ++n) {
    Bag<I> bag;
    if (!find_bag(job.table, job.bags, job.bags.first + n, bag)) {
      job.error = kBadOffset, job.bad = job.bags.first + n;
      return;
    }
    const int64_t at = n * job.bags.stride + job.table.column;
    const I* bad = nullptr;
    int64_t c = 0;
    for (; !bad && c + kWide * kLanes <= dim; c += kWide * kLanes)
      bad = pool_columns<T, I, kWide, kFast>(job, bag, c, kLanes, at);
    for (; !bad && c + kLanes <= dim; c += kLanes)
      bad = pool_columns<T, I, 1, kFast>(job, bag, c, kLanes, at);
    if (!bad && c < dim) bad = pool_columns<T, I, 1, kFast>(job, bag, c, dim - c, at);
    if (bad) {
      job.error = kBadIndex, job.bad = *bad;
      return;
    }
  }
}

template <class T, class I> struct PoolTable {
  AF_DISPATCH(fast, Job, (pool_table<T, I, true>))
  AF_DISPATCH(general, Job, (pool_table<T, I, false>))
};

template <class T> constexpr DType kDType = kFloat32;
template <> constexpr DType kDType<Bf16> = kBFloat16;
template <> constexpr DType kDType<Fp16> = kFloat16;

template <class T, class I>
Error pool(const Table* tables, int64_t num_tables, const Bags& bags, DType wire, char* out,
           Failure& failure) {
  const auto fast = PoolTable<T, I>::fast(), general = PoolTable<T, I>::general();
  for (int64_t n = 0; n < num_tables; ++n) {
    const bool plain = !tables[n].weights && bags.mode == kSum && wire == kDType<T>;
    Job job{tables[n], bags, wire, out, kOk, 0};
    (plain ? fast : general)(job);
    if (job.error) return failure = {n, job.bad}, job.error;
  }
  return kOk;
}

struct Addition {
  float* to;
  const char* from;
  float factor;
  int64_t size;
};

template <class G> AF_INLINE void add_row(Addition& a) {
  const G* from = reinterpret_cast<const G*>(a.from);
  const Floats factor = Floats{} + a.factor;
  Floats values, sum;
  int64_t c = 0;
  for (; c + kLanes <= a.size; c += kLanes) {
    load(from + c, values);
    load(a.to + c, sum);
    store(a.to + c, sum + factor * values);
  }
  if (c < a.size) {
    load(from + c, values, a.size - c);
    load(a.to + c, sum, a.size - c);
    store(a.to + c, sum + factor * values, a.size - c);
  }
}

template <class G> struct AddRow {
  AF_DISPATCH(leaf, Addition, add_row<G>)
};

float weight_as(DType dtype, const char* weights, int64_t i) {
  if (dtype == kFloat32) return scalar<float>(weights, i);
  return dtype == kBFloat16 ? scalar<Bf16>(weights, i) : scalar<Fp16>(weights, i);
}

template <class G, class I>
Error scatter(const Table* tables, int64_t num_tables, const Bags& bags, const char* grad, DType weights,
              Failure& failure) {
  const auto leaf = AddRow<G>::leaf();
  for (int64_t n = 0; n < num_tables; ++n) {
    const Table& t = tables[n];
    const I* first = reinterpret_cast<const I*>(t.indices);
    const I* last = first + t.num_indices - 1;
    float* rows = reinterpret_cast<float*>(t.rows);
    for (int64_t b = 0; b < bags.count; ++b) {
      Bag<I> bag;
      if (!find_bag(t, bags, bags.first + b, bag)) return failure = {n, bags.first + b}, kBadOffset;
      const int64_t used = bag.end - bag.begin - std::count(bag.begin, bag.end, I(bags.padding));
      const float mean = bags.mode == kMean && used > 1 ? 1.0f / float(used) : 1.0f;
      for (const I* i = bag.begin; i < bag.end; ++i) {
        const float* next = rows + int64_t(*std::min(i + kAhead, last)) * t.dim;
        const char* ahead = reinterpret_cast<const char*>(next);
        for (int64_t line = 0; line < t.dim * 4; line += 64) __builtin_prefetch(ahead + line, 1);
        if (uint64_t(*i) >= uint64_t(t.num_rows)) return failure = {n, int64_t(*i)}, kBadIndex;
        if (*i == bags.padding) continue;
        const char* from = grad + (b * bags.stride + t.column) * int64_t(sizeof(G));
        Addition addition{rows + int64_t(*i) * t.dim, from,
                          t.weights ? mean * weight_as(weights, t.weights, i - first) : mean, t.dim};
        leaf(addition);
      }
    }
  }
  return kOk;
}

struct Expansion {
  char* to;
  const char* from;
  float factor;
  int64_t size;
};

// As torch: rounded to the dtype of the table before it is multiplied, and behind.
template <class G, class T> AF_INLINE void expand_row(Expansion& e) {
  const G* from = reinterpret_cast<const G*>(e.from);
  T* to = reinterpret_cast<T*>(e.to);
  const Floats factor = Floats{} + e.factor;
  Floats values;
  for (int64_t c = 0; c < e.size; c += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, e.size - c);
    load(from + c, values, count);
    round_to<T>(values);
    store(to + c, factor * values, count);
  }
}

template <class G, class T> struct ExpandRow {
  AF_DISPATCH(leaf, Expansion, (expand_row<G, T>))
};

template <class T> float rounded(float value) {
  Floats values = Floats{} + value;
  round_to<T>(values);
  return values[0];
}

template <class G, class I, class T>
Error expand(const Table* tables, int64_t num_tables, const Bags& bags, const char* grad, Failure& failure) {
  const auto leaf = ExpandRow<G, T>::leaf();
  for (int64_t n = 0; n < num_tables && bags.count; ++n) {
    const Table& t = tables[n];
    const I* first = reinterpret_cast<const I*>(t.indices);
    const I* offsets = reinterpret_cast<const I*>(t.offsets);
    const int64_t start = offsets[0], begin = offsets[bags.first], bytes = t.dim * int64_t(sizeof(T));
    if (start < 0 || begin < start || begin > t.num_indices) return failure = {n, bags.first}, kBadOffset;
    int64_t row = begin - start - std::count(first + start, first + begin, I(bags.padding));
    for (int64_t b = 0; b < bags.count; ++b) {
      Bag<I> bag;
      if (!find_bag(t, bags, bags.first + b, bag)) return failure = {n, bags.first + b}, kBadOffset;
      const int64_t used = bag.end - bag.begin - std::count(bag.begin, bag.end, I(bags.padding));
      if (row + used > t.num_rows) return failure = {n, bags.first + b}, kBadOffset;
      const float mean = bags.mode == kMean ? rounded<T>(1.0f / rounded<T>(float(used))) : 1.0f;
      const char* same = nullptr;  // what the bag's entries have in common, once it is there
      for (const I* i = bag.begin; i < bag.end; ++i) {
        if (*i == bags.padding) continue;
        char* to = t.rows + row++ * bytes;
        if (same) {
          std::memcpy(to, same, bytes);
          continue;
        }
        Expansion expansion{to, grad + (b * bags.stride + t.column) * int64_t(sizeof(G)),
                            t.weights ? mean * scalar<T>(t.weights, i - first) : mean, t.dim};
        leaf(expansion);
        if (!t.weights) same = to;
      }
    }
  }
  return kOk;
}

// Calls f with a value of the type of `dtype`'s elements, and of the indices' type.
template <class F> Error with_types(int dtype, bool wide, F f) {
  if (dtype == kFloat32) return wide ? f(float{}, int64_t{}) : f(float{}, int32_t{});
  if (dtype == kBFloat16) return wide ? f(Bf16{}, int64_t{}) : f(Bf16{}, int32_t{});
  return wide ? f(Fp16{}, int64_t{}) : f(Fp16{}, int32_t{});
}

}  // namespace

// Pools bags [first, first + count) of every table, rounds to the table's dtype, then to `wire`, and stores
// bag b of table t at out + (b - first) * stride + t.column. Returns 0, or an Error whose table and value it
// leaves in `failure`.
AF_EXPORT int af_pool_bags(const Table* tables, int64_t num_tables, const Bags* bags, int wide, int dtype,
                           int wire, char* out, Failure* failure) {
  return with_types(dtype, wide, [&](auto element, auto index) {
    return pool<decltype(element), decltype(index)>(tables, num_tables, *bags, static_cast<DType>(wire), out,
                                                    *failure);
  });
}

// rows[index] += weight * grad[bag] (divided by the size of the bag for mean), in the order of the indices,
// in fp32. `dtype` is grad's, `weights` that of the weights per sample.
AF_EXPORT int af_scatter_bags(const Table* tables, int64_t num_tables, const Bags* bags, int wide,
                              int weights, int dtype, const char* grad, Failure* failure) {
  return with_types(dtype, wide, [&](auto element, auto index) {
    return scatter<decltype(element), decltype(index)>(tables, num_tables, *bags, grad,
                                                       static_cast<DType>(weights), *failure);
  });
}

// values[e] = weight * grad[bag of entry e] (divided by the size of the bag for mean) for the entries of the
// bags that are not padding, in their order; the tables' `rows` are the values of all bags. `dtype` is grad's,
// `to` that of the values and of the weights per sample.
AF_EXPORT int af_expand_bags(const Table* tables, int64_t num_tables, const Bags* bags, int wide, int to,
                             int dtype, const char* grad, Failure* failure) {
  return with_types(dtype, wide, [&](auto element, auto index) {
    return with_types(to, true, [&](auto value, auto) {
      return expand<decltype(element), decltype(index), decltype(value)>(tables, num_tables, *bags, grad,
                                                                         *failure);
    });
  });
}
