// What the ranks of several GPUs have of each other: memory of each GPU that the others read and write, by CUDA's IPC
// between processes (over NVLink, or PCIe). It holds two buffers for the rank's partial sums, places for those that the
// others push, and the flags by which kernels wait for each other (kernels/comm/sum_ranks.cu).
#pragma once
#include <string>
#include <vector>

#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/memory/device.h"

namespace as {
namespace cuda {

class Exchange {
 public:
  // buffer_bytes: of the largest partial sum; pushed: of the largest one that is pushed, or 0. seconds: how long a
  // kernel waits for another rank.
  Exchange(const Device& device, int rank, int world, size_t buffer_bytes, size_t pushed, double seconds);
  // Gives the memory back once no other rank has it open. If this one has told its address and could not connect, that
  // is never known: then it stays as long as the process.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // By which the other ranks open this one's memory.
  std::string address();
  // Opens that of all ranks. addresses: every rank's, in rank order. std::invalid_argument that says what to do where
  // GPUs do not reach each other.
  void connect(const std::vector<std::string>& addresses);
  bool connected() const { return connected_; }
  // Peers::step is the caller's to add.
  const Peers& peers() const { return peers_; }
  // Where this rank's partial sums of a call of a step go.
  Rows partial(int call, int width, bool is_dtype16, DType16 dtype) const;
  // Where few rows of them are pushed to by what makes them; null where sum_ranks() does that.
  uint16_t* place(int call, int width) const;
  // After a step: throws std::runtime_error if a kernel has waited for another rank in vain.
  void check_waits() const;

 private:
  void leave();

  const Device& device_;
  const double seconds_;
  Memory memory_, failed_;
  Peers peers_;
  bool told_ = false, connected_ = false;
  std::vector<void*> opened_;  // of other processes
};

// Of a partial sum.
size_t partial_bytes(int rows, int width, bool is_dtype16);
// Of all that an exchange takes.
size_t exchange_bytes(int world, size_t buffer_bytes, size_t pushed);

}  // namespace cuda
}  // namespace as
