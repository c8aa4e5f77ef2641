#include "cuda/host_copy.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace as {
namespace cuda {
namespace {

constexpr size_t kHuge = 2 << 20, kPage = 4096, kEach = 256 << 20;  // bytes; kEach: worth a thread of its own
constexpr size_t kMostThreads = 16;

// Has the system find the pages: each thread those of its part.
void touch(char* data, size_t bytes) {
  const size_t most = std::min<size_t>(kMostThreads, std::max(1u, std::thread::hardware_concurrency()));
  const size_t count = std::clamp<size_t>(bytes / kEach, 1, most), part = (bytes / count + kHuge) / kHuge * kHuge;
  std::vector<std::thread> threads;
  for (size_t begin = 0; begin < bytes; begin += part)
    threads.emplace_back([=] {
      for (size_t at = begin; at < std::min(begin + part, bytes); at += kPage)
        *static_cast<volatile char*>(data + at) = 0;
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

HostCopy::HostCopy(size_t bytes, const char* purpose) {
  if (!bytes) return;
  const auto fail = [&](const char* why) {
    throw std::runtime_error("cannot allocate " + std::to_string(bytes >> 20) + " MiB of pinned memory for " + purpose +
                             ": " + why);
  };
  mapped_bytes_ = bytes + kHuge;
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) fail(std::strerror(errno));
  data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped_) + kHuge - 1) / kHuge * kHuge);
  madvise(data_, bytes, MADV_HUGEPAGE);  // where there are none it is slower
  touch(data_, bytes);
  if (const cudaError_t result = cudaHostRegister(data_, bytes, cudaHostRegisterDefault); result != cudaSuccess) {
    cudaGetLastError();  // it is told here
    munmap(mapped_, mapped_bytes_);
    fail(cudaGetErrorString(result));
  }
  bytes_ = bytes;
}

HostCopy::~HostCopy() {
  if (!bytes_) return;
  cudaHostUnregister(data_);
  munmap(mapped_, mapped_bytes_);
}

}  // namespace cuda
}  // namespace as
