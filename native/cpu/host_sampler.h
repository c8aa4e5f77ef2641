// The CPU's sampling op over logits of another device, with threads of its own.
#pragma once
#include <memory>
#include <vector>

#include "batch/logit_sampler.h"
#include "cpu/ops/ops.h"

namespace as {

class HostSampler : public LogitSampler {
 public:
  // shared_memory: to the other ranks of a group, each of which has a part of the vocabulary; null: there are none.
  HostSampler(int threads, std::vector<int> cpus, std::shared_ptr<Communicator> shared_memory = nullptr);

  void attach(const OpNode& op, float* logits, int width, int max_outputs, Masks* masks) override;
  void sample(const Batch& batch, std::vector<SampleOutput>& samples) override;

 private:
  const std::shared_ptr<Communicator> shared_memory_;
  Pool pool_;
  const Core core_;
  const Weights no_weights_;
  RunnerLimits limits_;
  RunOutput output_;
  std::unique_ptr<BoundOp> op_;
};

}  // namespace as
