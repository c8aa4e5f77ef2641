// A GPU, and memory of it and for it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "cuda/kernels.h"

namespace as {
namespace cuda {

// Throws std::runtime_error saying what failed.
void check(cudaError_t result, const char* what);

// Memory of the GPU that is in use on this thread, or of the host that the GPU can copy from and to (pinned).
class Memory {
 public:
  enum class Where { device, host };

  Memory() = default;
  // Zeroed. Throws std::runtime_error saying what it was for, and how much there is.
  Memory(size_t bytes, const char* purpose, Where where = Where::device);
  ~Memory();
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }

  template <typename T = char>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }
  // It stays as long as the process: others may still use it.
  void forget() { data_ = nullptr; }

 private:
  void swap(Memory& other) {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_), std::swap(where_, other.where_);
  }
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Where where_ = Where::device;
};

class Device {
 public:
  // Throws std::invalid_argument that says what to do: no driver, one that is too old, no such GPU, an unknown one.
  explicit Device(int index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Before the runtime is called on a thread.
  void use() const { check(cudaSetDevice(index_), "choosing the GPU"); }
  void wait() const { check(cudaStreamSynchronize(stream_), "a step on the GPU"); }
  int index() const { return index_; }
  int capability() const { return capability_; }  // 90 is 9.0
  int processors() const { return processors_; }
  const std::string& name() const { return name_; }
  cudaStream_t stream() const { return stream_; }
  Queue queue() const { return {stream_, capability_, scratch_}; }
  size_t free_bytes() const;

 private:
  int index_, capability_ = 0, processors_ = 0;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  Memory sums_, flags_, pieces_, arrivals_;
  Scratch scratch_;
};

// How many GPUs there are; throws as Device does.
int device_count();
// Throws std::invalid_argument unless this GPU can read and write the other's memory.
void check_peer(int device, int other);

}  // namespace cuda
}  // namespace as
