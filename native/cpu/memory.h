// Page-aligned, zeroed memory from Linux. The thread that writes a page first places it on its NUMA node.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/shared_block.h"

namespace as {

constexpr size_t kHugePage = 2 << 20;

class Buffer {
 public:
  Buffer() = default;
  // Throws std::runtime_error that names the purpose when memory is exhausted.
  Buffer(size_t bytes, const char* purpose) : bytes_(bytes) {
    if (!bytes) return;
    // Starts at a huge page's boundary if one fits; otherwise the first pages would be small.
    const size_t slack = bytes < kHugePage ? 0 : kHugePage;
    void* mapped = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED)
      throw std::runtime_error("cannot allocate " + std::to_string(bytes >> 20) + " MiB for " + purpose);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped),
                    aligned = slack ? (begin + slack - 1) / slack * slack : begin;
    if (aligned > begin) munmap(mapped, aligned - begin);
    const size_t after = begin + bytes + slack - (aligned + pages(bytes));
    if (slack && after) munmap(reinterpret_cast<void*>(aligned + pages(bytes)), after);
    data_ = reinterpret_cast<void*>(aligned);
    madvise(data_, bytes, MADV_HUGEPAGE);  // fewer TLB misses when weights are streamed; failure is harmless
  }
  ~Buffer() {
    if (data_) munmap(data_, bytes_);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }

  template <typename T = char>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }

 private:
  static size_t pages(size_t bytes) {  // munmap's unit
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
  }
  void swap(Buffer& other) { std::swap(data_, other.data_), std::swap(bytes_, other.bytes_); }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory for many matrices, side by side. With a buffer for each matrix, both ends of a matrix would be in small pages,
// and all of a small matrix. (Measured: a third of a model's int8 weights was in small pages, and streaming them was a
// fifth slower.)
class Arena {
 public:
  // From now on takes memory that other processes can map, as long as it is enough.
  void share(size_t bytes) {
    shared_.emplace(SharedBlock::Untouched{}, (bytes + kHugePage - 1) / kHugePage * kHugePage, "experts' weights");
    next_ = shared_->data(), left_ = shared_->size();
  }
  const SharedBlock* shared() const { return shared_ ? &*shared_ : nullptr; }
  // Whether memory is of the shared block.
  bool is_shared(const char* data) const {
    return shared_ && data >= shared_->data() && data < shared_->data() + shared_->size();
  }
  // Bytes of the shared block up to the last that was taken.
  size_t shared_bytes() const { return shared_ ? is_shared(next_) ? next_ - shared_->data() : shared_->size() : 0; }

  // Returns zeroed memory, aligned to a cache line, that lives as long as the arena.
  char* take(size_t bytes, const char* purpose) {
    if (bytes > left_) {
      const size_t size = (std::max(bytes, kChunk) + kHugePage - 1) / kHugePage * kHugePage;
      chunks_.emplace_back(size, purpose);
      next_ = chunks_.back().as(), left_ = size;
    }
    char* taken = next_;
    const size_t whole = std::min(left_, (bytes + 63) / 64 * 64);
    next_ += whole, left_ -= whole;
    return taken;
  }

 private:
  static constexpr size_t kChunk = 64 << 20;  // of address space; only written pages use memory
  std::vector<Buffer> chunks_;
  std::optional<SharedBlock> shared_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace as
