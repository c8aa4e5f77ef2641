// Two threads of a rank look at a peer at the same time after an idle time: neither may find it silent, because its
// heartbeats went on.
#include "comm/silence.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "common/sync.h"

namespace {

// Returns when the count is reached. Yields now and then, for machines with other work.
void wait_for(const std::atomic<int>& count, int target) {
  for (int i = 1; count.load(std::memory_order_acquire) < target; i++)
    if (i % 1000) as::cpu_pause();
    else std::this_thread::yield();
}

}  // namespace

int main(int, char** words) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::atoi(words[1]));
  as::Silence silence;
  std::atomic<uint64_t> own{0}, peer{0};
  std::atomic<int> begun{0}, ended{0}, wrong{0};
  std::atomic<bool> over{false};
  std::thread other([&] {
    for (int round = 1;; round++) {
      wait_for(begun, round);
      if (over) return;
      for (volatile int delay = round % 64; delay > 0;) delay = delay - 1;
      wrong += silence.check(own, peer);
      ended.store(round, std::memory_order_release);
    }
  });
  int rounds = 0;
  while (std::chrono::steady_clock::now() < end) {
    peer += as::kSilentHeartbeats, own += as::kSilentHeartbeats;
    begun.store(++rounds, std::memory_order_release);
    for (volatile int delay = 32; delay > 0;) delay = delay - 1;
    wrong += silence.check(own, peer);
    wait_for(ended, rounds);
  }
  over = true, begun++;
  other.join();
  std::printf("%d of %d rounds: a rank with heartbeats was silent\n", wrong.load(), rounds);
  for (uint32_t i = 0; i < as::kSilentHeartbeats; i++, own++)
    if (silence.check(own, peer)) return std::printf("silent after %u heartbeats\n", i), 1;
  if (!silence.check(own, peer)) return std::printf("never silent\n"), 1;
  return wrong != 0;
}
