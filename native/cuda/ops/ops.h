// How ops of a program become launches. Each op's file implements this; a new op is one file, which registers itself.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/norm/norm.h"
#include "cuda/kernels/norm/vision.h"
#include "cuda/memory/exchange.h"
#include "cuda/workspace.h"

namespace as::cuda {

// One or more kernel launches of a step of this size.
using Launch = std::function<void(const Workspace::Size&)>;

// The other ranks of a group: their GPUs' memory, and the communicator of their processes.
struct Ranks {
  Exchange& exchange;
  Communicator& communicator;
};
// What ranks exchange to sample from logits of `width` columns on this rank; none if there is one rank.
std::optional<RankSamples> rank_samples(const Ranks* ranks, const Workspace& workspace, const OpNode& sample,
                                        int width);

// What ops use while one form of a program (with ops for adapters, or without) becomes launches.
struct Binding {
  using Size = Workspace::Size;

  // All references must outlive the binding; the workspace must outlive the launches. ranks: null if there is one rank.
  // paired: weights whose gate and up rows are interleaved; gated GEMMs add theirs to it.
  // queue: where the launches go.
  Binding(Workspace& workspace, Weights& weights, const Ranks* ranks, std::set<int>& paired, bool adapted,
          const Queue& queue);

  const Tensor& in(const OpNode& op, int i = 0) const { return workspace.tensors[op.inputs[i]]; }
  const Tensor& out(const OpNode& op) const {
    return workspace.tensors[op.outputs.empty() ? op.inputs[0] : op.outputs[0]];
  }
  // Null if the op has no such weight.
  const float* vector(const OpNode& op, int i) const {
    return i < (int)op.weights.size() ? weights.vector(op.weights[i]) : nullptr;
  }
  const Matrix& matrix(const OpNode& op) const { return weights.matrix(op.weights[0]); }
  // Refuses an op that writes another tensor than it reads.
  void check_in_place(const OpNode& op) const;

  // Adds launch(rows) for steps that have rows of the row set.
  template <typename F>
  void add_launch(int row_set, F launch) {
    launches.push_back([ws = &workspace, row_set, launch = std::move(launch)](const Size& size) mutable {
      if (const int rows = ws->rows_of(row_set, size)) launch(rows);
    });
  }

  Workspace& workspace;
  Weights& weights;
  const Ranks* const ranks;
  std::set<int>& paired;
  const Queue queue;
  const std::vector<OpNode> ops;  // of the form
  std::vector<Launch> launches;
  std::map<size_t, const GemmTable*> tables;  // of the linears, by op
  int hidden_tensor = -1;                     // -1: none
  size_t next_state = 0;                      // number of the next op with a state
  size_t heads_from = 0;                      // launches from this one on compute logits; 0: unknown

  // The number of the next sum over ranks, and how many sums a step makes. That is an even number, so that each sum
  // uses the same buffer in every step.
  int next_call = 0, calls = 0;
  // Tensors whose gate and up columns are interleaved, and the bias that must still be added.
  std::map<int, const float*> interleaved;
  // Work on heads that the next attention does: rotation, and before it the norms of queries and keys.
  std::optional<Rope> rope;
  std::optional<std::pair<HeadNorm, HeadNorm>> head_norms;
  // By tensor: the activation of its values that the next linear computes as it converts them to 16 bits.
  std::map<int, Activation> activations;
  std::set<int> tiled;    // tensors that the latest op wrote to Workspace::tiles, for the linear that follows
  bool deferred = false;  // the latest op left its work to a later one
  // By row set of experts: the tensor of weights that the router writes. `row`: what the kernels for a step of one row
  // need, if the router's layer has such kernels.
  struct Routed {
    int shares = -1;
    std::optional<ChosenRow> row;
    const float* rows = nullptr;  // that the logits are made of, if its launch makes them
  };
  std::map<int, Routed> routed;
  // Entries that the next sum with a shared expert adds, except in steps of one row if the layer has kernels for these;
  // and the combine_experts that left them. routed: the router's rows if the experts' kernels wait for the router
  // before they let others begin, or null.
  struct Unsummed {
    Combination sum;
    bool row;
    size_t op;
    const float* routed;
  };
  std::optional<Unsummed> unsummed;
  // Ops besides those of its own that the latest op's launches compute, if only in steps of one row.
  std::vector<size_t> also;
};

// Adds the launches of b.ops[i]. Returns how many of the following ops they also compute.
using Bind = int (*)(Binding& b, size_t i);

// How an op can write its output: as float32 rows; as 16-bit tiles, always or only if the cache has the same type; or
// as both at once.
enum class OutputForm { values, tiles, cache_type, both };
struct CudaOp {
  Bind bind = nullptr;
  OutputForm output = OutputForm::values;
};
// Throws std::invalid_argument for an op that the backend does not support.
const CudaOp& cuda_op(const OpNode& op);
struct RegisterCudaOp {
  RegisterCudaOp(Op op, Bind bind, OutputForm output = OutputForm::values);
};

// Attributes of ops as kernels take them.
Norm norm_of(const OpNode& op, const float* weight);
Gating gating_of(const OpNode& op);
Heads heads_of(const OpNode& op);

}  // namespace as::cuda
