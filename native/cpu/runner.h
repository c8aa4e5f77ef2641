// A program compiled for the CPUs of one rank: its bound ops and their memory.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cpu/ops/lora.h"
#include "cpu/ops/ops.h"
#include "program/fusion.h"

namespace as {

// The measured cost of an op.
struct Counters {
  int64_t count = 0;
  double total = 0, least = 0, most = 0;  // seconds on thread 0
  double bytes = 0, operations = 0;       // in total
};

// Size and type of the cache. The cache groups share its spans.
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
    double shares = 0;                   // seconds of its shares so far, in a step in parts
    const SpanLayout* layout = nullptr;  // of attention ops
  };

  // Throws std::invalid_argument naming what this backend does not support. Program and weights must outlive the
  // runner. fused: whether ops are fused (the bits are equal). masks: null, or the masks that rank 0 samples under.
  // adapters: the adapters of rows, if the program has lora ops. Both must outlive the runner.
  //
  // A program with lora ops is compiled twice. Steps without adapters run a form without these ops, with more fusion.
  CpuRunner(const Core& core, const Program& program, const Weights& weights, const RunnerLimits& limits,
            const CacheLimits& cache, bool fused, Masks* masks = nullptr, Adapters* adapters = nullptr);

  RunOutput run(const Batch& batch, bool want_logits) override;
  // Of a rank of experts: runs the layers from this one on.
  void run_experts(const Batch& batch, int layer);
  RunOutput run_part(const Batch& batch, int from, int to) override;
  int positions() const override { return (int)program_.ops().size() * kOpPositions; }
  // This draft head's program takes the hidden states that `model` keeps, and keeps its own beside them.
  void share_states(const CpuRunner& model) { states_ = model.states_; }
  void set_profiling(bool on);  // true: resets the counters; false: keeps them
  const std::vector<Step>& steps() const { return steps_; }
  const SpanCache& cache() const { return cache_; }
  // The spans that hold a slot's recurrent state; 0: the program has none, or no spans.
  int state_spans() const;
  // Whether the program outputs hidden states.
  bool hidden_states() const { return plain_.heads > 0; }

 private:
  // A form of the program: steps [begin, end). If no logits are wanted, only steps before `heads` run; 0: all run.
  struct Form {
    std::vector<FusedOp> ops;
    std::vector<Tensor> tensors;
    size_t begin = 0, end = 0, heads = 0;
  };
  // Sizes of the memory that the forms share.
  struct Needs {
    size_t activations = 0, attended = 0, gated = 0, converted = 0, widest = 0, lora = 0, indexed = 0;
  };
  void allocate_cache(const CacheLimits& limits);
  void allocate(const Needs& needs);
  std::vector<size_t> lay_out(Form& form, Needs& needs) const;
  void bind(Form& form, Masks* masks, const Adapters* adapters);
  int max_rows(int tensor) const { return max_rows_of(program_.tensors()[tensor].rows); }
  int max_rows_of(int row_set) const;
  void check_experts() const;
  Tensor bound(const Form& form, size_t op, size_t part, int tensor, bool output) const;
  const Packed* converted_for(const std::vector<FusedOp>& ops, size_t op, int tensor) const;
  void copy_states(const Batch& batch);
  int order_of(const Step& step) const;
  static double seen_by(const Item& item, const Slot& slot, const OpNode& attention);
  void begin(const Batch& batch, bool want_logits);
  void run_steps(const Batch& batch, bool shares, bool want_logits);
  void record(Step& step, const Batch& batch, const Share& share, double seconds) const;

  const Core core_;
  const Program& program_;
  const Weights& weights_;
  const RunnerLimits limits_;
  SpanCache cache_;
  Buffer activations_;
  Buffer attended_;  // attention's output in the format of the linear that reads it
  Scratch scratch_;
  SlotPagesOf slot_pages_;
  std::vector<std::shared_ptr<RotaryTable>> rotary_;
  std::vector<std::shared_ptr<AttentionWork>> attention_;
  std::vector<std::shared_ptr<Routing>> routings_;
  Adapters* adapters_ = nullptr;
  Form plain_, adapted_;
  std::vector<Step> steps_;
  std::vector<size_t> layers_;  // of a rank of experts: the step that begins each layer
  std::vector<Step*> needed_;   // of the current step
  struct Run {
    Step* step;
    Share share;
  };
  std::vector<Run> runs_;  // of the current step, or of a part of it
  const Form* form_ = nullptr;
  RunOutput output_;
  std::vector<float> own_states_;  // hidden states by place (batch/draft_head.h)
  float* states_ = nullptr;        // a draft head's are its model's
  bool profiling_ = false;
};

}  // namespace as
