// A GPU, its memory, and pinned host memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "cuda/kernels/common/chip.h"
#include "cuda/kernels/common/errors.h"
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Throws std::runtime_error that says what failed, or DeviceLost.
void check(cudaError_t result, const char* what);

// Memory of this thread's current GPU, or pinned memory of the host.
class Memory {
 public:
  // lent: memory of the device that can be given back for a while if it is large.
  enum class Where { device, lent, host };

  Memory() = default;
  // The memory is zeroed. Throws std::runtime_error with its purpose and how much memory is free.
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
  // give_back() frees the memory but keeps its address; no work on the device may use it. take_again() throws as the
  // constructor does; the content is undefined.
  void give_back();
  void take_again();
  // Leaks the memory, because other processes may still use it.
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
  // Of lent memory:
  int device_ = 0;
  size_t pages_ = 0;               // bytes, rounded up to pages
  unsigned long long handle_ = 0;  // of the pages
  bool there_ = false;
};

class Device {
 public:
  // Throws std::invalid_argument that says what to do if the driver is missing or too old, or if the GPU does not exist
  // or is not supported. costs: measured ones (chip_costs.h).
  explicit Device(int index, const ChipCosts& costs = {});
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Each thread must call this before it calls the CUDA runtime.
  void use() const { check(cudaSetDevice(index_), "choosing the GPU"); }
  void wait() const { check(cudaStreamSynchronize(stream_), "a step on the GPU"); }
  int index() const { return index_; }
  int capability() const { return capability_; }  // 90 is 9.0
  int sm_count() const { return sm_count_; }
  const std::string& name() const { return name_; }
  cudaStream_t stream() const { return stream_; }
  // Launches to side_queue() after fork() follow what stream() has got so far, and launches to stream() after join()
  // follow them.
  void fork() const;
  void join() const;
  // dtype: the type of 16-bit weights.
  Chip chip(DType16 dtype) const;
  const ChipCosts& costs() const { return costs_; }
  Queue queue() const { return {stream_, capability_, scratch_, false, &costs_}; }
  Queue side_queue() const {
    Queue queue = this->queue();
    queue.stream = side_;
    return queue;
  }
  size_t free_bytes() const;

 private:
  int index_, capability_ = 0, sm_count_ = 0;
  std::string name_;
  const ChipCosts costs_;
  cudaStream_t stream_ = nullptr, side_ = nullptr;
  cudaEvent_t forked_ = nullptr, joined_ = nullptr;
  Memory sums_, flags_, k_parts_, arrivals_;
  Scratch scratch_;
};

// The number of GPUs. Throws as Device does.
int device_count();
// Throws std::invalid_argument that says what to do if there is no such GPU.
void check_index(int index);
// Whether a GPU can read and write another's memory. ALLSPARK_PEER_ACCESS=0 says that none can. Throws
// std::invalid_argument if there is no such GPU.
bool reaches_peer(int device, int other);
bool may_reach_peers();

}  // namespace as::cuda
