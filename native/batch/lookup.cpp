#include "batch/lookup.h"

#include <algorithm>

namespace as {
namespace {

constexpr int kTried = 32, kLongest = 16;

}  // namespace

void Lookup::clear() { heads_.clear(), previous_.clear(); }

size_t Lookup::bucket(int32_t first, int32_t second) const {
  const uint64_t pair = (uint64_t)(uint32_t)first << 32 | (uint32_t)second;
  return (size_t)(pair * 0x9E3779B97F4A7C15ull >> 32) & (heads_.size() - 1);
}

// Indexes the pairs that are followed by another id.
void Lookup::extend(const std::vector<int32_t>& history) {
  const size_t places = history.size() - 1;
  if (heads_.size() < places) {  // at most one place per bucket on average; doubling the buckets rebuilds the index
    size_t buckets = 1024;
    while (buckets < 2 * places) buckets *= 2;
    heads_.assign(buckets, -1), previous_.clear();
  }
  if (previous_.empty()) previous_.push_back(-1);
  for (size_t p = previous_.size(); p < places; p++) {
    int32_t& head = heads_[bucket(history[p - 1], history[p])];
    previous_.push_back(head);
    head = (int32_t)p;
  }
}

void Lookup::draft(std::vector<int32_t>& history, int most) {
  if (history.size() < 3 || most < 1) return;
  extend(history);
  const int last = (int)history.size() - 1;
  int best = 0, found = -1, tried = 0;
  for (int p = heads_[bucket(history[last - 1], history[last])]; p >= 0 && tried < kTried; p = previous_[p], tried++) {
    int match = 0;
    while (match < kLongest && match <= p && history[p - match] == history[last - match]) match++;
    if (match > best) best = match, found = p;
  }
  if (best < 2) return;
  for (int i = 1; i <= most; i++) history.push_back(history[found + i]);  // may read ids that it appended: a repetition
}

}  // namespace as
