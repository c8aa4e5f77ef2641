// A GPU, and memory of it and for it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "cuda/kernels/common/chip.h"
#include "cuda/kernels/common/types.h"

namespace as {
namespace cuda {

// Throws std::runtime_error saying what failed.
void check(cudaError_t result, const char* what);

// Memory of the GPU that is in use on this thread, or of the host that the GPU can copy from and to (pinned).
class Memory {
 public:
  // lent: of the device, and large memory can be given back to it for a while.
  enum class Where { device, lent, host };

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
  // Whether give_back() does anything.
  bool lent() const { return where_ == Where::lent && data_; }
  // Its content is lost, its address stays; nothing on the device may use it. take_again() throws as the constructor
  // does, and leaves any content.
  void give_back();
  void take_again();
  // It stays as long as the process: others may still use it.
  void forget() { data_ = nullptr; }

 private:
  void swap(Memory& other) {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_), std::swap(where_, other.where_);
    std::swap(purpose_, other.purpose_), std::swap(device_, other.device_), std::swap(pages_, other.pages_);
    std::swap(handle_, other.handle_), std::swap(there_, other.there_);
  }
  [[noreturn]] void fail(cudaError_t result) const;
  void release();
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Where where_ = Where::device;
  const char* purpose_ = "";
  // Of what is lent:
  int device_ = 0;
  size_t pages_ = 0;               // bytes, in whole pages
  unsigned long long handle_ = 0;  // of the pages
  bool there_ = false;
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
  // dtype: of the 16-bit weights.
  Chip chip(DType16 dtype) const;
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
