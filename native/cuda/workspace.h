// The memory that a program's steps use on one GPU: its tensors, the KV cache and scratch memory.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "batch/state_positions.h"
#include "cuda/kernel_choice.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/moe/moe.h"
#include "cuda/kernels/recurrent/recurrent.h"
#include "cuda/memory/expert_memory.h"
#include "cuda/step/step_data.h"
#include "cuda/weights/adapters.h"
#include "cuda/weights/weights.h"
#include "program/program.h"

namespace as::cuda {

struct Limits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0;
  int span_size = 0, num_spans = 0;
  CacheType cache_type = CacheType::f32;
  DType16 cache_dtype = DType16::bf16;   // of a 16-bit cache
  bool graphs = true;                    // replay decode steps as CUDA graphs; the bits are the same
  size_t partial_bytes = kPartialBytes;  // most memory for attention's partial results, and for an indexer's scores
  ShortChunks short_chunks = ShortChunks::fastest;
  int draft_layers = 1;  // of the draft head, if there is one
  int given = 0;         // not 0: plans may give rows; of a workspace, their width

  // Of a step that is padded: a row of each sequence, and drafts.
  int most_padded_rows() const { return std::min({max_rows, max_outputs, max_slots + kMostDrafts}); }
};

constexpr int kMaxLaunchRows = 65535;  // of kernels with one CTA per row

// Throws std::invalid_argument: the CUDA backend has no `feature`.
[[noreturn]] void refuse(const std::string& feature);

// Bytes of a span of the cache, for one layer and KV head.
// whole: of a program with attention in both directions.
size_t span_bytes(int span_size, int head_dim, CacheType type, bool whole = false);
// Bytes of a span of a latent cache, for one layer; rope_dim 0: of other rows that are key and value at once.
size_t latent_span_bytes(int span_size, int latent_dim, int rope_dim, CacheType type);
// Bytes of a span of an indexer's keys, for one layer, beside a cache of that type.
size_t index_span_bytes(int span_size, int dim, CacheType type);

// This rank's query heads of a latent_attention op, or of a compressed_attention op.
int latent_heads(const Program& program, const OpNode& op);
// What a row sees in a compressed_attention op.
ListShape list_shape(const Program& program, const OpNode& op);

// Query heads per KV head, and how many of the first KV head's query heads belong to other ranks. A rank may share its
// first and last KV head with its neighbours. With a single KV head only the rank's own query heads count.
struct SharedHeads {
  int group, first;
};
SharedHeads shared_heads(const OpNode& attention);
// The op that writes the keys and values which a span_attention reads: itself, unless it has queries alone.
const OpNode& keeper_of(const Program& program, const OpNode& attention);
// Query heads to a KV head as kernels see them: of the tiles of query heads in latent attention.
int group_of(const Program& program, const OpNode& attention);

// The heads of a gated_delta or ssd op. Throws std::invalid_argument if the backend does not support them.
DeltaShape delta_shape(const Program& program, const OpNode& op);

// A tensor of the program.
struct Tensor {
  Rows rows;
  int row_set = 0;
  float* values() const { return rows.values; }
};

// A row set of expert entries. Its routers fill it in turn.
struct ExpertRows {
  Routing routing;
  Kind kind;  // of the experts' matrices
};

class Workspace {
 public:
  using Size = StepData::Size;

  // Throws std::invalid_argument that names what the backend does not support, and std::runtime_error if memory runs
  // out. All references must outlive the workspace. adapters: null, or the adapters that rows may use. experts: null,
  // or the ranks of experts.
  Workspace(const Device& device, const Program& program, const Weights& weights, const Limits& limits,
            const Adapters* adapters, ExpertRanks* experts = nullptr);

  // The number of entries of a row set in a step with so many rows and outputs.
  int rows_of(int row_set, int rows, int outputs) const;
  int rows_of(int row_set, const Size& size) const { return rows_of(row_set, size.rows, size.outputs); }
  int max_rows(int tensor) const;
  bool samples() const { return program.ops().back().is(Op::sample); }
  // The cache of an op with attention.
  const LayerCache& cache_of(const OpNode& op) const {
    return cache_at(op.integer("cache_group"), op.integer("layer"));
  }
  const LayerCache& cache_at(int group, int layer) const { return caches_.at({group, layer}); }
  EntryCache entries_of(int group, int layer, int rate) const {
    return {cache_at(group, layer), rate, limits.span_size};
  }
  // The number of a list shape among those of the step's rows.
  int list_of(const ListShape& shape) const {
    return (int)(std::find(needs.lists.begin(), needs.lists.end(), shape) - needs.lists.begin());
  }
  // Whether an op's prefill tiles are those of the smaller group.
  bool is_narrow(const OpNode& op) const { return group_of(program, op) != groups.front(); }
  // Bytes of the whole cache except the span of zeros.
  size_t cache_bytes() const { return cache.size() / (limits.num_spans + 1) * limits.num_spans; }

  // give_back() frees the large buffers while no step runs. take_again() allocates them again, zeroed. It throws
  // std::runtime_error, and changes nothing, if memory runs out.
  void give_back();
  void take_again();

  const Device& device;
  const Program& program;
  const Weights& weights;
  const Limits limits;
  const Adapters* const adapters;
  const DType16 dtype;  // of 16-bit weights and activations
  const RowNeeds needs;
  const int most_seen;                    // positions, or places of a list, that a row sees at most
  const int max_splits;                   // KV splits of these
  std::vector<Tensor> tensors;            // of the program
  std::vector<SpanRange> spans;           // the cache
  std::vector<StatePages> state_pages;    // of the ops with a state, in their order
  std::vector<int> groups;                // of all layers (group_of()): one, or two, the larger one first
  int kv_heads = 1;                       // most KV heads of a layer
  std::map<int, ExpertRows> expert_rows;  // by row set
  std::map<int, Routing> dispatched;      // by row set: the choices that are sent to ranks of experts
  ExpertRanks* const experts;             // null: none
  KernelTable kernels;
  std::map<int, RotaryTable> rotary_tables;  // by number
  std::optional<StepData> data;
  Memory activations, rotary, cache, partials, arrivals, tiles, widened, byte_rows, argmax, inner, states, delta_rows,
      own_hidden, index_scores;
  float* hidden = nullptr;  // hidden states by place (batch/draft_head.h): own_hidden, a draft head's are its model's

 private:
  void check_limits() const;
  bool is_tiled(int tensor) const;
  bool is_both(int tensor) const;
  void allocate_tensors();
  void allocate_scratch();
  void keep_layer(const OpNode& op, int group, int number, LayerCache layer);
  void allocate_cache();
  void allocate_expert_rows();
  void allocate_dispatched();
  void allocate_states();
  void allocate_hidden();

  int max_kv_splits_ = 0;                             // of all decode tiles of a step
  std::map<std::pair<int, int>, LayerCache> caches_;  // by cache group and layer; groups share the spans
  std::vector<Memory> routing_memory_;
  Memory* const lent_[8] = {&activations, &cache,      &partials,   &widened,
                            &states,      &delta_rows, &own_hidden, &index_scores};
};

}  // namespace as::cuda
