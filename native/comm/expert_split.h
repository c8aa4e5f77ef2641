// From how many rows on the GPU of a mixed group computes routed experts, which it copies from the memory of their
// ranks, and which of them these ranks compute meanwhile; from measured speeds. Bits do not depend on it.
//
// Experts take longer than when they were timed, while a GPU reads the same memory and rows choose some more often
// than before. So ranks report the time of their part of each step, from which that of the next one follows.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "comm/expert_panels.h"

namespace as {

struct ExpertRates {
  // How many times as long as when they were timed experts take in shared steps: at first and at least (less was
  // measured to make steps longer, docs/decisions/hybrid.md), at most, and the part of it that a step replaces.
  static constexpr double kBusier = 2.2, kMostBusier = 8, kLearned = 0.5;

  struct Rank {
    int begin = 0, end = 0;         // its experts of a layer
    double bytes = 0;               // of one of them
    double seconds[kTimings] = {};  // that one takes with kTimedRows rows
    std::array<double, 32> busier;  // kBusier as learned, for steps of 2^i rows and more

    Rank() { busier.fill(kBusier); }
    static int index_of(int rows) { return std::ilogb(std::max(rows, 1)); }
    // After a step of so many rows: how long the rank has computed, and how long by the times that were measured.
    void learn(int rows, double took, double timed) {
      if (!(took > 0 && timed > 0)) return;
      double& known = busier[index_of(rows)];
      known += kLearned * (std::clamp(took / timed, kBusier, kMostBusier) - known);
    }
  };
  // Experts of a layer that ranks compute, and how long each rank takes for its own, by the times that were measured.
  struct Share {
    std::vector<int> experts;
    std::vector<double> seconds;
  };
  std::vector<Rank> ranks;
  double bandwidth = 0;      // bytes/s of copies
  int experts = 0, top = 0;  // of a layer, on all ranks; and of a row
  double row_bytes = 0;      // of a row in messages, to a rank and back

  // What a message of a shared layer takes besides its experts.
  static constexpr double kMessageSeconds = 2e-4, kMessageRate = 16e9;
  // A GPU that shares a step's experts halves its time at best. Ranks get help where they take longer than this part of
  // the time of the copies.
  static constexpr double kWorthHelp = 0.6;

  // That a rank takes for an expert with so many entries.
  static double seconds_of(const Rank& rank, double entries) {
    int i = 1;
    while (i < kTimings - 1 && kTimedRows[i] < entries) i++;
    const double few = rank.seconds[i - 1], many = rank.seconds[i];
    if (entries < 1) return few * entries;  // on average
    if (entries > kTimedRows[i]) return many * entries / kTimedRows[i];
    const double part = (entries - kTimedRows[i - 1]) / (kTimedRows[i] - kTimedRows[i - 1]);
    return few + std::max(part, 0.0) * (many - few);
  }

  // Of all experts of a layer.
  double copy_seconds() const {
    double bytes = 0;
    for (const Rank& rank : ranks) bytes += (rank.end - rank.begin) * rank.bytes;
    return bytes / bandwidth;
  }

  // The rows of a step from which on copying a layer's experts takes no longer than the ranks' computing them, or, if
  // both share them, is a help. At most 1e9.
  int first_rows(bool shared) const {
    const double wanted = copy_seconds() * (shared ? kWorthHelp : 1);
    const auto computed = [&](double entries) {
      double longest = 0;
      for (const Rank& rank : ranks) longest = std::max(longest, (rank.end - rank.begin) * seconds_of(rank, entries));
      return longest;
    };
    double few = kTimedRows[0], many = 1e9 * top / experts;  // entries of an expert
    if (computed(few) >= wanted) many = few;
    while (many - few > 1e-3 * few) {
      const double between = (few + many) / 2;
      if (computed(between) < wanted) few = between;
      else many = between;
    }
    return (int)std::min(std::ceil(many * experts / top), 1e9);
  }

  // Which experts of a layer ranks compute in a step of so many rows: those with the fewest uses, as long as ranks end
  // before the copies of the others do. uses: [experts], in proportion; present: [experts], not 0 for those that need
  // no copy, which ranks do not compute.
  Share least_used(int rows, const float* uses, const char* present) const {
    std::vector<int> order;
    Share share{{}, std::vector<double>(ranks.size())};
    double all = 0, copied = 0;
    for (int e = 0; e < experts; e++) {
      all += uses[e];
      if (present && present[e]) continue;
      order.push_back(e);
      for (const Rank& rank : ranks)
        if (e >= rank.begin && e < rank.end) copied += rank.bytes / bandwidth;
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return uses[a] < uses[b]; });
    const double message = kMessageSeconds + rows * row_bytes / kMessageRate;
    for (const int e : order) {
      const double entries = all > 0 ? rows * top * uses[e] / all : (double)rows * top / experts;
      double left = copied;
      for (const Rank& rank : ranks)
        if (e >= rank.begin && e < rank.end) left -= rank.bytes / bandwidth;
      std::vector<double> then = share.seconds;
      bool fits = true;
      for (size_t r = 0; r < ranks.size(); r++) {
        if (e >= ranks[r].begin && e < ranks[r].end) then[r] += seconds_of(ranks[r], entries);
        fits = fits && message + ranks[r].busier[Rank::index_of(rows)] * then[r] <= left;  // also of ranks without it
      }
      if (!fits) continue;  // another rank may have time left
      share.seconds = then, copied = left, share.experts.push_back(e);
    }
    return share;
  }
};

}  // namespace as
