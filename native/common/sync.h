// Waiting for a word of memory: spin briefly, then sleep on a futex. Works between threads and, in shared memory,
// between processes.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace as {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A counter to wait for. `sleepers` tells whether a wake-up call is needed.
struct Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  // The store to `value` and the sleeper's increment are sequentially consistent: either the sleeper is seen here, or
  // it sees the new value. (A fence costs the same, and ThreadSanitizer does not understand it.)
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst))
      syscall(SYS_futex, (uint32_t*)&value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  void publish(uint32_t v) {
    value.store(v, std::memory_order_seq_cst);
    wake();
  }
  // Sleeps while value == seen, at most `nanoseconds` (< 1e9). May return early.
  void sleep(uint32_t seen, int64_t nanoseconds) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (value.load(std::memory_order_seq_cst) == seen) {
      timespec limit{0, nanoseconds};
      syscall(SYS_futex, (uint32_t*)&value, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
};

// Pauses before a waiter sleeps: some tens of microseconds, about the cost of a futex wake-up.
constexpr int kSpins = 1500;
// The same where the waited-for is known to come soon and a wake-up would delay every layer of a step: some hundreds of
// microseconds.
constexpr int kPatientSpins = 8 * kSpins;

// True once `v` has reached `target` (counters wrap around).
inline bool reached(uint32_t v, uint32_t target) { return (int32_t)(v - target) >= 0; }

}  // namespace as
