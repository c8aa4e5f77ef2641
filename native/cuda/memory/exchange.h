// Memory of each rank's GPU that the other ranks read and write, opened by CUDA IPC (over NVLink or PCIe). It has two
// buffers for the rank's partial sums, buffers for the sums that other ranks push, the flags by which kernels wait for
// each other (kernels/comm/sum_ranks.cu), and what ranks exchange to sample (kernels/comm/sample_ranks.h).
//
// Where GPUs do not reach each other's memory, ranks share memory of their host instead. A rank's GPU has its own
// partial sums in its memory, too. The bits are the same.
#pragma once
#include <string>
#include <vector>

#include "cuda/kernels/comm/sample_ranks.h"
#include "cuda/memory/device.h"
#include "cuda/memory/host_block.h"

namespace as::cuda {

class Exchange {
 public:
  // buffer_bytes: size of the largest partial sum. pushed: size of the largest pushed one; 0: none. outputs: the most
  // of a step; vocab: the size of the vocabulary, 0 if nothing is sampled. seconds: how long a kernel waits for another
  // rank. by_host: by host memory, the same on all ranks; then nothing is pushed.
  Exchange(const Device& device, int rank, int world, size_t buffer_bytes, size_t pushed, int outputs, int vocab,
           double seconds, bool by_host = false);
  // Frees the memory once no other rank has it open. Leaks it if a rank that has opened it does not leave it in time.
  // If connect() was not called, no rank may call it with this rank's address afterwards.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The address by which other ranks open this rank's memory.
  std::string address();
  // Opens the memory of all ranks. addresses: every rank's, in rank order. Throws std::invalid_argument that says what
  // to do if GPUs cannot reach each other. Once one rank has the addresses all ranks call it, also if the load has
  // failed.
  void connect(const std::vector<std::string>& addresses);
  bool connected() const { return connected_; }
  // The caller sets Peers::step.
  const Peers& peers() const { return peers_; }
  // Where this rank writes its partial sums for a call of a step.
  Rows partial(int call, int width, bool is_dtype16, DType16 dtype) const;
  // The other rank's buffer to which a GEMM pushes partial sums of few rows; null if sum_ranks() pushes them.
  uint16_t* place(int call, int width) const;
  // What ranks exchange to sample, if this rank has the logits of the ids from `begin` on. step: number of previous
  // steps, in the device's memory.
  RankSamples samples(int begin, int width, const int* step) const;
  // After a step: throws std::runtime_error if a kernel timed out waiting for another rank.
  void check_waits() const;

 private:
  struct Address;
  // What a rank does with the memory of another one, as it tells it there.
  enum class Mark : uint32_t { none, open, left };

  void open(int r, const std::string& address);
  void open_peer(int r, const Address& address);
  size_t block_bytes() const;  // of a rank, by host memory
  void tell(int r, Mark mark) const;
  void leave();

  const Device& device_;
  const double seconds_;
  const bool by_host_;
  Memory memory_, failed_;
  HostBlock blocks_[kMaxRanks];  // by host memory: of all ranks
  Peers peers_;
  RankSamples samples_;
  bool connects_ = false, connected_ = false;
  char* others_[kMaxRanks] = {};  // the memory of other ranks that is open here
  std::vector<void*> opened_;     // of other processes
};

// Bytes of a partial sum.
size_t partial_bytes(int rows, int width, bool is_dtype16);
// Bytes of GPU memory that an exchange takes.
size_t exchange_bytes(int world, size_t buffer_bytes, size_t pushed, int outputs, int vocab, bool by_host = false);

}  // namespace as::cuda
