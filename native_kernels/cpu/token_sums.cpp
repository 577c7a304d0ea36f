// Rows that are weighted and added up token by token, in float32: the mixture of the experts of a token.
//
// out[t] = sum over j < k of scale[r] * rows[r] * scale2[t * k + j],   r = index[t * k + j]
// out[index[r]] += scale[r] * rows[r], row by row, in float32           (put)
//
// Behind each product and behind the sum values are rounded to the dtype that it has in a graph.
#include "block.h"

namespace {

using namespace af;

struct Scale { const char* data; int64_t stride; int dtype, rounded; };  // data may be null

struct Job {
  char* out;
  const char* rows;
  const int64_t* index;  // may be null: rows in the order of tokens
  Scale before, behind;  // of rows, and of entries of `index`
  int64_t out_stride, row_stride, index_stride, fold, tokens, columns, k, n_rows;
  int out_dtype, rows_dtype;
};

AF_INLINE float scale_of(const Scale& s, int64_t at) {
  const char* from = s.data + at * s.stride * width(s.dtype);
  if (s.dtype == kFloat32) return *reinterpret_cast<const float*>(from);
  const uint16_t half = *reinterpret_cast<const uint16_t*>(from);
  return s.dtype == kBFloat16 ? BF16::load(half) : F16::load(half);
}

AF_INLINE void multiply(const Scale& s, int64_t at, Block& v) {
  if (s.data == nullptr) return;
  const float by = scale_of(s, at);
  for (int i = 0; i < kVectors; ++i) v[i] *= by;
  round_block(v, s.rounded);
}

template <bool kFull> AF_INLINE void add_block(const Job& job, int64_t t, int64_t c, int64_t n) {
  Block sum{}, v;
  for (int64_t j = 0; j < job.k; ++j) {
    const int64_t entry = job.fold ? j * job.tokens + t : t * job.k + j;
    const int64_t r = job.index ? job.index[entry * job.index_stride] : entry;
    load_block<kFull>(job.rows + (r * job.row_stride + c) * width(job.rows_dtype), job.rows_dtype, v, n);
    multiply(job.before, r, v);
    multiply(job.behind, entry, v);
    for (int i = 0; i < kVectors; ++i) sum[i] += v[i];
  }
  round_block(sum, job.out_dtype);
  store_block<kFull>(job.out + (t * job.out_stride + c) * width(job.out_dtype), job.out_dtype, sum, n);
}

AF_INLINE void add(Job& job) {
  const int64_t whole = job.columns / kBlock * kBlock;
  for (int64_t t = 0; t < job.tokens; ++t) {
    for (int64_t c = 0; c < whole; c += kBlock) add_block<true>(job, t, c, kBlock);
    if (whole < job.columns) add_block<false>(job, t, whole, job.columns - whole);
  }
}

template <bool kFull> AF_INLINE void put_block(const Job& job, int64_t r, int64_t t, int64_t c, int64_t n) {
  char* to = job.out + (t * job.out_stride + c) * width(kFloat32);
  Block v, sum;
  load_block<kFull>(job.rows + (r * job.row_stride + c) * width(job.rows_dtype), job.rows_dtype, v, n);
  multiply(job.before, r, v);
  load_block<float, kFull>(to, sum, n);
  for (int i = 0; i < kVectors; ++i) sum[i] += v[i];
  store_block<float, kFull>(to, sum, n);
}

AF_INLINE void put(Job& job) {
  const int64_t whole = job.columns / kBlock * kBlock;
  for (int64_t r = 0; r < job.n_rows; ++r) {
    const int64_t t = job.index[r * job.index_stride];
    for (int64_t c = 0; c < whole; c += kBlock) put_block<true>(job, r, t, c, kBlock);
    if (whole < job.columns) put_block<false>(job, r, t, whole, job.columns - whole);
  }
}

AF_DISPATCH(leaf, Job, add)
AF_DISPATCH(put_leaf, Job, put)

bool is_index(const Job& job, int64_t entries, int64_t limit) {
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t at = job.index[i * job.index_stride];
    if (at < 0 || at >= limit) return false;
  }
  return true;
}

Scale scale_from(const int64_t* words) {
  return {reinterpret_cast<const char*>(words[0]), words[1], int(words[2]), int(words[3])};
}

}  // namespace

// Whether all entries of the index are rows, or tokens where k is 0: rows are then put. words: out, row stride,
// dtype; rows, row stride, dtype; index, stride; two scales of four words; fold, tokens, columns, k, number of
// rows. Strides are in elements.
AF_EXPORT int af_add_rows(const int64_t* words) {
  Job job{};
  job.out = reinterpret_cast<char*>(words[0]);
  job.out_stride = words[1];
  job.out_dtype = int(words[2]);
  job.rows = reinterpret_cast<const char*>(words[3]);
  job.row_stride = words[4];
  job.rows_dtype = int(words[5]);
  job.index = reinterpret_cast<const int64_t*>(words[6]);
  job.index_stride = words[7];
  job.before = scale_from(words + 8);
  job.behind = scale_from(words + 12);
  job.fold = words[16];
  job.tokens = words[17];
  job.columns = words[18];
  job.k = words[19];
  job.n_rows = words[20];
  const bool puts = job.k == 0;
  const int64_t entries = job.index == nullptr ? 0 : puts ? job.n_rows : job.tokens * job.k;
  if (!is_index(job, entries, puts ? job.tokens : job.n_rows)) return 0;
  (puts ? put_leaf() : leaf())(job);
  return 1;
}
