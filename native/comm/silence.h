// Whether a rank is silent: whether its heartbeats have not changed while the watcher's own have counted on.
//
// The heartbeats when they last changed, and the watcher's own at that time, are one word, because several threads of
// a rank watch the same peer. As two words, one thread could see the new heartbeats with the own ones of before an idle
// time, and end a healthy group. 32 bits of each suffice: at one a second they wrap around after 136 years.
#pragma once
#include <atomic>
#include <cstdint>

namespace as {

constexpr uint32_t kSilentHeartbeats = 15;  // at one a second, later than the supervisor (10 s), which reports more

class Silence {
 public:
  // Any thread may call it. own, heartbeats: counters of the watcher and of the watched rank.
  bool check(const std::atomic<uint64_t>& own, const std::atomic<uint64_t>& heartbeats) {
    uint64_t seen = seen_.load(std::memory_order_acquire);  // before `own`, which is then not behind it
    const uint32_t now = (uint32_t)own.load(std::memory_order_acquire),
                   found = (uint32_t)heartbeats.load(std::memory_order_acquire);
    if (found == (uint32_t)(seen >> 32)) return now - (uint32_t)seen >= kSilentHeartbeats;
    // If another thread has noticed first, its time is as good.
    seen_.compare_exchange_strong(seen, (uint64_t)found << 32 | now, std::memory_order_acq_rel);
    return false;
  }

 private:
  std::atomic<uint64_t> seen_{0};
};

}  // namespace as
