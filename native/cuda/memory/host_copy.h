// Memory of the host that the GPU copies from and to at the link's speed, made and given up as fast as may be: huge
// pages that several threads touch first, then pinned, part by part, so that copies into the first parts are under way
// while the others are made.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace as {
namespace cuda {

class HostCopy {
 public:
  // Bytes [begin, end) of the copy that begins at `data` can be copied into; told by several threads.
  using Made = std::function<void(char* data, size_t begin, size_t end)>;
  HostCopy() = default;
  // Throws std::runtime_error saying what it was for.
  HostCopy(size_t bytes, const char* purpose, const Made& made);
  ~HostCopy();
  HostCopy(HostCopy&& other) noexcept { swap(other); }
  HostCopy& operator=(HostCopy&& other) noexcept {
    swap(other);
    return *this;
  }

  char* as() const { return data_; }
  size_t size() const { return bytes_; }
  // Calls copy(first byte, bytes) for each that is pinned by itself of [begin, end): no copy crosses their borders.
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
  std::vector<char> pinned_;  // of each part, whether it is
};

}  // namespace cuda
}  // namespace as
