// A program compiled for one GPU: a list of launches, and the memory that they work in.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "batch/batch.h"
#include "batch/logit_sampler.h"
#include "cuda/step_data.h"
#include "cuda/weights.h"
#include "program/program.h"

namespace as {
namespace cuda {

struct Limits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0;
  int span_size = 0, num_spans = 0;
  bool bf16_cache = false;
  bool graphs = true;  // steps that decode are replayed; the bits are the same
};

// Memory of a span of the cache, for one layer and KV head.
size_t span_bytes(int span_size, int head_dim, bool bf16);

class CudaRunner : public Runner {
 public:
  // Throws std::invalid_argument naming what this backend does not have. All that is given must outlive the runner.
  // Matrices of gates are paired (Weights::pair).
  CudaRunner(const Device& device, const Program& program, Weights& weights, const Limits& limits,
             LogitSampler& sampler, Masks* masks);
  ~CudaRunner() override;

  Drawn run(const Batch& batch, bool want_logits) override;
  size_t cache_bytes() const { return cache_.size(); }
  bool hidden_states() const { return heads_from_ > 0; }

 private:
  using Size = StepData::Size;
  using Launch = std::function<void(const Size&)>;
  struct Tensor {
    Rows rows;
    int row_set = 0;
    float* values() const { return rows.values; }
  };
  struct Replay {
    cudaGraphExec_t graph = nullptr;  // null: it has run once
  };

  void check_program() const;
  int count(const Tensor& t, const Size& size) const { return t.row_set == kOutputRows ? size.outputs : size.rows; }
  int max_rows(int tensor) const;
  bool in_tiles(int tensor) const;
  void allocate_tensors();
  void allocate_cache();
  const Tensor& in(const OpNode& op, int i = 0) const { return tensors_[op.inputs[i]]; }
  const Tensor& out(const OpNode& op) const { return tensors_[op.outputs.empty() ? op.inputs[0] : op.outputs[0]]; }
  const float* vector(const OpNode& op, int i) const {
    return i < (int)op.weights.size() ? weights_.vector(op.weights[i]) : nullptr;
  }
  // Adds what starts ops[i]; returns how many further ops it does, too.
  int bind(size_t i);
  int bind_linear(size_t i);
  void bind_attention(size_t i);
  int next_product(size_t i) const;
  Ahead ahead(int matrix, int rows) const;
  void bind_rotary_table(const OpNode& op);
  // The add, if any, that alone reads what ops[linear] makes, and comes next.
  std::optional<size_t> sum_after(size_t linear) const;
  bool is_gated(size_t linear) const;
  void copy_hidden(const Batch& batch);
  void launch(const Size& size, bool heads);
  void replay(const Size& size);
  bool decodes(const Batch& batch) const;
  std::vector<bool> drawn_by_device(const Batch& batch) const;
  void copy_logits(const Batch& batch, const std::vector<bool>& by_device, bool all);

  const Device& device_;
  const Program& program_;
  Weights& weights_;
  const Limits limits_;
  LogitSampler& sampler_;
  std::vector<Tensor> tensors_;
  Memory activations_, rotary_memory_, cache_, partials_, tiles_, best_, host_best_, host_logits_, host_hidden_;
  std::vector<LayerCache> layers_;
  std::map<int, RotaryTable> rotary_;
  std::optional<Turn> turn_;  // of the attention that comes next
  int group_ = 1, most_runs_ = 1;
  std::optional<StepData> data_;
  std::vector<Launch> launches_;
  size_t heads_from_ = 0;  // launches from here on make logits; 0: unknown
  int hidden_ = -1;        // the tensor of hidden states
  size_t hidden_rows_ = 0;
  std::map<Size, Replay> replays_;
};

}  // namespace cuda
}  // namespace as
