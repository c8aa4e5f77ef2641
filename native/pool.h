// The threads of one rank. Work is split statically: every thread runs the same function with its index.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sync.h"

namespace as {

class Pool {
 public:
  // `cpus`: thread i is pinned to cpus[i % size]; empty: not pinned. Without `spin` waiters sleep at once (more threads
  // than processors). The thread that calls run() is thread 0.
  Pool(int threads, std::vector<int> cpus, bool spin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs f(0) ... f(size-1) and waits for all. The first exception of any of them is thrown here.
  void run(const std::function<void(int)>& f);
  // For use inside f: waits until every thread has come here. Returns false, to all alike, if a thread has failed before:
  // then f must return. Every thread must come to every barrier: what may throw between two belongs into a guard.
  bool barrier();
  // For use inside f, around the body of a phase: an exception is kept for run() to throw.
  template <typename F>
  void guard(F&& body) {
    try {
      body();
    } catch (const std::exception& e) {
      fail(e.what());
    }
  }

 private:
  void fail(const char* what);
  void stop();
  void worker(int index);
  void pin(int index);

  int size_;
  std::vector<int> cpus_;
  bool spin_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* task_ = nullptr;
  alignas(64) Signal start_;
  alignas(64) Signal phase_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<bool> failed_{false};
  std::atomic<bool> phase_failed_{false};  // failed_ as it was when the last of the threads came to the barrier
  std::atomic<bool> stopping_{false};
  std::mutex error_mutex_;
  std::string error_;
};

// Half-open range of part `index` of `parts` of n, sizes differing by at most one.
inline std::pair<int, int> part(long n, int index, int parts) {
  return {(int)(n * index / parts), (int)(n * (index + 1) / parts)};
}

}  // namespace as
