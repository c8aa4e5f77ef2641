#include "pool.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <pthread.h>
#include <sched.h>

#include <stdexcept>
#include <system_error>

namespace as {
namespace {

// What arithmetic depends on beside its operands: rounding to nearest, denormals as they are, no exceptions. A library in the
// user's process may have set other things (-ffast-math does) for its threads and those that they start.
class FloatingPoint {
 public:
#if defined(__x86_64__)
  FloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatingPoint() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatingPoint() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
  FloatingPoint(const FloatingPoint&) = delete;
  FloatingPoint& operator=(const FloatingPoint&) = delete;
};

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus, bool spin) : size_(threads), cpus_(std::move(cpus)), spin_(spin) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("number of threads must be 1 to 1024, got " + std::to_string(threads));
  try {
    for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { worker(i); });
  } catch (const std::system_error& e) {
    stop();
    throw std::runtime_error("cannot allocate " + std::to_string(threads) + " threads: " + e.what());
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  start_.publish(start_.value.load() + 1);
  for (auto& t : threads_) t.join();
}

void Pool::pin(int index) {
  if (cpus_.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpus_[index % cpus_.size()], &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused in some containers: then the scheduler decides
}

void Pool::fail(const char* what) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!failed_) error_ = what;
  failed_ = true;
}

bool Pool::barrier() {
  if (size_ > 1) {
    const uint32_t phase = phase_.value.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_failed_.store(failed_.load(std::memory_order_relaxed), std::memory_order_relaxed);
      phase_.publish(phase + 1);
    } else {
      int spins = spin_ ? kSpins : 0;
      while (phase_.value.load(std::memory_order_acquire) == phase) {
        if (spins-- > 0) cpu_pause();
        else phase_.sleep(phase, 100'000'000);
      }
    }
  } else {
    phase_failed_.store(failed_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  return !phase_failed_.load(std::memory_order_relaxed);
}

void Pool::worker(int index) {
  const FloatingPoint defaults;
  pin(index);
  uint32_t seen = 0;
  while (true) {
    int spins = spin_ ? kSpins : 0;
    while (start_.value.load(std::memory_order_acquire) == seen) {
      if (spins-- > 0) cpu_pause();
      else start_.sleep(seen, 900'000'000);
    }
    seen++;
    if (stopping_) return;
    guard([&] { (*task_)(index); });
    barrier();
  }
}

void Pool::run(const std::function<void(int)>& f) {
  thread_local const Pool* pinned_by = nullptr;
  if (pinned_by != this) {
    pin(0);
    pinned_by = this;
  }
  const FloatingPoint defaults;
  failed_ = false;
  task_ = &f;
  if (size_ > 1) start_.publish(start_.value.load(std::memory_order_relaxed) + 1);
  guard([&] { f(0); });
  barrier();
  if (failed_) throw std::runtime_error(error_);
}

}  // namespace as
