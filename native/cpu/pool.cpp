#include "cpu/pool.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <pthread.h>
#include <sched.h>

#include <stdexcept>
#include <system_error>

namespace as {
namespace {

// Sets the floating-point environment that results depend on: round to nearest, keep denormals, no exceptions. A
// library in the user's process may have changed it (-ffast-math does) for its threads and the threads that they start.
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

Pool::Pool(int threads, std::vector<int> cpus, bool spin)
    : size_(threads), cpus_(std::move(cpus)), spin_(spin), spins_(spin ? kSpins : 0) {
  if (threads < 1 || threads > 1024)
    throw std::invalid_argument("number of threads must be 1 to 1024, got " + std::to_string(threads));
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
  const int cpu = cpus_[index % cpus_.size()];
  const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);  // a plain cpu_set_t is limited to 1,024 CPUs
  std::vector<char> mask(bytes);
  cpu_set_t* set = reinterpret_cast<cpu_set_t*>(mask.data());
  CPU_SET_S(cpu, bytes, set);
  pthread_setaffinity_np(pthread_self(), bytes, set);  // some containers forbid it; then the scheduler decides
}

void Pool::fail(const char* what) {
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (!failed_) error_ = what;
    failed_ = true;
  }
  barrier_.phase.wake();
}

bool Pool::meet(Meeting& meeting, bool failure_ends_it) {
  if (size_ == 1) return true;
  const uint32_t phase = meeting.phase.value.load(std::memory_order_acquire);
  if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    meeting.arrived.store(0, std::memory_order_relaxed);
    meeting.phase.publish(phase + 1);
    return true;
  }
  int spins = 0;
  while (meeting.phase.value.load(std::memory_order_acquire) == phase) {
    if (failure_ends_it && failed_.load(std::memory_order_acquire)) break;
    if (sleeps(spins)) meeting.phase.sleep(phase, 100'000'000);
    else spins++, cpu_pause();
  }
  return false;
}

// A failed thread does not arrive at this barrier, so it cannot complete: true means that all have arrived.
bool Pool::barrier() {
  if (!failed_.load(std::memory_order_acquire) && meet(barrier_, true))
    barriers_.fetch_add(1, std::memory_order_relaxed);
  return !failed_.load(std::memory_order_acquire);
}

void Pool::worker(int index) {
  const FloatingPoint defaults;
  pin(index);
  uint32_t seen = 0;
  while (true) {
    int spins = 0;
    while (start_.value.load(std::memory_order_acquire) == seen) {
      if (sleeps(spins)) start_.sleep(seen, 900'000'000);
      else spins++, cpu_pause();
    }
    seen++;
    if (stopping_) return;
    guard([&] { (*task_)(index); });
    meet(end_, false);
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
  barrier_.arrived.store(0, std::memory_order_relaxed);  // left over from a run that failed
  task_ = &f;
  if (size_ > 1) start_.publish(start_.value.load(std::memory_order_relaxed) + 1);
  guard([&] { f(0); });
  meet(end_, false);
  if (failed_) throw std::runtime_error(error_);
}

}  // namespace as
