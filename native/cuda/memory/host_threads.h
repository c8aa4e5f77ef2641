// Copies large host memory with several threads, because one is slower than the link to a GPU.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace as::cuda {

// How many threads share the work on so many bytes and items.
inline int64_t host_threads(int64_t count, size_t bytes) {
  constexpr size_t kEach = 2 << 20, kMost = 16;  // least bytes per thread; most threads
  const size_t most = std::min<size_t>(kMost, std::max(1u, std::thread::hardware_concurrency()));
  return std::min<int64_t>(count, std::clamp<size_t>(bytes / kEach, 1, most));
}

// Calls work(i) for each i in [0, threads) on a thread of its own; 0 is this thread, which also does what no thread
// could be started for. Rethrows an exception of one of them.
template <typename Work>
void on_threads(int64_t threads, const Work& work) {
  std::exception_ptr failed;
  std::mutex mutex;
  const auto part = [&](int64_t i) {
    try {
      work(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failed) failed = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  for (int64_t i = 1; i < threads; i++) try {
      others.emplace_back(part, i);
    } catch (const std::system_error&) {  // no more threads can be started
      part(i);
    }
  part(0);
  for (std::thread& other : others) other.join();
  if (failed) std::rethrow_exception(failed);
}

// Calls work(begin, end) for parts of [0, count) on several threads, including this one. bytes: size of all work, which
// sets the number of threads. Rethrows an exception of one of them.
template <typename Work>
void share_work(int64_t count, size_t bytes, const Work& work) {
  const int64_t threads = host_threads(count, bytes);
  if (threads <= 1) return work((int64_t)0, count);
  on_threads(threads, [&](int64_t i) { work(count * i / threads, count * (i + 1) / threads); });
}

// Fills a buffer again and again, with several threads, while what is filled is sent. There are `count` items in groups
// of `group`, and room for `rooms` groups: group g may be filled when group g - rooms is sent.
//     fill(i)        fills item i. On any of the threads
//     send(g)        begins to send group g, whose items are filled. On this thread, in order
//     sent(g)        whether a group that was begun is sent. On this thread, in order
// Rethrows an exception of one of them; then groups may still be under way.
template <typename Fill, typename Send, typename Sent>
void fill_and_send(int count, int group, int rooms, int64_t threads, const Fill& fill, const Send& send,
                   const Sent& sent) {
  // Of threads without room: sending is slower, and others may need the CPU.
  constexpr std::chrono::microseconds kPause{20};
  const int groups = (count + group - 1) / group;
  std::vector<std::atomic<int>> left(groups);  // items of each group that are not filled
  for (int g = 0; g < groups; g++) left[g] = std::min(group, count - g * group);
  std::atomic<int> next{0}, may_fill{rooms};  // the next item, and the first group without room
  std::atomic<bool> failed{false};
  const auto fill_one = [&] {  // false: none can be filled now
    int i = next.load(std::memory_order_relaxed);
    do {
      if (i >= count || i / group >= may_fill.load(std::memory_order_acquire)) return false;
    } while (!next.compare_exchange_weak(i, i + 1, std::memory_order_relaxed));
    fill(i);
    left[i / group].fetch_sub(1, std::memory_order_release);
    return true;
  };
  const auto send_all = [&] {
    int ended = 0;  // groups that are sent
    for (int g = 0; g < groups && !failed;) {
      if (!left[g].load(std::memory_order_acquire)) send(g++);
      else if (ended < g && sent(ended)) may_fill.store(++ended + rooms, std::memory_order_release);
      else if (!fill_one()) std::this_thread::yield();
    }
  };
  const std::thread::id sender = std::this_thread::get_id();
  on_threads(std::max<int64_t>(threads, 1), [&](int64_t thread) {
    try {
      if (!thread) return send_all();
      if (std::this_thread::get_id() == sender) return;  // no thread could be started; it has to send
      while (next.load(std::memory_order_relaxed) < count && !failed)
        if (!fill_one()) std::this_thread::sleep_for(kPause);
    } catch (...) {
      failed = true;
      throw;
    }
  });
}

}  // namespace as::cuda
