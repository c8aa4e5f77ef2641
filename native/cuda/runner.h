// A program compiled for one GPU: a list of launches, and the memory that they work in.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "batch/logit_sampler.h"
#include "batch/queued_decoder.h"
#include "comm/communicator.h"
#include "cuda/adapters.h"
#include "cuda/draws.h"
#include "cuda/exchange.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/lora/lora.h"
#include "cuda/kernels/moe/moe.h"
#include "cuda/op_times.h"
#include "cuda/step_data.h"
#include "cuda/weights.h"
#include "program/program.h"

namespace as {
namespace cuda {

struct Limits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0;
  int span_size = 0, num_spans = 0;
  CacheType cache_type = CacheType::f32;
  Half cache_half = Half::bf16;  // of a cache of 16 bits
  bool graphs = true;            // steps that decode are replayed; the bits are the same
};

constexpr int kMostLaunchRows = 65535;  // of kernels that have a block of threads for each row

// Memory of a span of the cache, for one layer and KV head.
size_t span_bytes(int span_size, int head_dim, CacheType type);

// The other ranks of a group: what this GPU has of theirs, and how the processes tell each other what was drawn.
struct Ranks {
  Exchange& exchange;
  Communicator& window;
};
// Whether the ranks' parts of the sum that ops[all_reduce] makes are of 16 bits, else float32.
bool sums_in_halves(const std::vector<OpNode>& ops, const Weights& weights, size_t all_reduce);
// What an op's attributes say of its norm.
Norm norm_of(const OpNode& op, const float* weight);
Gating gating_of(const OpNode& op);
// Of the program's largest sum over ranks, in steps of so many rows: bytes of a rank's part.
size_t largest_partial(const Program& program, const Weights& weights, int max_rows);

class CudaRunner : public QueuedRunner {
 public:
  // Throws std::invalid_argument naming what this backend does not have. All that is given must outlive the runner.
  // Matrices of gates are paired (Weights::pair). ranks: null where there is one rank. adapters: that rows may have.
  //
  // A program with ops for adapters is compiled twice: steps in which no row has one run without these ops, and with
  // what is fused across them. A row without an adapter has the same bits in both.
  CudaRunner(const Device& device, const Program& program, Weights& weights, const Limits& limits,
             LogitSampler& sampler, Masks* masks, const Ranks* ranks = nullptr, const Adapters* adapters = nullptr);
  ~CudaRunner() override;

  void begin(const Batch& batch, bool want_logits) override;
  bool draw(const Batch& batch) override;
  bool done() const override;
  Drawn finish(const Batch& batch) override;
  size_t cache_bytes() const { return cache_.size() / (limits_.num_spans + 1) * limits_.num_spans; }
  const std::vector<LayerCache>& layers() const { return layers_; }
  // The memory that steps work in, and the cache, whose content is lost: given back, and had again, zeroed. Nothing on
  // the device may use them; recorded steps stay. load() throws std::runtime_error, and changes nothing, where there is
  // not enough.
  void unload();
  void load();
  // std::out_of_range for a row set that is not of experts.
  const Routing& routing(int row_set) const { return routed_.at(row_set).routing; }
  // Between steps. on: what launches cost is counted anew; off: what was counted stays.
  void set_profiling(bool on);
  std::vector<OpTime> profile() const { return times_.all(); }
  bool hidden_states() const { return forms_[0].heads_from > 0; }

 private:
  using Size = StepData::Size;
  using Launch = std::function<void(const Size&)>;
  struct Tensor {
    Rows rows;
    int row_set = 0;
    float* values() const { return rows.values; }
  };
  // Launches from heads_from on make logits; 0: unknown.
  struct Form {
    std::vector<Launch> launches;
    size_t heads_from = 0;
  };
  // Sums of gates and what they gate, as pair_rows() has the columns; bias: still to be added.
  struct Pairs {
    const float* bias;
  };
  struct Replay {
    cudaGraphExec_t graph = nullptr;  // null: it has run once
  };

  void check_program() const;
  // How many entries a row set has in a step of so many rows, so many of them with outputs.
  int rows_of(int row_set, int rows, int outputs) const;
  int count(const Tensor& t, const Size& size) const { return rows_of(t.row_set, size.rows, size.outputs); }
  int max_rows(int tensor) const;
  bool in_tiles(int tensor) const;
  bool in_both(int tensor) const;
  void allocate_tensors();
  void allocate_cache();
  const Tensor& in(const OpNode& op, int i = 0) const { return tensors_[op.inputs[i]]; }
  const Tensor& out(const OpNode& op) const { return tensors_[op.outputs.empty() ? op.inputs[0] : op.outputs[0]]; }
  const float* vector(const OpNode& op, int i) const {
    return i < (int)op.weights.size() ? weights_.vector(op.weights[i]) : nullptr;
  }
  std::vector<OpNode> ops_of(bool adapted) const;  // of a form
  void bind_form(bool adapted);
  void name_launches(size_t first, std::vector<int>& parts, std::vector<OpTime>& named) const;
  // Adds what starts ops_[i]; returns how many further ops it does, too.
  int bind(size_t i);
  // norms: whether ops_[i - 1], a norm, is started here, too.
  int bind_linear(size_t i, bool norms = false);
  int bind_lora(size_t i);
  void bind_attention(const OpNode& op);
  void allocate_routings();
  bool is_routing(int tensor) const;
  // Of a step of one row: whether ops_[router] begins a layer that has kernels for that; and whether ops_[norm] is made
  // with such a router's logits.
  bool has_row_kernels_at(size_t router) const;
  bool norms_with_router(size_t norm) const;
  Product logits_of(size_t linear) const;
  // logits: whether ops_[i - 1], the linear that makes them, is started here, too.
  void bind_router(size_t i, bool logits);
  int bind_expert_linear(size_t i);
  // last: of the ops that it does.
  Combination combination_at(size_t i, size_t& last) const;
  int bind_combine_experts(size_t i);
  int bind_all_reduce(size_t i);
  void bind_first_call();
  void bind_rotary_table(const OpNode& op);
  // Whether ops from `first` on read a tensor before one makes it anew.
  static bool read_from(const std::vector<OpNode>& ops, size_t first, int tensor);
  // The add, if any, that alone reads a tensor from ops_[next] on, and is that op.
  std::optional<size_t> sum_at(size_t next, int tensor) const;
  // Where what ops_[i] makes goes at once if the next op adds that up over ranks.
  std::optional<Rows> partial_of(size_t i) const;
  // And where it pushes that, of few rows; null if it does not.
  uint16_t* place_of(size_t i) const;
  bool is_gated(const std::vector<OpNode>& ops, size_t linear) const;
  // Whether ops_[rope] rotates all queries and keys of the next op, an attention; and whether ops_[norm] and the next
  // one norm all of an attention that comes then, and nobody else wants them.
  bool turns_in_attention(size_t rope) const;
  bool norms_in_attention(size_t norm) const;
  bool quantizes_next(size_t i) const;
  bool norms_for_next(size_t i) const;
  ByteRows byte_rows_of(const OpNode& linear) const;
  void copy_hidden(const Batch& batch);
  void launch(const Size& size, bool heads, bool timed = false);
  void add_times(const Batch& batch);
  void replay(const Size& size);
  void launch_instead(std::map<Size, Replay>::iterator replay, const Size& size);
  bool decodes(const Batch& batch) const;
  void share_draws(const Batch& batch);
  void copy_logits(const Batch& batch, bool all);
  void agree(std::vector<Best>& best) const;

  const Device& device_;
  const Program& program_;
  Weights& weights_;
  const Limits limits_;
  LogitSampler& sampler_;
  const std::optional<Ranks> ranks_;
  const Adapters* adapters_;
  const Half half_;                // of weights and activations of 16 bits
  int calls_ = 0, next_call_ = 0;  // sums over ranks: of a step, and those that are bound
  std::vector<Tensor> tensors_;
  Memory activations_, rotary_memory_, cache_, partials_, arrivals_, tiles_, widened_, byte_rows_, best_, host_best_,
      host_logits_, host_hidden_, inner_;
  Memory* const lent_[4] = {&activations_, &cache_, &partials_, &widened_};
  std::vector<LayerCache> layers_;
  std::map<int, RotaryTable> rotary_;
  // A row set of entries of experts: its routers form it one after the other.
  struct Routed {
    Routing routing;
    Kind kind;                     // of experts' matrices
    int shares;                    // the tensor of weights
    std::optional<ChosenRow> row;  // where the router's layer has kernels for a step of one
  };
  std::map<int, Routed> routed_;  // by row set
  std::vector<Memory> routing_memory_;
  // Of the attention that comes next: how heads are rotated, and before that normed, queries and keys.
  std::optional<Turn> turn_;
  std::optional<std::pair<HeadNorm, HeadNorm>> head_norms_;
  int group_ = 1, most_runs_ = 1;
  std::optional<StepData> data_;
  std::optional<Draws> draws_;     // none: of a part of the vocabulary
  std::vector<DrawnBy> drawn_by_;  // of each output of the step
  Form forms_[2];                  // without adapters, and with
  // Of the form that is being bound: its ops, and what they have become so far.
  std::vector<OpNode> ops_;
  std::vector<Launch> launches_;
  size_t heads_from_ = 0;
  std::map<int, Pairs> pairs_;  // by tensor
  std::set<int> paired_;        // weights
  int hidden_ = -1;             // the tensor of hidden states
  size_t hidden_rows_ = 0;
  struct Step {
    bool heads, want_logits;  // heads: whether it comes to logits
    bool timed = false;
    int form = 0;
    int turn = 0;  // of times
  };
  Step begun_{}, drawing_{};
  cudaEvent_t drawn_ = nullptr;  // what a step draws has been copied
  OpTimes times_;
  bool profiling_ = false;
  std::map<Size, Replay> replays_;
  bool graphs_ = true;  // there is memory for more
};

}  // namespace cuda
}  // namespace as
