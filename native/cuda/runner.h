// Runs the steps of a program that was compiled for one GPU: launches its kernels or replays them as CUDA graphs, and
// samples.
#pragma once
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "batch/logit_sampler.h"
#include "batch/queued_decoder.h"
#include "cuda/ops/ops.h"
#include "cuda/step/device_sampler.h"
#include "cuda/step/graphs.h"
#include "cuda/step/op_times.h"
#include "cuda/step/states.h"
#include "cuda/step/warm_up.h"

namespace as::cuda {

class CudaRunner : public QueuedRunner {
 public:
  // Throws std::invalid_argument that names what this backend does not support. All arguments must outlive the runner,
  // except `ranks`, which is null if there is one rank. Gate and up rows of gated matrices are interleaved
  // (Weights::pair). adapters: null, or the adapters that rows may use. experts: null, or the ranks of experts.
  //
  // A program with ops for adapters is compiled in two forms. Steps in which no row has an adapter run without these
  // ops and with more fusion. A row without an adapter gets the same bits in both.
  CudaRunner(const Device& device, const Program& program, Weights& weights, const Limits& limits,
             LogitSampler& sampler, Masks* masks, const Ranks* ranks = nullptr, const Adapters* adapters = nullptr,
             ExpertRanks* experts = nullptr);
  ~CudaRunner() override;

  void begin(const Batch& batch, bool want_logits) override;
  void begin_part(const Batch& batch, int from, int to) override;
  int positions() const override { return (int)program_.ops().size() * kOpPositions; }
  bool sample(const Batch& batch) override;
  bool done() const override;
  RunOutput finish(const Batch& batch) override;
  size_t cache_bytes() const { return workspace_.cache_bytes(); }
  const std::vector<SpanRange>& spans() const { return workspace_.spans; }
  // unload() frees the large buffers; load() allocates them again, zeroed. No work on the device may use them; recorded
  // graphs stay. load() throws std::runtime_error, and changes nothing, if memory runs out.
  void unload() { workspace_.give_back(); }
  void load() { workspace_.take_again(); }
  // Runs up to `count` more of the steps that load all kernels and record the graphs of all sizes, so that no request
  // waits for that; their rows are stored nowhere. Returns how many of them have run, of how many. Between steps; with
  // several ranks all of them call it at once, with the same count.
  std::pair<int, int> warm_up(int count);
  // What its rows need; which rows and places plans may give depends on it.
  const RowNeeds& needs() const { return workspace_.needs; }
  // Throws std::out_of_range for a row set that is not of experts.
  const Routing& routing(int row_set) const { return workspace_.expert_rows.at(row_set).routing; }
  std::vector<KernelTable::Row> kernels() const { return workspace_.kernels.rows(); }
  // Only between steps. on: starts counting anew; off: keeps the counts.
  void set_profiling(bool on);
  std::vector<OpTime> profile() const { return times_.all(); }
  // This draft head's program takes the hidden states that `model` keeps, and keeps its own beside them.
  void share_hidden(const CudaRunner& model) { workspace_.hidden = model.workspace_.hidden; }
  bool hidden_states() const { return forms_[0].heads_from > 0; }
  // The spans that hold a slot's recurrent state; 0: the program has none.
  int state_spans() const { return states_ ? states_->spans() : 0; }

 private:
  using Size = Workspace::Size;
  // Launches from heads_from on compute logits; 0: unknown.
  struct Form {
    std::vector<Launch> launches;
    size_t heads_from = 0;
    std::vector<int> orders;  // of each launch: the op by whose position it belongs to a part of a step
  };

  void compile(bool adapted);
  OpTime timed(const std::vector<int>& ops, size_t launches) const;
  const Tensor& logits() const { return workspace_.tensors[program_.ops().back().inputs[0]]; }  // if it samples
  void copy_hidden(const Batch& batch);
  void launch(const Size& size, bool heads, bool timed = false, bool beside = false);
  void add_times(const Batch& batch);
  bool pads(const Batch& batch) const;
  bool streams(const Size& size) const;
  void assign_samples(const Batch& batch);
  void copy_logits(const Batch& batch, bool all);

  const Device& device_;
  const Program& program_;
  Weights& weights_;
  const Limits limits_;
  LogitSampler& sampler_;
  const std::optional<Ranks> ranks_;
  Workspace workspace_;
  std::optional<States> states_;  // none if no op has a state
  Form forms_[2];                 // without adapters, and with adapters
  std::set<int> paired_;          // weights whose gate and up rows are interleaved
  int hidden_ = -1;               // the tensor of hidden states; -1: none
  size_t hidden_rows_ = 0;
  std::vector<float> hidden_values_;  // of the step's result
  Memory host_argmax_, host_logits_, host_hidden_;
  std::optional<DeviceSampler> device_sampler_;
  std::vector<SampledBy> sampled_by_;  // of each output of the step
  struct Step {
    bool heads, want_logits;  // heads: whether the step computes logits
    bool timed = false;
    int form = 0;
    int turn = 0;  // turn of times_
  };
  Step begun_{}, sampling_{};
  Size part_size_;                 // of the step that runs in parts
  cudaEvent_t sampled_ = nullptr;  // recorded when a step's samples have been copied
  OpTimes times_;
  bool profiling_ = false;
  bool beside_ = false;  // the step's launches may run beside others (ops/aside.h)
  StepGraphs graphs_;
  std::vector<Size> warm_sizes_;  // of the steps of warm_up()
  int warmed_ = 0;                // how many of them have run
};

}  // namespace as::cuda
