// Instead of native/cuda/kernels/common/device.cuh: kernels run on the CPU, the threads of a block as fibers that take
// turns where they wait for each other. The blocks of a cluster run at once, each in a thread of the CPU that has the
// block's shared variables; otherwise one block at a time. For tests of what kernels compute, on whole warps.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/kernels/common/dtype16.h"

#define __global__
#define __device__
#define __noinline__
#define __shared__ static thread_local
#define __launch_bounds__(...)

using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emulated {

constexpr int kWarp = 32, kStackBytes = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended;
  int exchanges;  // of its warp that it has taken part in
};

// Values that a warp's threads show each other: two turns, as a thread may come to the next exchange before all have
// seen the last one's.
struct Warp {
  uint64_t values[2][kWarp];
  int shown[2], generation[2];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  ucontext_t scheduler;
  int current, alive, arrived, generation;
  dim3 index, grid;
  std::function<void()> kernel;

  void yield() { swapcontext(&fibers[current].context, &scheduler); }

  static void enter();

  void run(int threads) {
    if ((int)fibers.size() < threads) {
      fibers = std::vector<Fiber>(threads);
      for (Fiber& fiber : fibers) fiber.stack.reset(new char[kStackBytes]);
    }
    warps.assign(threads / kWarp, Warp{});
    alive = threads, arrived = 0;
    for (int i = 0; i < threads; i++) {
      Fiber& fiber = fibers[i];
      fiber.ended = false, fiber.exchanges = 0;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    while (alive > 0)
      for (current = 0; current < threads; current++)
        if (!fibers[current].ended) swapcontext(&scheduler, &fibers[current].context);
  }

  void synchronize() {
    const int before = generation;
    arrived++;
    while (generation == before) {
      if (arrived == alive) arrived = 0, generation++;
      else yield();
    }
  }

  template <typename T>
  T exchange(T value, int from) {
    Warp& warp = warps[current / kWarp];
    const int turn = fibers[current].exchanges++ % 2, before = warp.generation[turn];
    std::memcpy(&warp.values[turn][current % kWarp], &value, sizeof value);
    if (++warp.shown[turn] == kWarp) warp.shown[turn] = 0, warp.generation[turn]++;
    else
      while (warp.generation[turn] == before) yield();
    std::memcpy(&value, &warp.values[turn][from], sizeof value);
    return value;
  }
};

inline thread_local Block block;

// The blocks of a cluster. The shared variables of all have the same distance from `anchor`.
struct Cluster {
  std::mutex mutex;
  std::condition_variable met;
  std::vector<char*> anchors;  // of each block
  int arrived = 0, generation = 0;

  void meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const int before = generation;
    if (++arrived == (int)anchors.size()) arrived = 0, generation++, met.notify_all();
    else met.wait(lock, [&] { return generation != before; });
  }
};
inline thread_local char anchor;
inline thread_local Cluster* cluster = nullptr;

inline void Block::enter() {
  block.kernel();
  block.fibers[block.current].ended = true, block.alive--;
  block.yield();
}

inline int lane() { return block.current % kWarp; }

}  // namespace emulated

#define threadIdx (dim3(emulated::block.current))
#define blockIdx (emulated::block.index)
#define gridDim (emulated::block.grid)

inline void __syncthreads() { emulated::block.synchronize(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::block.exchange(value, emulated::lane() ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = emulated::kWarp) {
  return emulated::block.exchange(value, emulated::lane() / width * width + from % width);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  return emulated::block.exchange(value, std::max(emulated::lane() - by, 0));
}
inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned all = (unsigned)value << emulated::lane();
  for (int step = 1; step < emulated::kWarp; step *= 2) all |= __shfl_xor_sync(0, all, step);
  return all;
}
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
template <typename T, typename U>
T atomicAdd(T* to, U value) {
  const T before = *to;
  *to += value;
  return before;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

namespace as {
namespace cuda {

inline void after_previous() {}
inline int ceil_div(size_t n, int by) { return (int)((n + by - 1) / by); }

inline int sm_count() { return 16; }

// cluster: all blocks along x, or one.
template <typename... Parameters, typename... Arguments>
void start_clusters(const Queue&, void (*kernel)(Parameters...), dim3 grid, dim3 cluster, int threads, size_t,
                    const Arguments&... arguments) {
  const auto run = [&](unsigned x, unsigned y) {
    emulated::block.kernel = [&] { kernel(Parameters(arguments)...); };
    emulated::block.index = dim3(x, y), emulated::block.grid = grid;
    emulated::block.run(threads);
  };
  for (unsigned y = 0; y < grid.y; y++) {
    if (cluster.x == 1) {
      for (unsigned x = 0; x < grid.x; x++) run(x, y);
      continue;
    }
    emulated::Cluster blocks;
    blocks.anchors.resize(grid.x);
    std::vector<std::thread> running;
    for (unsigned x = 0; x < grid.x; x++)
      running.emplace_back([&, x] {
        emulated::cluster = &blocks, blocks.anchors[x] = &emulated::anchor;
        blocks.meet();
        run(x, y);
      });
    for (std::thread& block : running) block.join();
  }
}
template <typename... Parameters, typename... Arguments>
void start(const Queue& queue, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared,
           const Arguments&... arguments) {
  start_clusters(queue, kernel, grid, dim3(1), threads, shared, arguments...);
}

}  // namespace cuda
}  // namespace as
