// The CPU's sampling op, with its own threads, for logits of another device.
#pragma once
#include <memory>
#include <vector>

#include "batch/logit_sampler.h"
#include "cpu/ops/ops.h"

namespace as {

class HostSampler : public LogitSampler {
 public:
  // shared_memory: connects the group's ranks, which have a shard of the vocabulary each; null: a single rank.
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
