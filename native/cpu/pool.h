// The threads of one rank: every thread runs the same function with its index. Most work is divided statically; units
// of GEMMs are taken by threads as they become free (ops/work_counter.h).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/sync.h"

namespace as {

class Pool {
 public:
  // cpus: thread i is pinned to cpus[i % size]; empty: not pinned. spin: false makes waiting threads sleep at once, for
  // more threads than cores. The thread that calls run() is thread 0.
  Pool(int threads, std::vector<int> cpus, bool spin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs f(0) ... f(size-1) and waits for all. Rethrows the first exception.
  void run(const std::function<void(int)>& f);
  // For use inside f: waits until every thread has arrived or one has failed. Returns true if all arrived. After false,
  // f must return. Once a thread has failed, no barrier of this run waits or returns true, so the barriers that the
  // failed thread skipped do not matter.
  bool barrier();
  // Waiting threads spin for longer before they sleep, until this is set to false. A rank of experts has it within a
  // step: its threads wait for the other part of each layer, which takes about as long as kSpins on a GPU.
  void set_patient(bool patient) { spins_.store(spin_ ? patient ? kPatientSpins : kSpins : 0); }
  // How many barriers have been completed.
  int64_t barriers() const { return barriers_; }
  // For use inside f, around the body of a phase: keeps an exception for run() to rethrow and ends waits at barriers.
  template <typename F>
  void guard(F&& body) {
    try {
      body();
    } catch (const std::exception& e) { fail(e.what()); }
  }

 private:
  // The state of a point where all threads meet.
  struct Meeting {
    alignas(64) Signal phase;
    alignas(64) std::atomic<int> arrived{0};
  };
  // Whether a waiter that has spun so often sleeps now.
  bool sleeps(int spins) const { return spins >= spins_.load(std::memory_order_relaxed); }
  // Returns whether this thread arrived last.
  bool meet(Meeting& meeting, bool failure_ends_it);
  void fail(const char* what);
  void stop();
  void worker(int index);
  void pin(int index);

  int size_;
  std::vector<int> cpus_;
  const bool spin_;
  std::atomic<int> spins_;  // a waiter's before it sleeps; it may change while it waits
  std::vector<std::thread> threads_;
  const std::function<void(int)>* task_ = nullptr;
  alignas(64) Signal start_;
  std::atomic<int64_t> barriers_{0};
  Meeting barrier_, end_;  // end_: of a run; failed threads arrive there, too
  alignas(64) std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};
  std::mutex error_mutex_;
  std::string error_;
};

// The half-open range of part `index` of n items divided into `parts` parts, whose sizes differ by at most one.
template <typename Count>
std::pair<Count, Count> part(Count n, int index, int parts) {
  return {(Count)((int64_t)n * index / parts), (Count)((int64_t)n * (index + 1) / parts)};
}

}  // namespace as
