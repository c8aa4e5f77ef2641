// The CPU backend behind the interface of asynchronous devices, so that tests on CPUs run the decoder that queues
// steps. A step is computed when its sampling is queued.
#pragma once
#include <algorithm>
#include <deque>
#include <utility>

#include "batch/queued_decoder.h"

namespace as {

class QueuedCpuRunner : public QueuedRunner {
 public:
  explicit QueuedCpuRunner(Runner& runner) : runner_(runner) {}

  void begin(const Batch& batch, bool want_logits) override {
    if (batch.outputs.empty()) runner_.run(batch, want_logits);
    else begun_ = batch, want_logits_ = want_logits;
  }
  bool sample(const Batch& batch) override {
    if (batch.outputs.empty()) return true;
    for (Row& row : begun_.rows)
      if (row.token < 0) row.token = std::max(sampled_[~row.token].token, 0);
    results_.push_back(runner_.run(begun_, want_logits_));
    sampled_ = results_.back().samples;
    return true;
  }
  bool done() const override { return true; }
  RunOutput finish(const Batch& batch) override {
    if (batch.outputs.empty()) return {};
    RunOutput result = std::move(results_.front());
    results_.pop_front();
    return result;
  }

 private:
  Runner& runner_;
  Batch begun_;
  bool want_logits_ = false;
  std::deque<RunOutput> results_;
  std::vector<SampleOutput> sampled_;  // by the latest step
};

}  // namespace as
