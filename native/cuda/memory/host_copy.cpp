#include "cuda/memory/host_copy.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/memory/host_threads.h"

namespace as::cuda {
namespace {

constexpr size_t kHuge = 2 << 20, kPage = 4096;  // bytes

}  // namespace

HostCopy::HostCopy(size_t bytes, const char* purpose, const Made& made) {
  if (!bytes) return;
  const auto fail = [&](const char* why) {
    throw std::runtime_error("cannot allocate " + std::to_string(bytes >> 20) + " MiB of pinned memory for " + purpose +
                             ": " + why);
  };
  mapped_bytes_ = bytes + kHuge;
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) fail(std::strerror(errno));
  data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped_) + kHuge - 1) / kHuge * kHuge);
  bytes_ = bytes, pinned_.assign((bytes + kPart - 1) / kPart, false);
  madvise(data_, bytes, MADV_HUGEPAGE);  // not required, but faster
  int device = 0;
  cudaGetDevice(&device);
  try {
    share_work((int64_t)pinned_.size(), bytes, [&](int64_t first, int64_t last) {
      cudaSetDevice(device);  // otherwise this thread would use GPU 0
      for (int64_t part = first; part < last; part++) {
        const size_t begin = part * kPart, end = std::min(begin + kPart, bytes_);
        for (size_t at = begin; at < end; at += kPage) *static_cast<volatile char*>(data_ + at) = 0;
        const cudaError_t result = cudaHostRegister(data_ + begin, end - begin, cudaHostRegisterDefault);
        if (result != cudaSuccess) {
          cudaGetLastError();  // reported here
          fail(cudaGetErrorString(result));
        }
        pinned_[part] = true;
        made(data_, begin, end);
      }
    });
  } catch (...) {
    cudaDeviceSynchronize();  // copies may still be running
    give_up();
    throw;
  }
}

void HostCopy::give_up() {
  for (size_t part = 0; part < pinned_.size(); part++)
    if (pinned_[part]) cudaHostUnregister(data_ + part * kPart);
  if (bytes_) munmap(mapped_, mapped_bytes_);
}

HostCopy::~HostCopy() { give_up(); }

}  // namespace as::cuda
