// Which rows of a step go to which experts, as a router chose them.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/core.h"
#include "cpu/ops/gemm.h"

namespace as {

// A row set that routers form, in turn. Its entries are sorted by expert, then by row.
struct Routing {
  int top = 0;                // entries of each row
  std::vector<int> first;     // [experts + 1]: an expert's first entry
  std::vector<int> row_of;    // [entries]
  std::vector<int> entry_of;  // [rows][top], ascending, and so in the order of experts
  std::vector<int> chosen;    // [rows][top]: the experts, ascending; -1: one that no rank of experts computes
  std::vector<float> shares;  // [rows][top]: their weights
  int experts = 0;            // of the router
  // While ops are bound: the experts whose entries this rank computes.
  int begin = 0, end = 0;
  bool divided = false;

  Routing(int rows, int times)
      : top(times),
        row_of((size_t)rows * times),
        entry_of((size_t)rows * times),
        chosen((size_t)rows * times),
        shares((size_t)rows * times) {}

  // When the router is bound: all of so many experts are on this rank, until an op says otherwise.
  void begin_router(int count) {
    first.reserve(count + 1);
    experts = count, begin = 0, end = count, divided = false;
  }

  // Sorts the choices of the first `rows` rows into entries.
  void group(int rows, int experts);

  // Calls work(expert, first entry, entries, p0, p1) for a thread's part of the GEMMs of experts [begin, end), each
  // with `panels` panels. The cost of a panel is its rows plus `streaming`, for reading it. Every column of an entry is
  // computed by one thread. From kTakingThreads on, each first has two thirds of an equal part, which it reads as one
  // stream; then threads take short units of the rest from `counter` as they become free, because they are not equally
  // fast.
  template <typename Work>
  void share(int begin, int end, int panels, int streaming, int thread, int threads, WorkCounter& counter,
             Work work) const {
    const long total = cost(begin, end, panels, streaming);
    const auto run = [&](long from, long to) { run_part(begin, end, panels, streaming, from, to, work); };
    if (threads < kTakingThreads) run(total * thread / threads, total * (thread + 1) / threads);
    else counter.share_last(thread, total, 6, run);
  }

  // The same, for many rows: threads take parts of the experts' panels from `counter` as they become free.
  template <typename Work>
  void take(int begin, int end, int panels, int streaming, int thread, int threads, WorkCounter& counter,
            Work work) const {
    constexpr int kPartsOfThread = 32;
    const long total = cost(begin, end, panels, streaming);
    const long each = std::max(1l, total / (kPartsOfThread * threads));
    const int most = std::max(1, panels / kFewestPanels);
    const auto parts_of = [&](int expert) {
      const int rows = first[expert + 1] - first[expert];
      return rows ? (int)std::clamp<long>((long)panels * (streaming + rows) / each, 1, most) : 0;
    };
    int count = 0;
    for (int e = begin; e < end; e++) count += parts_of(e);
    int expert = begin, before = 0;  // parts of the experts before this one
    counter.share(thread, count, [&](int i) {
      int parts;
      while (i >= before + (parts = parts_of(expert))) before += parts, expert++;
      const auto [p0, p1] = part(panels, i - before, parts);
      work(expert, first[expert], first[expert + 1] - first[expert], p0, p1);
    });
  }

 private:
  // Of all panels of experts [begin, end) that have entries.
  long cost(int begin, int end, int panels, int streaming) const {
    long total = 0;
    for (int e = begin; e < end; e++)
      if (const int rows = first[e + 1] - first[e]) total += (long)panels * (streaming + rows);
    return total;
  }

  // Calls work for the panels of the part [from, to) of that cost.
  template <typename Work>
  void run_part(int begin, int end, int panels, int streaming, long from, long to, Work& work) const {
    long at = 0;
    for (int e = begin; e < end && at < to; e++) {
      const int rows = first[e + 1] - first[e];
      if (!rows) continue;
      const long each = streaming + rows;
      // A panel belongs to the part in which it begins.
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
