// The rows of experts in an exchanged buffer, whose parts follow each other: part p ends at ends[p]. Row i lies at
// positions[i] of the buffer, without positions at i.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common.h"

namespace {

enum Found : int { kOutside = 0, kRepeated = 1, kDistinct = 2 };

// The part that holds `at`, which is below the last end. The search starts at `part`: neighbours share a part.
AF_INLINE int64_t part_of(int64_t at, const int64_t* ends, int64_t part) {
  while (part > 0 && at < ends[part - 1]) --part;
  while (at >= ends[part]) ++part;
  return part;
}

}  // namespace

// Sorts rows by their part, stably: entries bounds[p] to bounds[p + 1] of `rows` lie in part p, and `places` has
// their positions there. `bounds` has parts + 1 entries, the others as many as there are rows.
AF_EXPORT int af_sort_rows(const int64_t* positions, int64_t count, const int64_t* ends, int64_t parts, int64_t* rows,
                           int64_t* places, int64_t* bounds) {
  const int64_t total = ends[parts - 1];
  std::vector<char> seen(total);
  std::fill_n(bounds, parts + 1, 0);
  bool distinct = true;
  for (int64_t i = 0, part = 0; i < count; ++i) {
    const int64_t at = positions[i];
    if (at < 0 || at >= total) return kOutside;
    distinct &= !seen[at];
    seen[at] = 1;
    part = part_of(at, ends, part);
    ++bounds[part + 1];
  }
  for (int64_t p = 0; p < parts; ++p) bounds[p + 1] += bounds[p];
  std::vector<int64_t> next(bounds, bounds + parts);
  for (int64_t i = 0, part = 0; i < count; ++i) {
    part = part_of(positions[i], ends, part);
    const int64_t to = next[part]++;
    rows[to] = i;
    places[to] = positions[i] - (part ? ends[part - 1] : 0);
  }
  return distinct ? kDistinct : kRepeated;
}

// A run: rows [row, row + length) of an expert, which lie at `at` and on in a part.
struct Run { int64_t part, expert, row, length, at; };

// Cuts the rows of all experts, which end at expert_ends, into runs. Returns their number, -1 if it is above `limit`.
AF_EXPORT int64_t af_find_runs(const int64_t* positions, const int64_t* ends, const int64_t* expert_ends,
                               int64_t experts, int64_t limit, Run* runs) {
  int64_t found = 0, part = 0;
  for (int64_t expert = 0, row = 0; expert < experts; ++expert) {
    const int64_t first = row;
    for (int64_t next = -1; row < expert_ends[expert]; ++row, ++next) {
      const int64_t at = positions ? positions[row] : row;
      if (at == next && at < ends[part]) {
        ++runs[found - 1].length;
        continue;
      }
      if (found == limit) return -1;
      part = part_of(at, ends, part);
      runs[found++] = {part, expert, row - first, 1, at - (part ? ends[part - 1] : 0)};
      next = at;
    }
  }
  return found;
}

// to[positions[i]] = from[rows[i]] for rows of `nbytes` bytes.
AF_EXPORT void af_scatter_rows(char* to, const int64_t* positions, const char* from, const int64_t* rows,
                               int64_t count, int64_t nbytes) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + positions[i] * nbytes, from + rows[i] * nbytes, size_t(nbytes));
}
