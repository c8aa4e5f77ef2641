// Page-aligned memory straight from the kernel: zeroed, touched first (and so placed) by whoever fills it.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace as {

class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc-like runtime errors that say what the memory was for.
  Buffer(size_t bytes, const char* purpose) : bytes_(bytes) {
    if (!bytes) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::runtime_error("cannot allocate " + std::to_string(bytes >> 20) + " MiB for " + purpose);
    }
    madvise(data_, bytes, MADV_HUGEPAGE);  // fewer TLB misses when weights stream by; refusal is harmless
  }
  ~Buffer() { if (data_) munmap(data_, bytes_); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept { swap(other); return *this; }

  template <typename T = char> T* as() const { return static_cast<T*>(data_); }
  size_t size() const { return bytes_; }

 private:
  void swap(Buffer& other) { std::swap(data_, other.data_), std::swap(bytes_, other.bytes_); }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace as
