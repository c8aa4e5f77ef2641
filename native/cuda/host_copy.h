// Memory of the host that the GPU copies from and to at the link's speed, made and given up as fast as may be: huge
// pages that several threads touch first, then pinned.
#pragma once
#include <cstddef>
#include <utility>

namespace as {
namespace cuda {

class HostCopy {
 public:
  HostCopy() = default;
  // Throws std::runtime_error saying what it was for.
  HostCopy(size_t bytes, const char* purpose);
  ~HostCopy();
  HostCopy(HostCopy&& other) noexcept { swap(other); }
  HostCopy& operator=(HostCopy&& other) noexcept {
    swap(other);
    return *this;
  }

  char* as() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  void swap(HostCopy& other) {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_), std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
  }
  char* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
};

}  // namespace cuda
}  // namespace as
