#include "cuda/workspace.h"

#include <algorithm>
#include <climits>
#include <set>
#include <stdexcept>

#include "batch/draft_head.h"
#include "cuda/kernels/attention/indexer.h"
#include "cuda/kernels/common/shared_limit.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/sampling/argmax.h"
#include "cuda/ops/fusion.h"
#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

constexpr size_t kAlign = 1024;  // bytes: alignment of tensors

bool is_gemm(const OpNode& op) { return op.is(Op::linear) || op.is(Op::expert_linear); }

}  // namespace

void refuse(const std::string& feature) { throw std::invalid_argument("the CUDA backend has no " + feature); }

static RowNeeds needs_of(const Program& program, const Limits& limits) {
  RowNeeds needs;
  needs.given = limits.given;
  int latents = 0;
  for (const OpNode& op : program.ops()) {
    if (op.is(Op::rotary_table))
      needs.places |= op.integer("temporal") + op.integer("height") + op.integer("width") > 0;
    if (op.is(Op::grid_embedding)) needs.places = true;
    if (op.is(Op::position_embedding) && op.weights.size() > 1) {
      if (needs.separator >= 0 && needs.separator != op.integer("separator"))
        refuse("ops position_embedding with several separators");
      needs.separator = op.integer("separator");
    }
    if (op.is(Op::keep_hidden)) needs.keeps = true;
    if (op.is(Op::kept_hidden)) needs.takes = true;
    if (op.is(Op::causal_conv) || op.is(Op::gated_delta) || op.is(Op::ssd)) needs.states = true;
    if (op.is(Op::indexer) || op.is(Op::compress)) needs.indexed = true;
    if (op.is(Op::dispatch_rows)) needs.sends = true;
    if (op.is(Op::compressed_attention)) {
      const ListShape shape = list_shape(program, op);
      if (std::find(needs.lists.begin(), needs.lists.end(), shape) == needs.lists.end()) needs.lists.push_back(shape);
    }
    if (!needs.lists.empty() && (op.is(Op::latent_attention) || op.is(Op::span_attention)))
      refuse(std::string("op ") + op.spec->name + " beside attention over compressed positions");
    if (op.is(Op::latent_attention)) {
      const int selected = op.inputs.size() > 3 ? program.tensors()[op.inputs[3]].width : 0;
      if (latents++ && selected != needs.selected) refuse("layers that see different numbers of selected positions");
      needs.selected = selected;
    }
    if (!op.is(Op::span_attention)) continue;
    needs.whole |= op.flag("bidirectional"), needs.segments |= op.flag("segments"), needs.images |= op.flag("images");
  }
  if (needs.whole && needs.images) refuse("op span_attention of images beside one in both directions");
  if (needs.separator >= 0 && !needs.whole)
    refuse("op position_embedding with a table of segments beside attention in one direction");
  needs.places |= needs.whole;
  return needs;
}

ListShape list_shape(const Program& program, const OpNode& op) {
  return {op.integer("window"), op.integer("rate"), op.inputs.size() > 2 ? program.tensors()[op.inputs[2]].width : 0};
}

const OpNode& keeper_of(const Program& program, const OpNode& attention) {
  if (attention.is(Op::latent_attention) || attention.integer("kv_heads")) return attention;
  for (const OpNode& op : program.ops())
    if (op.is(Op::span_attention) && op.integer("kv_heads") &&
        op.integer("cache_group") == attention.integer("cache_group") &&
        op.integer("layer") == attention.integer("layer"))
      return op;
  throw std::invalid_argument("op span_attention: no op keeps the keys and values that it reads");
}

int group_of(const Program& program, const OpNode& attention) {
  return attention.is(Op::latent_attention) || attention.is(Op::compressed_attention)
             ? LatentHeads(latent_heads(program, attention)).group
             : shared_heads(keeper_of(program, attention)).group;
}

// The cache of an op with attention, without memory. Throws std::invalid_argument for sizes that no kernel supports.
static LayerCache layer_of(const Program& program, const OpNode& op, const Limits& limits) {
  const bool latent = op.is(Op::latent_attention);
  LayerCache layer{nullptr, limits.cache_type, limits.span_size, 0, 0, 0};
  layer.head_dim = op.integer(latent ? "latent_dim" : "head_dim"), layer.dtype = limits.cache_dtype;
  if (latent) layer.rope_dim = op.integer("rope_dim"), layer.rows = true;
  layer.kv_heads = latent ? LatentHeads(latent_heads(program, op)).tiles : op.integer("kv_heads");
  const int row = layer.head_dim + layer.rope_dim, most = latent ? kLargestRow : kLargestHead;
  layer.padded_dim = (row + 7) / 8 * 8;
  if (!latent && op.flag("bidirectional") && layer.type == CacheType::dtype16) {
    layer.padded_dim = padded_head(row);
    layer.padded = row > 32 && layer.padded_dim != row;
  }
  if (row > most)
    refuse((latent ? "latents with rotated keys, together of " : "heads of ") + std::to_string(row) +
           " features, at most " + std::to_string(most));
  if (latent && layer.bits() < 16) refuse("latent attention with a cache of 8 or 4 bits");
  return layer;
}

int latent_heads(const Program& program, const OpNode& op) {
  return program.tensors()[op.outputs[0]].width /
         (op.is(Op::latent_attention) ? op.integer("latent_dim") : program.in(op, 1).width);
}

size_t span_bytes(int span_size, int head_dim, CacheType type, bool whole) {
  const bool pads = whole && type == CacheType::dtype16;
  LayerCache one{nullptr, type, span_size, 1, head_dim, pads ? padded_head(head_dim) : (head_dim + 7) / 8 * 8};
  return one.span_bytes();
}

size_t latent_span_bytes(int span_size, int latent_dim, int rope_dim, CacheType type) {
  LayerCache one{nullptr, type, span_size, 1, latent_dim, (latent_dim + rope_dim + 7) / 8 * 8};
  one.rope_dim = rope_dim, one.rows = true;
  return one.span_bytes();
}

static LayerCache index_cache(int span_size, int dim, CacheType type) {
  LayerCache keys{nullptr, type, span_size, 1, dim, (dim + 7) / 8 * 8};
  keys.rows = true;
  if (keys.bits() < 16) refuse("op indexer with a cache of 8 or 4 bits");
  return keys;
}

size_t index_span_bytes(int span_size, int dim, CacheType type) {
  return index_cache(span_size, dim, type).span_bytes();
}

// Rows of attention over compressed positions.
static LayerCache row_cache(int rows, int features, CacheType type) {
  LayerCache cache{nullptr, type, rows, 1, features, (features + 7) / 8 * 8};
  cache.rows = true;
  if (cache.bits() < 16) refuse("attention over compressed positions with a cache of 8 or 4 bits");
  return cache;
}

SharedHeads shared_heads(const OpNode& op) {
  const int q_heads = op.integer("q_heads"), kv_heads = op.integer("kv_heads"), group = op.integer("group");
  const int first = op.integer("q_head_begin") - op.integer("kv_begin") * group;
  if (group < 1 || kv_heads < 1 || first < 0 || first >= group || first + q_heads > kv_heads * group)
    throw std::invalid_argument("op span_attention: " + std::to_string(q_heads) + " query heads from " +
                                std::to_string(op.integer("q_head_begin")) + " on do not belong to " +
                                std::to_string(kv_heads) + " KV heads from " + std::to_string(op.integer("kv_begin")) +
                                " on, of " + std::to_string(group) + " each");
  return kv_heads == 1 ? SharedHeads{q_heads, 0} : SharedHeads{group, first};
}

DeltaShape delta_shape(const Program& program, const OpNode& op) {
  const auto width = [&](int tensor) { return program.tensors()[tensor].width; };
  DeltaShape shape;
  const bool delta = op.is(Op::gated_delta);
  shape.key = op.integer(delta ? "key_dim" : "state_dim"), shape.value = op.integer(delta ? "value_dim" : "head_dim");
  shape.heads = width(op.outputs[0]) / shape.value;
  shape.key_heads = (width(op.inputs[0]) - width(op.outputs[0])) / (2 * shape.key);
  shape.channels = delta && op.flag("channels");
  if (shape.key > kMostKeyDim)
    refuse(std::string("op ") + op.spec->name + " with " + (delta ? "key heads" : "states") + " of " +
           std::to_string(shape.key) + " features, at most " + std::to_string(kMostKeyDim));
  if (shape.channels && (int)channel_delta_shared(shape) > max_shared())
    refuse("op gated_delta with a decay for each of " + std::to_string(shape.key) +
           " channels on chips with so little shared memory");
  return shape;
}

static int most_seen_of(const RowNeeds& needs, int max_length) {
  if (needs.lists.empty()) return max_length;
  int most = 0;
  for (const ListShape& shape : needs.lists) most = std::max(most, shape.length(max_length));
  return most;
}

Workspace::Workspace(const Device& device, const Program& program, const Weights& weights, const Limits& limits,
                     const Adapters* adapters, ExpertRanks* experts)
    : device(device),
      program(program),
      weights(weights),
      limits(limits),
      adapters(adapters),
      dtype(weights.dtype()),
      needs(needs_of(program, limits)),
      most_seen(most_seen_of(needs, limits.max_length)),
      max_splits((most_seen + kKvSplitTokens - 1) / kKvSplitTokens),
      experts(experts),
      kernels(device.chip(dtype)) {
  check_limits();
  if (adapters && adapters->limits.is_dtype16 && adapters->limits.type != dtype)
    refuse("adapters of another 16-bit type than the weights");
  device.use();
  allocate_tensors();
  allocate_scratch();
  allocate_cache();
  allocate_states();
  if (needs.keeps && !needs.takes) allocate_hidden();
  data.emplace(limits.max_rows, limits.max_outputs, limits.max_slots,
               (limits.max_length + limits.span_size - 1) / limits.span_size, limits.span_size,
               TileLimits{groups.empty() ? 1 : groups.front(), groups.size() > 1 ? groups.back() : 0, kv_heads,
                          device.sm_count(), max_kv_splits_, limits.short_chunks},
               program.windows(), limits.num_spans, needs);
  argmax = Memory((size_t)limits.max_outputs * kArgmaxParts * sizeof(Argmax), "argmaxes");
  allocate_expert_rows();
  allocate_dispatched();
}

void Workspace::check_limits() const {
  const Limits& l = limits;
  if (l.max_rows < 1 || l.max_outputs < 1 || l.max_slots < 1 || l.max_length < 1 || l.num_spans < 1)
    throw std::invalid_argument("allocate: sizes must be positive");
  if (std::max(l.max_rows, l.max_outputs) > kMaxLaunchRows)
    refuse("steps of more than " + std::to_string(kMaxLaunchRows) + " rows");
  if (l.span_size != 16 && l.span_size != 32 && l.span_size != 64 && l.span_size != 128)
    throw std::invalid_argument("span size must be 16, 32, 64 or 128, got " + std::to_string(l.span_size));
  if ((int64_t)l.num_spans * l.span_size > kLargestCount * 64ll)
    throw std::invalid_argument("a cache of " + std::to_string(l.num_spans) + " spans is too large");
  if (program.ops().empty() || !program.ops().back().is(needs.whole ? Op::hidden_states : Op::sample))
    throw std::invalid_argument(
        "the op list must end with sample or, with attention in both directions, hidden_states");
  for (const CacheGroup& group : program.cache_groups())
    if (group.kind != CacheKind::full && group.kind != CacheKind::sliding && group.kind != CacheKind::latent)
      refuse(std::string("cache group of kind ") + name_of(group.kind));
  for (const TensorSpec& tensor : program.tensors())
    if (tensor.type != TensorType::float32) refuse(std::string("tensors of ") + name_of(tensor.type));
}

void Workspace::give_back() {
  for (Memory* memory : lent_) memory->give_back();
}

void Workspace::take_again() {
  try {
    for (Memory* memory : lent_) memory->take_again();
  } catch (...) {
    give_back();
    throw;
  }
  for (Memory* memory : lent_)
    if (memory->lent()) check(cudaMemsetAsync(memory->as(), 0, memory->size(), device.stream()), "clearing memory");
  device.wait();
}

int Workspace::rows_of(int row_set, int rows, int outputs) const {
  if (row_set == kAllRows) return rows;
  if (row_set == kOutputRows) return outputs;
  const RowSet& formed = program.row_sets()[row_set];
  return formed.times * rows_of(formed.of, rows, outputs);
}

int Workspace::max_rows(int tensor) const {
  return rows_of(program.tensors()[tensor].rows, limits.max_rows, limits.max_outputs);
}

// Whether a tensor is stored in 16 bits only: its readers are GEMMs that take 16-bit rows, or select rows for such
// GEMMs, and its writers can round. So are the entries of experts in 16 bits or less, since a row has many of them.
bool Workspace::is_tiled(int tensor) const {
  bool read = false;
  for (const OpNode& op : program.ops()) {
    // Adapters read both types, and expert_lora adds to both.
    if (op.adapts() && (op.inputs[0] != tensor || op.is(Op::expert_lora))) continue;
    if (op.is(Op::select_rows) && op.inputs[0] == tensor && is_tiled(op.outputs[0])) {
      read = true;
    } else if (op.is(Op::combine_experts) && op.inputs[0] == tensor) {
      read = true;
    } else if (has(op.inputs, tensor)) {
      if (!is_gemm(op) || !weights.matrix(op.weights[0]).reads_tiles()) return false;
      read = true;
    }
    if (!has(op.outputs, tensor)) continue;
    const bool entries = op.is(Op::expert_linear) && weights.matrix(op.weights[0]).reads_tiles();
    const OutputForm output = entries ? OutputForm::tiles : cuda_op(op).output;
    if (output == OutputForm::values || (output == OutputForm::cache_type && limits.cache_dtype != dtype)) return false;
  }
  return read;
}

// Whether a tensor is stored both as float32 and in 16 bits: GEMMs of both types read it, and a norm writes it.
bool Workspace::is_both(int tensor) const {
  bool tiles = false, values = false;
  for (const OpNode& op : program.ops()) {
    if (op.adapts() && op.inputs[0] != tensor) continue;  // these ops read both types
    if (has(op.outputs, tensor) && cuda_op(op).output != OutputForm::both) return false;
    if (has(op.inputs, tensor)) (is_gemm(op) && weights.matrix(op.weights[0]).reads_tiles() ? tiles : values) = true;
  }
  return tiles && values;
}

void Workspace::allocate_tensors() {
  const auto& specs = program.tensors();
  size_t bytes = 0;
  std::vector<size_t> offsets, both_offsets;
  for (int t = 0; t < (int)specs.size(); t++) {
    offsets.push_back(bytes);
    // With adapters, gate and up columns may be interleaved and padded (pair_rows()).
    const int width = adapters ? std::max(specs[t].width, paired_rows(specs[t].width)) : specs[t].width;
    const size_t need =
        is_tiled(t) ? tiles_bytes(max_rows(t), specs[t].width) : (size_t)max_rows(t) * width * sizeof(float);
    bytes += (need + kAlign - 1) / kAlign * kAlign;
    both_offsets.push_back(bytes);
    if (is_both(t)) bytes += tiles_bytes(max_rows(t), specs[t].width);
  }
  activations = Memory(bytes, "activations", Memory::Where::lent);
  for (int t = 0; t < (int)specs.size(); t++) {
    Tensor tensor{{nullptr, nullptr, specs[t].width, dtype}, specs[t].rows};
    char* data = activations.as() + offsets[t];
    if (is_tiled(t)) tensor.rows.tiles = reinterpret_cast<uint16_t*>(data);
    else tensor.rows.values = reinterpret_cast<float*>(data);
    if (is_both(t)) tensor.rows.tiles = reinterpret_cast<uint16_t*>(activations.as() + both_offsets[t]);
    tensors.push_back(tensor);
  }
}

// Scratch memory that ops share. Each buffer has the size of the op that needs most.
void Workspace::allocate_scratch() {
  size_t tables = 0, tiled = 0, wide = 0, bytes = 0, lora = 0;
  const auto in = [&](const OpNode& op, int i) -> const Tensor& { return tensors[op.inputs[i]]; };
  for (const OpNode& op : program.ops())
    if (op.is(Op::lora) && adapters)
      lora = std::max(lora, (size_t)max_rows(op.inputs[0]) * kMaxTargets *
                                lora_k_parts(in(op, 1).rows.width, adapters->limits.is_dtype16) *
                                whole_ranks(adapters->limits.max_rank));
    else if (op.is(Op::expert_lora) && adapters)
      lora = std::max(lora, (size_t)max_rows(op.inputs[0]) * whole_ranks(adapters->limits.max_rank));
  const std::vector<OpNode> ops = ops_of(program, false);
  for (size_t i = 0; i < ops.size(); i++) {
    const OpNode& op = ops[i];
    if (op.is(Op::rotary_table)) tables += (size_t)limits.max_rows * op.integer("rotary_dim") * sizeof(float);
    if (is_gemm(op) && weights.matrix(op.weights[0]).takes_tiles() &&
        (!in(op, 0).rows.tiles || weights.matrix(op.weights[0]).order))
      tiled = std::max(tiled, tiles_bytes(max_rows(op.inputs[0]), in(op, 0).rows.width));
    if (!is_gemm(op)) continue;
    const Matrix& w = weights.matrix(op.weights[0]);
    if (w.takes_bytes()) bytes = std::max(bytes, byte_rows_bytes(max_rows(op.inputs[0]), w.k));
    if (!op.is(Op::linear) || w.kind != Kind::quantized) continue;
    const bool gated = is_gated(ops, weights, i);
    wide = std::max(wide, widened_bytes(gated ? paired_rows(w.n) : w.n, w.k, gated, max_rows(op.inputs[0])));
  }
  rotary = Memory(tables, "rotary tables");
  tiles = Memory(tiled, "activations of 16 bits");
  widened = Memory(wide, "widened weights", Memory::Where::lent);
  inner = Memory(lora * sizeof(float), "adapters' products");
  byte_rows = Memory(bytes, "quantized activations");
}

// Adds a layer of a cache group, if no op before this one has.
void Workspace::keep_layer(const OpNode& op, int group, int number, LayerCache layer) {
  if (layer.type != CacheType::f32) layer.dtype = limits.cache_dtype;
  const LayerCache& same = caches_.emplace(std::pair(group, number), layer).first->second;
  if (same.head_dim != layer.head_dim || same.kv_heads != layer.kv_heads || same.rope_dim != layer.rope_dim)
    throw std::invalid_argument(std::string("op ") + op.spec->name + ": layer " + std::to_string(number) +
                                " of cache group " + std::to_string(group) + " is of another size before");
}

void Workspace::allocate_cache() {
  size_t partial = 0;
  bool scores = false;  // of indexers
  for (const OpNode& op : program.ops()) {
    const auto keep = [&](const char* group, const char* number, const LayerCache& layer) {
      keep_layer(op, op.integer(group), op.integer(number), layer);
    };
    if (op.is(Op::compress)) {
      keep("rows_group", "rows_layer", row_cache(limits.span_size, program.in(op).width, CacheType::f32));
      keep("cache_group", "layer",
           row_cache(entries_of_span(limits.span_size, op.integer("rate")),
                     program.in(op).width / (op.flag("overlapping") ? 4 : 2), limits.cache_type));
    }
    if (op.is(Op::indexer)) {
      scores = true;
      if (!op.integer("rate"))
        keep("cache_group", "layer", index_cache(limits.span_size, program.in(op, 2).width, limits.cache_type));
    }
    const bool lists = op.is(Op::compressed_attention);
    if (!lists && !op.is(Op::latent_attention) && !op.is(Op::span_attention)) continue;
    if (const int group = group_of(program, op); std::find(groups.begin(), groups.end(), group) == groups.end())
      groups.push_back(group);
    if (op.is(Op::span_attention) && !op.integer("kv_heads")) continue;  // it reads an earlier op's
    LayerCache layer =
        lists ? row_cache(limits.span_size, program.in(op, 1).width, limits.cache_type) : layer_of(program, op, limits);
    if (lists && layer.head_dim > kLargestRow)
      refuse("compressed positions of " + std::to_string(layer.head_dim) + " features, at most " +
             std::to_string(kLargestRow));
    if (lists) layer.kv_heads = LatentHeads(latent_heads(program, op)).tiles;
    keep("cache_group", "layer", layer);
    partial = std::max(partial, partial_floats(layer.head_dim) * layer.kv_heads);
    kv_heads = std::max(kv_heads, layer.kv_heads);
  }
  std::map<int, size_t> taken;  // bytes of a span, by cache group
  std::set<size_t> sizes;       // of layers
  int layers = 0;               // most of a cache group
  for (const auto& [place, layer] : caches_) {
    taken[place.first] += layer.span_bytes(), layers = std::max(layers, place.second + 1);
    sizes.insert(layer.span_bytes());
  }
  if (groups.size() > 2) refuse("layers of more than two numbers of query heads to a KV head");
  std::sort(groups.rbegin(), groups.rend());
  // One extra span of zeros replaces the spans that a sliding window has left. Its positions have weight zero.
  const size_t count = limits.num_spans + (size_t)1;
  size_t bytes = 0;  // of a span
  for (const auto& [group, size] : taken) bytes = std::max(bytes, size);
  cache = Memory(bytes * count, "the KV cache", Memory::Where::lent);
  // Layers of one size have their spans by themselves. Of layers of several sizes, cache groups hold unlike numbers: a
  // span is one range of memory, its group's layers one after the other.
  const size_t each = sizes.size() == 1 ? *sizes.begin() : 0;
  for (int i = 0; i < (each ? layers : bytes ? 1 : 0); i++)
    spans.push_back({cache.as() + i * each * count, each ? each : bytes});
  taken.clear();
  for (auto& [place, layer] : caches_) {
    if (each && layers * each != bytes)
      throw std::invalid_argument("op of attention: layer " + std::to_string(place.second) + " of a model with " +
                                  std::to_string(caches_.size()));
    size_t& offset = taken[place.first];
    layer.data = each ? spans[place.second].data : cache.as() + offset;
    layer.stride = each ? each : bytes, offset += layer.span_bytes();
  }
  if (needs.whole) partial = 0;  // all rows are in prefill tiles
  // Rows with lists have a tile each, drafts too.
  const int tiles = std::min(limits.max_rows, limits.max_slots + (needs.lists.empty() ? 0 : kMostDrafts));
  max_kv_splits_ = needs.whole ? 0 : most_kv_splits(tiles, most_seen, partial * sizeof(float), limits.partial_bytes);
  partials = Memory(partial * max_kv_splits_ * sizeof(float), "partial results of attention", Memory::Where::lent);
  arrivals = Memory((size_t)limits.max_rows * kv_heads * sizeof(int), "partial results of attention");
  if (scores)
    index_scores = Memory(indexer_bytes(limits.max_rows, limits.max_length, limits.partial_bytes),
                          "an indexer's scores", Memory::Where::lent);
}

void Workspace::allocate_states() {
  size_t bytes = 0, rows = 0;
  for (const OpNode& op : program.ops()) {
    if (!op.is(Op::causal_conv) && !op.is(Op::gated_delta) && !op.is(Op::ssd)) continue;
    StatePages pages;
    if (op.is(Op::causal_conv)) {
      pages.bytes = causal_conv_bytes(tensors[op.inputs[0]].rows.width, op.integer("taps"));
    } else {
      const DeltaShape shape = delta_shape(program, op);
      pages.bytes = gated_delta_bytes(shape),
      rows = std::max(rows, gated_delta_scratch(shape, limits.max_rows, limits.max_slots));
    }
    state_pages.push_back(pages);
    bytes += (pages.bytes.state + pages.bytes.recent) * limits.max_slots;
  }
  states = Memory(bytes, "recurrent states", Memory::Where::lent);
  delta_rows = Memory(rows, "products of keys and queries", Memory::Where::lent);
  char* next = states.as();
  for (StatePages& pages : state_pages)
    pages.data = next, next += (pages.bytes.state + pages.bytes.recent) * limits.max_slots;
}

void Workspace::allocate_hidden() {
  size_t width = 0;
  for (const OpNode& op : program.ops())
    if (op.is(Op::keep_hidden)) width = program.in(op).width;
  own_hidden = Memory(DraftHead::places(limits.max_rows, limits.max_slots, limits.draft_layers) * width * sizeof(float),
                      "hidden states", Memory::Where::lent);
  hidden = own_hidden.as<float>();
}

// Of rows whose experts other ranks compute: the choices, which the first two arrays of a Routing hold.
void Workspace::allocate_dispatched() {
  for (const OpNode& op : program.ops()) {
    if (!op.is(Op::dispatch_rows)) continue;
    const auto [found, first] = dispatched.try_emplace(tensors[op.inputs[1]].row_set);
    if (!first) continue;
    Routing& routing = found->second;
    const RowSet& formed = program.row_sets()[found->first];
    const int rows = rows_of(formed.of, limits.max_rows, limits.max_outputs);
    routing.top = formed.times;
    routing_memory_.emplace_back(routing_bytes(rows, routing.top, 1), "choices of experts");
    place_routing(routing_memory_.back().as(), rows, 1, routing);
  }
}

void Workspace::allocate_expert_rows() {
  for (const OpNode& op : program.ops()) {
    if (!op.is(Op::expert_linear)) continue;
    const int set = tensors[op.outputs[0]].row_set, begin = op.integer("expert_begin");
    const int end = begin + op.integer("experts");
    const Matrix& m = weights.matrix(op.weights[0]);
    if (m.experts != end - begin)
      throw std::invalid_argument("op expert_linear is for " + std::to_string(end - begin) + " experts, weight " +
                                  std::to_string(op.weights[0]) + " has " + std::to_string(m.experts));
    if (m.takes_bytes() && (m.quants.bits != 8 || device.capability() != 90))
      refuse("experts of type " + format_of(m) + (m.quants.bits != 8 ? "" : " on a GPU other than Hopper") +
             ": float32, bfloat16, float16, int8, int4 and mxfp4 are available, and on Hopper w8a8 and float8");
    if (m.reads_tiles() && tiles_bytes(max_rows(op.inputs[0]), m.k) > INT_MAX)  // kernels use 32-bit byte offsets
      refuse("steps of so many rows of experts: lower max_step_tokens");
    const auto [found, first] = expert_rows.try_emplace(set, ExpertRows{{}, m.kind});
    Routing& routing = found->second.routing;
    if (!first && (routing.begin != begin || routing.end != end))
      refuse("expert_linear of other experts than those before");
    if (!first && found->second.kind != m.kind) refuse("experts of several types in a layer");
    routing.begin = begin, routing.end = end;
  }
  for (auto& [set, entries] : expert_rows) {
    const RowSet& formed = program.row_sets()[set];
    const int rows = rows_of(formed.of, limits.max_rows, limits.max_outputs);
    Routing& routing = entries.routing;
    if ((int64_t)rows * formed.times > kLargestCount) refuse("steps of so many rows of experts");
    if (entries.kind == Kind::f32 && rows * formed.times > kMaxLaunchRows)
      refuse("steps of more than " + std::to_string(kMaxLaunchRows) + " rows of experts in float32");
    routing.top = formed.times;
    const int experts = routing.end - routing.begin;
    routing_memory_.emplace_back(routing_bytes(rows, routing.top, experts), "rows of experts");
    place_routing(routing_memory_.back().as(), rows, experts, routing);
  }
  for (const OpNode& op : program.ops())
    if (op.is(Op::linear) && weights.matrix(op.weights[0]).experts != 1)
      throw std::invalid_argument("op linear: weight " + std::to_string(op.weights[0]) + " is a stack of experts");
}

}  // namespace as::cuda
