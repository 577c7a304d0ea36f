// What updates of embedding tables need besides the sums of gradients: the rows that there are, and the rules.
#include <algorithm>
#include <cmath>

#include "vec.h"

namespace {

using namespace af;

// An open hash table of places; `slots` is a power of 2, more than twice as many as rows.
template <class I>
int64_t touched(const I* indices, int64_t count, int64_t padding, int64_t num_rows, I* places, int64_t* rows,
                int64_t* table, int64_t slots, int64_t* bad) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = indices[i];
    if (uint64_t(row) >= uint64_t(num_rows)) return *bad = row, -1;
    if (row == padding) continue;
    int64_t slot = int64_t(uint64_t(row) * 0x9e3779b97f4a7c15u >> 32) & (slots - 1);
    while (table[slot] >= 0 && rows[table[slot]] != row) slot = (slot + 1) & (slots - 1);
    if (table[slot] < 0) rows[table[slot] = found++] = row;
    places[i] = I(table[slot] + 1);
  }
  return found;
}

struct Update {
  char* weight;      // the row
  float* state;      // of the row, or null
  const float* sum;  // its gradient
  int64_t dim;
  float lr, eps;
};

template <class T> AF_INLINE void update_row(Update& u) {
  T* weight = reinterpret_cast<T*>(u.weight);
  Floats sum, values;
  float step = u.lr;
  if (u.state) {
    Floats squares{};
    for (int64_t c = 0; c < u.dim; c += kLanes) {
      load(u.sum + c, sum, std::min<int64_t>(kLanes, u.dim - c));
      squares += sum * sum;
    }
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += squares[lane];
    *u.state += total / float(std::max<int64_t>(1, u.dim));
    step = u.lr / (std::sqrt(*u.state) + u.eps);
  }
  const Floats steps = Floats{} + step;
  for (int64_t c = 0; c < u.dim; c += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, u.dim - c);
    load(u.sum + c, sum, count);
    load(weight + c, values, count);
    store(weight + c, values - steps * sum, count);
  }
}

template <class T> struct UpdateRow {
  AF_DISPATCH(leaf, Update, update_row<T>)
};

template <class T>
void update(char* weight, float* state, const float* sums, const int64_t* rows, int64_t count, int64_t dim,
            float lr, float eps) {
  const auto leaf = UpdateRow<T>::leaf();
  constexpr int64_t kAhead = 8;
  for (int64_t n = 0; n < count; ++n) {
    const char* ahead = weight + rows[std::min(n + kAhead, count - 1)] * dim * int64_t(sizeof(T));
    for (int64_t line = 0; line < dim * int64_t(sizeof(T)); line += 64) __builtin_prefetch(ahead + line, 1);
    Update one{weight + rows[n] * dim * int64_t(sizeof(T)), state ? state + rows[n] : nullptr,
               sums + n * dim, dim, lr, eps};
    leaf(one);
  }
}

}  // namespace

// The different rows among `indices`, those equal to `padding` left out, and for every index its place among
// them from 1 on, 0 for padding. `table` has `slots` entries of -1. Returns how many rows there are, or -1 with
// an index that is out of range in failure[1].
AF_EXPORT int64_t af_touched_rows(const void* indices, int64_t count, int wide, int64_t padding,
                                  int64_t num_rows, void* places, int64_t* rows, int64_t* table, int64_t slots,
                                  int64_t* failure) {
  if (wide)
    return touched(static_cast<const int64_t*>(indices), count, padding, num_rows,
                   static_cast<int64_t*>(places), rows, table, slots, failure + 1);
  return touched(static_cast<const int32_t*>(indices), count, padding, num_rows,
                 static_cast<int32_t*>(places), rows, table, slots, failure + 1);
}

// weight[rows[n]] -= lr * sums[n]; with a state by rowwise Adagrad: state[rows[n]] += mean(sums[n]^2), and lr is
// divided by sqrt of it + eps.
AF_EXPORT void af_update_rows(char* weight, int dtype, float* state, const float* sums, const int64_t* rows,
                              int64_t count, int64_t dim, float lr, float eps) {
  const auto run = dtype == kFloat32 ? update<float> : dtype == kBFloat16 ? update<Bf16> : update<Fp16>;
  run(weight, state, sums, rows, count, dim, lr, eps);
}
