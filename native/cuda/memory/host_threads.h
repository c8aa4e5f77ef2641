// Copies large host memory with several threads, because one is slower than the link to a GPU.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace as::cuda {

// Calls work(begin, end) for parts of [0, count) on several threads, including this one. bytes: size of all work, which
// sets the number of threads. Rethrows an exception of one of them.
template <typename Work>
void share_work(int64_t count, size_t bytes, const Work& work) {
  constexpr size_t kEach = 2 << 20, kMost = 16;  // least bytes per thread; most threads
  const size_t most = std::min<size_t>(kMost, std::max(1u, std::thread::hardware_concurrency()));
  const int64_t threads = std::min<int64_t>(count, std::clamp<size_t>(bytes / kEach, 1, most));
  if (threads <= 1) return work((int64_t)0, count);
  std::exception_ptr failed;
  std::mutex mutex;
  const auto part = [&](int64_t i) {
    try {
      work(count * i / threads, count * (i + 1) / threads);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failed = std::current_exception();
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

}  // namespace as::cuda
