// Which rows of a step go to which experts, as a router has chosen.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/core.h"

namespace as {

// A row set that routers form, one after the other. Its entries are sorted by expert, then by row.
struct Routing {
  int top = 0;                // entries of each row
  std::vector<int> first;     // [experts + 1]: an expert's first entry
  std::vector<int> row_of;    // [entries]
  std::vector<int> entry_of;  // [rows][top], ascending: so in the order of experts
  std::vector<int> chosen;    // [rows][top]: the experts, ascending
  std::vector<float> shares;  // [rows][top]: their weights
  // While ops are bound: experts whose entries this rank computes, as far as an op has said so.
  int begin = 0, end = 0;
  bool divided = false;

  Routing(int rows, int times)
      : top(times),
        row_of((size_t)rows * times),
        entry_of((size_t)rows * times),
        chosen((size_t)rows * times),
        shares((size_t)rows * times) {}

  // Sorts the first `rows` rows' choices into entries.
  void group(int rows, int experts);

  // A thread's part of products of all entries of experts [begin, end), each a matrix of so many panels:
  // work(expert, first entry, entries, p0, p1). A panel counts as its rows and `streaming` more, for the time in which
  // it is read. Every column of an entry is one thread's.
  template <typename Work>
  void share(int begin, int end, int panels, int streaming, int thread, int threads, Work work) const {
    long total = 0;
    for (int e = begin; e < end; e++)
      if (const int rows = first[e + 1] - first[e]) total += (long)panels * (streaming + rows);
    const long from = total * thread / threads, to = total * (thread + 1) / threads;
    long at = 0;
    for (int e = begin; e < end && at < to; e++) {
      const int rows = first[e + 1] - first[e];
      if (!rows) continue;
      const long each = streaming + rows;
      // A panel is its thread's in whose part it begins.
      const auto panel = [&](long cost) {
        return (int)std::min<long>(std::max(0l, cost - at + each - 1) / each, panels);
      };
      const int p0 = panel(from), p1 = panel(to);
      if (p0 < p1) work(e, first[e], rows, p0, p1);
      at += panels * each;
    }
  }
};

}  // namespace as
