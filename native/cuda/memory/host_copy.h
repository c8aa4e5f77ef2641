// Host memory that the GPU copies to and from at the link's speed. Several threads touch huge pages and pin them part
// by part, so copies into the first parts overlap with the allocation of the others.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace as::cuda {

class HostCopy {
 public:
  // Called by several threads: bytes [begin, end) of the memory at `data` are ready to be copied into.
  using Made = std::function<void(char* data, size_t begin, size_t end)>;
  HostCopy() = default;
  // Throws std::runtime_error that names the purpose.
  HostCopy(size_t bytes, const char* purpose, const Made& made);
  ~HostCopy();
  HostCopy(HostCopy&& other) noexcept { swap(other); }
  HostCopy& operator=(HostCopy&& other) noexcept {
    swap(other);
    return *this;
  }

  char* as() const { return data_; }
  size_t size() const { return bytes_; }
  // Calls copy(first byte, bytes) for each separately pinned part of [begin, end). A copy must not cross their borders.
  template <typename Copy>
  static void each_part(size_t begin, size_t end, const Copy& copy) {
    for (size_t at = begin, next; at < end; at = next) {
      next = std::min(end, (at / kPart + 1) * kPart);
      copy(at, next - at);
    }
  }

 private:
  static constexpr size_t kPart = 64 << 20;
  void swap(HostCopy& other) {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_), std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_), std::swap(pinned_, other.pinned_);
  }
  void give_up();
  char* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::vector<char> pinned_;  // of each part: whether it is pinned
};

}  // namespace as::cuda
