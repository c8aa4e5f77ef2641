// Hands out numbered units of work to threads as they become free.
//
// Equal parts end together only where threads are equally fast. On virtual processors they are not: of a long prompt's
// GEMMs in equal parts on 16 of them, the mean thread was busy for 0.7 to 0.8 of the slowest thread's time
// (docs/decisions/amx-threads.md). Which thread computes a unit does not matter for its bits.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace as {

class WorkCounter {
 public:
  explicit WorkCounter(int threads) : begun_(threads) {}

  // Called by one thread before a step.
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    for (Own& own : begun_) own.count = 0;
  }

  // Calls work(i) for indices of [0, count), each on one of the threads, ascending on each. All threads call it with
  // the same count, and meet at a barrier between two calls.
  template <typename Work>
  void share(int thread, int count, Work&& work) {
    int64_t& begin = begun_[thread].count;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed) - begin) < count;) work((int)i);
    begin += count + (int64_t)begun_.size();  // every thread has taken one number too many
  }

  // Calls work(from, to) for parts of [0, total), for work that waits for memory: each thread first has two thirds of
  // an equal part, which it reads as one stream, then threads take the rest in up to `units` units a thread. Otherwise
  // as share().
  template <typename Work>
  void share_last(int thread, int64_t total, int units, Work&& work) {
    const int64_t threads = (int64_t)begun_.size(), own = total * 2 / 3, rest = total - own,
                  count = std::min(rest, units * threads);
    work(own * thread / threads, own * (thread + 1) / threads);
    share(thread, (int)count, [&](int64_t i) { work(own + rest * i / count, own + rest * (i + 1) / count); });
  }

 private:
  struct alignas(64) Own {
    int64_t count = 0;  // numbers that all threads took in earlier calls
  };
  alignas(64) std::atomic<int64_t> next_{0};
  std::vector<Own> begun_;
};

}  // namespace as
