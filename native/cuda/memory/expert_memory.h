// What a GPU exchanges with ranks of experts, in the host's memory (comm/expert_exchange.h), mapped for its kernels.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "comm/expert_exchange.h"
#include "cuda/kernels/moe/dispatch.h"
#include "cuda/memory/device.h"
#include "cuda/memory/host_block.h"

namespace as::cuda {

class ExpertStream;
class HotExperts;

class ExpertRanks {
 public:
  // The exchange must be connected; kernels wait for other ranks as long as it does. stream: null, or how the GPU
  // computes the experts of steps with many rows itself. hot: null, or experts whose entries it computes, and then
  // ranks of experts return entries. Both must outlive the ranks. Throws std::invalid_argument for more ranks than
  // kernels know, and std::runtime_error if memory cannot be pinned.
  ExpertRanks(const Device& device, std::shared_ptr<ExpertExchange> exchange, ExpertStream* stream = nullptr,
              HotExperts* hot = nullptr);
  ~ExpertRanks();
  ExpertRanks(const ExpertRanks&) = delete;
  ExpertRanks& operator=(const ExpertRanks&) = delete;

  const ExpertMemory& memory() const { return memory_; }
  ExpertStream* stream() const { return stream_; }
  HotExperts* hot() const { return hot_; }
  const ExpertShape& shape() const { return exchange_->shape(); }
  // After a step: throws std::runtime_error if a kernel timed out waiting for a rank of experts.
  void check_waits() const;
  void end_step() { exchange_->end_step(); }
  // How many messages the GPU has sent so far, and nanoseconds from each until it saw that all ranks had answered,
  // which it may have looked for later. Any thread may call it.
  std::pair<int64_t, int64_t> waited() const;

 private:
  const Device& device_;
  const std::shared_ptr<ExpertExchange> exchange_;
  ExpertStream* const stream_;
  HotExperts* const hot_;
  std::vector<Pinned> blocks_;  // of all ranks
  Memory local_, told_;         // told_: what the GPU tells the host
  ExpertMemory memory_;
};

}  // namespace as::cuda
