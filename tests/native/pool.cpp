// What the pool does that no op can be made to do from Python: a thread fails before a barrier that the others reach;
// more values than 32 bits count, which would take gigabytes, are divided; units of work are taken once each, in calls
// of different lengths and after a failure.
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "cpu/ops/work_counter.h"
#include "cpu/pool.h"

int main() {
  constexpr int64_t kLogits = int64_t{8389} * 256000;
  if (as::part(kLogits, 1, 2) != std::pair{kLogits / 2, kLogits} || as::part(7, 1, 2) != std::pair{3, 7}) {
    std::printf("parts of %ld values\n", (long)kLogits);
    return 1;
  }
  constexpr int kThreads = 3, kBarriers = 3;
  for (const bool spin : {true, false}) {
    as::Pool pool(kThreads, {}, spin);
    for (int round = 0; round < 100; round++)
      for (int bad = 0; bad < kThreads; bad++)
        for (int at = 0; at < kBarriers; at++) {
          std::atomic<int> passed{0};
          // As a step has it: ops in guards, with barriers within and after them.
          auto op = [&](int thread) {
            for (int i = 0; i < kBarriers; i++) {
              if (thread == bad && i == at)
                throw std::runtime_error("thread " + std::to_string(bad) + " at " + std::to_string(at));
              if (!pool.barrier()) return;
              passed++;
            }
          };
          std::string error;
          try {
            pool.run([&](int thread) {
              for (int i = 0; i < 3; i++) {
                pool.guard([&] { op(thread); });
                if (!pool.barrier()) return;
                passed = 1000;
              }
            });
          } catch (const std::exception& e) { error = e.what(); }
          if (error != "thread " + std::to_string(bad) + " at " + std::to_string(at) || passed > at * kThreads) {
            std::printf("error '%s', %d barriers passed\n", error.c_str(), passed.load());
            return 1;
          }
          std::atomic<int> arrived{0}, together{0};
          pool.run([&](int thread) {
            arrived++;
            if (thread == 0) pool.set_patient(at == 0);  // while others wait
            if (pool.barrier() && arrived == kThreads) together++;
          });
          if (together != kThreads) {
            std::printf("after a failure %d threads of %d met\n", together.load(), kThreads);
            return 1;
          }
        }
    as::WorkCounter counter(kThreads);
    for (int round = 0; round < 100; round++) {
      constexpr int kCounts[] = {5, 0, 1, 64};
      std::vector<std::atomic<int>> taken(64);
      std::atomic<int> wrong{0};
      counter.reset();
      try {
        pool.run([&](int thread) {
          for (int call = 0; call < 8; call++) {
            const int count = kCounts[call % 4];
            pool.guard([&] {
              counter.share(thread, count, [&](int i) {
                if (round % 10 == 9 && i == 63) throw std::runtime_error("the last unit");
                if (i < 0 || i >= count) wrong++;
                else taken[i]++;
              });
            });
            if (!pool.barrier()) return;
            if (thread == 0)
              for (int i = 0; i < 64; i++) wrong += taken[i].exchange(0) != (i < count);
            if (!pool.barrier()) return;
          }
        });
      } catch (const std::exception&) { wrong += round % 10 != 9; }
      if (wrong) {
        std::printf("round %d: %d units were not taken once\n", round, wrong.load());
        return 1;
      }
    }
  }
}
