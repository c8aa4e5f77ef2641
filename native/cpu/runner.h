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

// The cache: of every layer that attends. Cache groups share its spans.
struct CacheLimits {
  int span_size = 0, num_spans = 0;
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
  // fused: whether ops are computed together that can be (the bits are the same). masks: of rank 0's draws, if there
  // are any; they must outlive the runner.
  CpuRunner(const Core& core, const Program& program, const Weights& weights, const RunnerLimits& limits,
            const CacheLimits& cache, bool fused, Masks* masks = nullptr);

  Drawn run(const Batch& batch, bool want_logits) override;
  void set_profiling(bool on);  // on: counts anew; off: what was counted stays
  const std::vector<Step>& steps() const { return steps_; }
  const SpanCache& cache() const { return cache_; }
  // Whether the program hands out hidden states.
  bool hidden_states() const { return heads_from_ > 0; }

 private:
  void allocate_cache(const CacheLimits& limits);
  void allocate_tensors(const std::vector<FusedOp>& ops);
  int max_rows(int tensor) const { return max_rows_of(program_.tensors()[tensor].rows); }
  int max_rows_of(int row_set) const;
  void check_experts() const;
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
  std::vector<std::shared_ptr<Routing>> routings_;
  std::vector<Tensor> tensors_;
  std::vector<Step> steps_;
  std::vector<Step*> needed_;  // of the step that runs
  size_t heads_from_ = 0;      // the steps from here on make logits, and draw; 0: unknown
  Drawn drawn_;
  bool profiling_ = false;
};

}  // namespace as
