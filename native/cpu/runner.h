// A program compiled for the CPUs of one rank: a vector of bound ops, and the memory that they work in.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cpu/ops/ops.h"
#include "program/fusion.h"

namespace as {

// What an op has cost.
struct Counters {
  int64_t count = 0;
  double total = 0, least = 0, most = 0;  // seconds on thread 0
  double bytes = 0, operations = 0;       // in total
};

// The cache: of every layer that attends.
struct CacheLimits {
  int span_size = 0;
  std::vector<int> num_spans;  // of each cache group
  DType dtype = DType::f32;
};

class CpuRunner : public Runner {
 public:
  struct Step {
    FusedOp parts;
    std::unique_ptr<BoundOp> op;  // null: nothing to do
    Counters counters;
    const SpanLayout* layout = nullptr;  // of attention
  };

  // Throws std::invalid_argument naming what this backend does not have. Program and weights must outlive the runner.
  // fused: whether ops are computed together that can be (the bits are the same).
  CpuRunner(const Core& core, const Program& program, const Weights& weights, const RunnerLimits& limits,
            const CacheLimits& cache, bool fused);

  Drawn run(const Batch& batch, bool want_logits) override;
  void set_profiling(bool on);  // on: counts anew; off: what was counted stays
  const std::vector<Step>& steps() const { return steps_; }
  const Buffer& cache() const { return cache_.memory(); }

 private:
  void allocate_cache(const CacheLimits& limits);
  void allocate_tensors(const std::vector<FusedOp>& ops);
  int max_rows(int tensor) const;
  Tensor bound(const std::vector<FusedOp>& ops, size_t op, size_t part, int tensor, bool output) const;
  const Packed* prepared_for(const std::vector<FusedOp>& ops, size_t op, int tensor) const;
  void record(Step& step, const Batch& batch, double seconds) const;

  const Core core_;
  const Program& program_;
  const Weights& weights_;
  const RunnerLimits limits_;
  SpanCache cache_;
  Buffer activations_;
  Buffer attended_;  // rows of attention as linears want them
  Scratch scratch_;
  std::vector<std::shared_ptr<RotaryTable>> rotary_;
  std::vector<std::shared_ptr<AttentionWork>> attention_;
  std::vector<Tensor> tensors_;
  std::vector<Step> steps_;
  Drawn drawn_;
  bool profiling_ = false;
};

}  // namespace as
