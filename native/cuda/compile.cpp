// From a program to launches: CudaRunner's constructor.
#include <algorithm>
#include <stdexcept>

#include "cuda/runner.h"

namespace as {
namespace cuda {
namespace {

constexpr const char* kName = "the CUDA backend";

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(std::string(kName) + " has no " + what);
}

// Query heads of a KV head, and how many of the first one's other ranks have. A rank's first and last KV head may be
// shared with its neighbours; of a single one only the rank's own query heads count.
struct SharedHeads {
  int group, first;
};
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

Heads heads_of(const OpNode& op) { return {op.integer("offset"), op.integer("heads"), op.integer("head_dim")}; }

}  // namespace

Norm norm_of(const OpNode& op, const float* weight) {
  return {weight, (float)op.number("eps"), op.flag("unit_offset")};
}

Gating gating_of(const OpNode& op) {
  if (!op.is("clamped_silu_mul")) return {};
  return {(float)op.number("alpha"), (float)op.number("limit"), 1};
}

size_t span_bytes(int span_size, int head_dim, CacheType type) {
  LayerCache one{nullptr, type, span_size, 1, head_dim, (head_dim + 7) / 8 * 8};
  return one.span_bytes();
}

// They are wherever weights are: what products read is rounded as much, and float32 would be twice the traffic, 5 % of
// a step from 128 rows on. (With two ranks at 1,024 rows 49 us against 27, at 1 row 3.6 us either way.)
bool sums_in_halves(const std::vector<OpNode>& ops, const Weights& weights, size_t all_reduce) {
  size_t before = all_reduce;
  while (before && ops[before - 1].is("lora")) before--;  // these add to what there is
  if (!before) return false;
  const OpNode* maker = &ops[before - 1];
  if (maker->is("combine_experts"))
    for (size_t i = before - 1; i-- > 0 && !maker->is("expert_linear");)
      if (has(ops[i].outputs, maker->inputs[0])) maker = &ops[i];
  return (maker->is("linear") || maker->is("embedding") || maker->is("expert_linear")) &&
         !weights.matrix(maker->weights[0]).values;
}

size_t largest_partial(const Program& program, const Weights& weights, int max_rows) {
  size_t most = 0;
  for (size_t i = 0; i < program.ops().size(); i++) {
    const OpNode& op = program.ops()[i];
    if (op.is("all_reduce"))
      most = std::max(most, partial_bytes(max_rows, program.in(op).width, sums_in_halves(program.ops(), weights, i)));
  }
  return most;
}

CudaRunner::CudaRunner(const Device& device, const Program& program, Weights& weights, const Limits& limits,
                       LogitSampler& sampler, Masks* masks, const Ranks* ranks, const Adapters* adapters)
    : device_(device),
      program_(program),
      weights_(weights),
      limits_(limits),
      sampler_(sampler),
      ranks_(ranks ? std::optional<Ranks>(*ranks) : std::nullopt),
      adapters_(adapters),
      half_(weights.half()),
      times_(program) {
  check_program();
  if (adapters && adapters->limits.halves && adapters->limits.type != half_)
    refuse("adapters of another type of 16 bits than the weights");
  device_.use();
  most_runs_ = (limits.max_length + kRunTokens - 1) / kRunTokens;
  allocate_tensors();
  allocate_cache();
  data_.emplace(limits.max_rows, limits.max_outputs, limits.max_slots,
                (limits.max_length + limits.span_size - 1) / limits.span_size, limits.span_size, group_,
                program.windows(), limits.num_spans);
  best_ = Memory((size_t)limits.max_outputs * kBestParts * sizeof(Best), "draws");
  allocate_routings();
  bind_form(false);
  if (adapters_ && adapters_->targets()) bind_form(true);
  const OpNode& sample = program.ops().back();
  const int width = in(sample).rows.width;
  const size_t outputs = limits.max_outputs;
  host_best_ = Memory(best_.size(), "draws", Memory::Where::host);
  host_logits_ = Memory(outputs * width * sizeof(float), "logits", Memory::Where::host);
  if (width == sample.integer("vocab_size"))
    draws_.emplace(device_, in(sample).values(), best_.as<Best>(), width, (int)outputs, masks);
  sampler_.attach(sample, host_logits_.as<float>(), width, (int)outputs, masks);
}

void CudaRunner::check_program() const {
  const Limits& l = limits_;
  if (l.max_rows < 1 || l.max_outputs < 1 || l.max_slots < 1 || l.max_length < 1 || l.num_spans < 1)
    throw std::invalid_argument("allocate: sizes must be positive");
  if (std::max(l.max_rows, l.max_outputs) > kMostLaunchRows)
    refuse("steps of more than " + std::to_string(kMostLaunchRows) + " rows");
  if (l.span_size != 16 && l.span_size != 32 && l.span_size != 64 && l.span_size != 128)
    throw std::invalid_argument("span size must be 16, 32, 64 or 128, got " + std::to_string(l.span_size));
  if ((int64_t)l.num_spans * l.span_size > kLargestCount * 64ll)
    throw std::invalid_argument("a cache of " + std::to_string(l.num_spans) + " spans is too large");
  if (program_.ops().empty() || !program_.ops().back().is("sample"))
    throw std::invalid_argument("the op list must end with sample");
  for (const CacheGroup& group : program_.cache_groups())
    if (group.kind != CacheKind::full && group.kind != CacheKind::sliding)
      refuse(std::string("cache group of kind ") + name_of(group.kind));
  for (const TensorSpec& tensor : program_.tensors())
    if (tensor.type != TensorType::float32) refuse(std::string("tensors of ") + name_of(tensor.type));
}

void CudaRunner::allocate_cache() {
  std::map<int, LayerCache> layers;
  // One more, of zeros: it stands for those that windows have left behind. What is read there has weight zero.
  const size_t spans = limits_.num_spans + (size_t)1;
  size_t bytes = 0, partials = 0;
  int groups = 0, most_heads = 0;
  for (const OpNode& op : program_.ops()) {
    if (!op.is("span_attention")) continue;
    LayerCache layer{nullptr, limits_.cache_type, limits_.span_size, op.integer("kv_heads"), op.integer("head_dim"), 0};
    layer.padded_dim = (layer.head_dim + 7) / 8 * 8, layer.half = limits_.cache_half;
    if (layer.head_dim > kLargestHead)
      refuse("heads of " + std::to_string(layer.head_dim) + " features, at most " + std::to_string(kLargestHead));
    const int group = shared_heads(op).group;
    if (groups++ && group != group_) refuse("layers of different numbers of query heads to a KV head");
    group_ = group;
    const auto [same, fresh] = layers.emplace(op.integer("layer"), layer);  // cache groups share the spans
    if (same->second.head_dim != layer.head_dim || same->second.kv_heads != layer.kv_heads)
      throw std::invalid_argument("op span_attention: layer " + std::to_string(op.integer("layer")) +
                                  " is of another size in another cache group");
    if (fresh) bytes += layer.span_bytes() * spans;
    partials = std::max(partials, partial_floats(layer.head_dim) * layer.kv_heads);
    most_heads = std::max(most_heads, layer.kv_heads);
  }
  cache_ = Memory(bytes, "the KV cache", Memory::Where::lent);
  char* next = cache_.as();
  for (auto& [index, layer] : layers) {
    if (index != (int)layers_.size())
      throw std::invalid_argument("op span_attention: layer " + std::to_string(index) + " of a model with " +
                                  std::to_string(layers.size()));
    layer.data = next, next += layer.span_bytes() * spans;
    layers_.push_back(layer);
  }
  const int few = std::min(limits_.max_rows, limits_.max_slots);  // tiles of a step: a sequence has one at most
  partials_ = Memory(partials * few * most_runs_ * sizeof(float), "partial results of attention", Memory::Where::lent);
  arrivals_ = Memory(few * most_heads * sizeof(int), "partial results of attention");
}

int CudaRunner::bind(size_t i) {
  const OpNode& op = ops_[i];
  const Queue queue = device_.queue();
  const auto add_launch = [&](Launch launch, int row_set) {
    launches_.push_back([this, launch = std::move(launch), row_set](const Size& size) {
      if (rows_of(row_set, size.rows, size.outputs)) launch(size);
    });
  };
  if (op.is("linear")) return bind_linear(i);
  if (norms_for_next(i)) return bind_linear(i + 1, true) + 1;
  if (quantizes_next(i)) {
    const OpNode& after = ops_[i + 2];
    if (after.is("lora") && after.inputs[1] == op.outputs[0])  // it wants normed rows, too
      add_launch([=, x = in(op), y = out(op), norm = norm_of(op, vector(op, 0))](
                     const Size& size) { rms_norm(x.values(), norm, count(x, size), y.rows, queue); },
                 in(op).row_set);
    return bind_linear(i + 1, true) + 1;
  }
  if (op.is("lora")) return bind_lora(i);
  if (op.is("span_attention")) return bind_attention(op), 0;
  if (op.is("router")) return bind_router(i, false), 0;
  if (op.is("expert_linear")) return bind_expert_linear(i);
  if (op.is("combine_experts")) return bind_combine_experts(i);
  if (op.is("rotary_table")) return bind_rotary_table(op), 0;
  if (op.is("all_reduce")) return bind_all_reduce(i);
  if (op.is("sample")) return 0;
  if (op.is("hidden_states")) {
    hidden_ = op.inputs[0], heads_from_ = launches_.size();
    host_hidden_ =
        Memory((size_t)limits_.max_outputs * in(op).rows.width * sizeof(float), "hidden states", Memory::Where::host);
    return 0;
  }
  if (op.is("embedding")) {
    const Rows y = partial_of(i).value_or(out(op).rows);
    add_launch([=, table = weights_.matrix(op.weights[0]), begin = op.integer("vocab_begin"),
                factor = (float)op.number("scale"), data = &*data_, drawn = best_.as<Best>()](
                   const Size& size) { embed(table, data->tokens(), drawn, size.rows, begin, factor, y, queue); },
               kAllRows);
    return 0;
  }
  const Tensor x = in(op), y = out(op);
  if (op.is("rms_norm") && norms_with_router(i)) {
    add_launch(
        [=, norm = norm_of(op, vector(op, 0))](const Size& size) {
          if (const int rows = count(x, size); rows > 1) rms_norm(x.values(), norm, rows, y.rows, queue);
        },
        x.row_set);
  } else if (op.is("rms_norm")) {
    add_launch([=, norm = norm_of(op, vector(op, 0))](
                   const Size& size) { rms_norm(x.values(), norm, count(x, size), y.rows, queue); },
               x.row_set);
  } else if (op.is("silu_mul")) {
    const auto pairs = pairs_.find(op.inputs[0]);
    if (pairs == pairs_.end())
      add_launch([=](const Size& size) { silu_mul(x.values(), {}, count(x, size), y.rows, queue); }, x.row_set);
    else
      add_launch([=, bias = pairs->second.bias](
                     const Size& size) { silu_mul_pairs(x.values(), bias, count(x, size), y.rows, queue); },
                 x.row_set);
  } else if (op.is("clamped_silu_mul")) {
    add_launch(
        [=, gating = gating_of(op)](const Size& size) { silu_mul(x.values(), gating, count(x, size), y.rows, queue); },
        x.row_set);
  } else if (op.is("gelu_tanh_mul")) {
    add_launch([=](const Size& size) { gelu_tanh_mul(x.values(), count(x, size), y.rows, queue); }, x.row_set);
  } else if (op.is("soft_cap")) {
    if (y.values() != x.values()) refuse("op soft_cap into another tensor");
    add_launch([=, cap = (float)op.number("cap")](
                   const Size& size) { soft_cap(x.values(), cap, (size_t)count(x, size) * x.rows.width, queue); },
               x.row_set);
  } else if (op.is("qk_square_sums")) {
    add_launch(
        [=, columns = QkColumns{op.integer("q_columns"), op.integer("k_offset"), op.integer("k_columns")}](
            const Size& size) { qk_square_sums(x.values(), x.rows.width, columns, count(x, size), y.values(), queue); },
        x.row_set);
  } else if (op.is("qk_norm")) {
    if (y.values() != x.values()) refuse("op qk_norm into another tensor");
    const QkNorm norm{vector(op, 0),         vector(op, 1),         op.integer("q_columns"), op.integer("k_columns"),
                      op.integer("q_width"), op.integer("k_width"), (float)op.number("eps")};
    add_launch([=, sums = in(op, 1).values()](
                   const Size& size) { qk_norm(x.values(), x.rows.width, norm, sums, count(x, size), queue); },
               x.row_set);
  } else if (op.is("add") || op.is("scale")) {
    if (y.values() != x.values()) refuse(std::string("op ") + op.spec->name + " into another tensor");
    if (op.is("add"))
      add_launch(
          [=, other = in(op, 1)](const Size& size) {
            add(x.values(), other.values(), (size_t)count(x, size) * x.rows.width, queue);
          },
          x.row_set);
    else
      add_launch([=, factor = (float)op.number("factor")](
                     const Size& size) { scale(x.values(), factor, (size_t)count(x, size) * x.rows.width, queue); },
                 x.row_set);
  } else if (op.is("sigmoid_mul")) {
    if (y.values() != x.values()) refuse("op sigmoid_mul into another tensor");
    add_launch([=, gate = in(op, 1)](
                   const Size& size) { sigmoid_mul(x.values(), gate.values(), count(x, size), x.rows.width, queue); },
               x.row_set);
  } else if (op.is("select_rows")) {
    add_launch(
        [=, data = &*data_](const Size& size) { select_rows(x.values(), data->chosen(), size.outputs, y.rows, queue); },
        kOutputRows);
  } else if (op.is("head_norm")) {
    if (y.values() != x.values()) refuse("op head_norm into another tensor");
    const auto norm_at = [&](const OpNode& norm) { return HeadNorm{heads_of(norm), norm_of(norm, vector(norm, 0))}; };
    const OpNode& next = ops_[i + 1];  // that of keys after that of queries
    const auto end = [](const OpNode& norm) {
      return norm.integer("offset") + norm.integer("heads") * norm.integer("head_dim");
    };
    const bool both = next.is("head_norm") && next.inputs[0] == op.inputs[0] && out(next).values() == y.values() &&
                      (end(op) <= next.integer("offset") || end(next) <= op.integer("offset"));
    if (both && norms_in_attention(i)) {
      head_norms_ = {norm_at(op), norm_at(next)};
      return 1;
    }
    add_launch([=, first = norm_at(op), second = both ? norm_at(next) : HeadNorm{}](
                   const Size& size) { head_norm(x.values(), x.rows.width, first, second, count(x, size), queue); },
               x.row_set);
    return both;
  } else if (op.is("rope")) {
    if (y.values() != x.values()) refuse("op rope into another tensor");
    const auto table = rotary_.find(op.integer("table"));
    if (table == rotary_.end()) throw std::invalid_argument("no rotary table " + std::to_string(op.integer("table")));
    const Turn turn{table->second, std::string(op.choice("pairs")) == "interleaved"};
    if (turns_in_attention(i)) {
      turn_ = turn;  // heads are rotated as they enter the cache
      return 0;
    }
    add_launch(
        [=, t = table->second, heads = heads_of(op), interleaved = std::string(op.choice("pairs")) == "interleaved"](
            const Size& size) { rope(x.values(), x.rows.width, heads, t, interleaved, size.rows, queue); },
        kAllRows);
  } else {
    refuse(std::string("op ") + op.spec->name);
  }
  return 0;
}

bool CudaRunner::turns_in_attention(size_t i) const {
  const OpNode &op = ops_[i], &next = ops_[i + 1];
  return op.is("rope") && next.is("span_attention") && next.inputs[0] == op.inputs[0] && !op.integer("offset") &&
         op.integer("head_dim") == next.integer("head_dim") &&
         op.integer("heads") == next.integer("q_heads") + next.integer("kv_heads");
}

bool CudaRunner::norms_in_attention(size_t i) const {
  const OpNode &queries = ops_[i], &keys = ops_[i + 1];
  const size_t at = turns_in_attention(i + 2) ? i + 3 : i + 2;
  if (at + 1 >= ops_.size()) return false;
  const OpNode& attention = ops_[at];
  const auto norms = [&](const OpNode& op, int first, int count) {
    const int dim = attention.integer("head_dim");
    return op.inputs[0] == attention.inputs[0] && op.integer("head_dim") == dim &&
           op.integer("offset") == first * dim && op.integer("heads") == count;
  };
  return attention.is("span_attention") && norms(queries, 0, attention.integer("q_heads")) &&
         norms(keys, attention.integer("q_heads"), attention.integer("kv_heads")) && !attention.number("logn") &&
         !read_from(ops_, at + 1, attention.inputs[0]);
}

bool CudaRunner::read_from(const std::vector<OpNode>& ops, size_t first, int tensor) {
  for (size_t i = first; i < ops.size(); i++) {
    if (has(ops[i].inputs, tensor)) return true;
    if (has(ops[i].outputs, tensor)) return false;
  }
  return false;
}

std::optional<size_t> CudaRunner::sum_at(size_t next, int tensor) const {
  const OpNode& op = ops_[next];
  if (!op.is("add") || op.inputs[1] != tensor || op.inputs[0] == tensor) return {};
  if (out(op).values() != in(op).values() || read_from(ops_, next + 1, tensor)) return {};
  return next;
}

// A step makes an even number of calls, so that each has the same buffer in every step: the first may have nothing to
// add up.
void CudaRunner::bind_first_call() {
  const auto& ops = ops_;
  next_call_ = 0;
  calls_ = (int)std::count_if(ops.begin(), ops.end(), [](const OpNode& op) { return op.is("all_reduce"); });
  if (calls_ % 2 == 0) return;
  calls_++, next_call_++;
  RankSum nothing;
  nothing.peers = ranks_->exchange.peers(), nothing.peers.step = data_->step(), nothing.calls = calls_;
  launches_.push_back([=, queue = device_.queue()](const Size&) { sum_ranks(nothing, 0, queue); });
}

std::optional<Rows> CudaRunner::partial_of(size_t i) const {
  const OpNode &op = ops_[i], &next = ops_[i + 1];
  if (!ranks_ || !next.is("all_reduce") || next.inputs[0] != op.outputs[0]) return {};
  return ranks_->exchange.partial(next_call_, out(op).rows.width, sums_in_halves(ops_, weights_, i + 1), half_);
}

uint16_t* CudaRunner::place_of(size_t i) const {
  if (!ops_[i].is("linear")) return nullptr;
  const Matrix& m = weights_.matrix(ops_[i].weights[0]);
  const std::optional<Rows> partial = partial_of(i);
  if (!partial || m.kind != Kind::half || m.most_pieces == 1) return nullptr;
  return ranks_->exchange.place(next_call_, partial->width);
}

// The sum, what it is added to, and its norm, where these come next.
int CudaRunner::bind_all_reduce(size_t i) {
  const auto& ops = ops_;
  const OpNode& op = ops[i];
  const int tensor = op.inputs[0];
  if (!op.outputs.empty() && op.outputs[0] != tensor) refuse("all_reduce into another tensor");
  if (!ranks_) return 0;
  const Tensor x = in(op);
  size_t last = i;
  RankSum sum;
  sum.peers = ranks_->exchange.peers(), sum.peers.step = data_->step();
  sum.call = next_call_, sum.calls = calls_, sum.halves = sums_in_halves(ops_, weights_, i), sum.half = half_;
  int into = tensor;
  if (sum_at(i + 1, tensor)) last = i + 1, into = ops[last].inputs[0], sum.adds = true;
  sum.y = tensors_[into].rows;
  if (const OpNode& next = ops[last + 1]; next.is("rms_norm") && next.inputs[0] == into && next.outputs[0] != into)
    last++, sum.norm = norm_of(next, vector(next, 0)), sum.normed = out(next).rows;
  const bool there = i > 0 && !ops[i - 1].outputs.empty() && ops[i - 1].outputs[0] == tensor &&
                     (ops[i - 1].is("linear") || ops[i - 1].is("embedding") || ops[i - 1].is("combine_experts"));
  sum.on_its_way = there && place_of(i - 1);
  const Rows partial = ranks_->exchange.partial(next_call_++, x.rows.width, sum.halves, half_);
  launches_.push_back([=, queue = device_.queue()](const Size& size) {
    const int rows = count(x, size);
    if (!there && rows) to_tiles(x.values(), rows, partial, queue);
    sum_ranks(sum, rows, queue);
  });
  return (int)(last - i);
}

// Whether ops[linear] makes gates and what they gate for the next op alone.
bool CudaRunner::is_gated(const std::vector<OpNode>& ops, size_t linear) const {
  const OpNode &op = ops[linear], &next = ops[linear + 1];
  const int made = op.outputs[0];
  const bool gates = next.is("silu_mul") || (next.is("clamped_silu_mul") && op.is("expert_linear"));
  if (!gates || next.inputs[0] != made || weights_.matrix(op.weights[0]).kind == Kind::f32) return false;
  for (size_t i = 0; i < ops.size(); i++)  // nobody else wants the matrix as it is
    if (i != linear && has(ops[i].weights, op.weights[0])) return false;
  return !read_from(ops, linear + 2, made);
}

// Whether what ops[i], a norm, makes is activations of 8 bits for the next op alone.
bool CudaRunner::quantizes_next(size_t i) const {
  const auto& ops = ops_;
  const OpNode &op = ops[i], &next = ops[i + 1];
  if (ranks_ || !op.is("rms_norm") || !next.is("linear")) return false;  // of several ranks sum_ranks() norms
  const int made = op.outputs[0];
  if (next.inputs[0] != made || made == op.inputs[0] || !norms_into_bytes(in(op).rows.width) ||
      !weights_.matrix(next.weights[0]).takes_bytes())
    return false;
  for (size_t later = i + 2; later < ops.size(); later++) {
    if (ops[later].is("lora")) continue;  // or rows without an adapter would have other bits beside rows with one
    if (has(ops[later].inputs, made)) return false;
    if (has(ops[later].outputs, made)) break;
  }
  return true;
}

// Whether what ops[i], a norm, makes is for the next op alone, and that may norm a step's one row itself.
bool CudaRunner::norms_for_next(size_t i) const {
  const OpNode& op = ops_[i];
  if (!op.is("rms_norm") || !ops_[i + 1].is("linear")) return false;
  const OpNode& next = ops_[i + 1];
  const int made = op.outputs[0];
  return next.inputs[0] == made && made != op.inputs[0] && weights_.matrix(next.weights[0]).takes_tiles() &&
         !read_from(ops_, i + 2, made);
}

ByteRows CudaRunner::byte_rows_of(const OpNode& linear) const {
  return byte_rows(byte_rows_.as(), max_rows(linear.inputs[0]), weights_.matrix(linear.weights[0]).k);
}

int CudaRunner::bind_linear(size_t i, bool norms) {
  const OpNode& op = ops_[i];
  const Tensor x = in(op);
  const Queue queue = device_.queue();
  const OpNode& next = ops_[i + 1];
  if (next.is("router") && next.inputs[0] == op.outputs[0] && has_few_columns(weights_.matrix(op.weights[0])))
    return bind_router(i + 1, true), 1;
  const std::optional<size_t> sum = sum_at(i + (!ranks_ && ops_[i + 1].is("all_reduce") ? 2 : 1), op.outputs[0]);
  const bool gated = is_gated(ops_, i);
  if (gated && paired_.insert(op.weights[0]).second) weights_.pair(op.weights[0]);
  Product p;
  p.w = weights_.matrix(op.weights[0]), p.bias = vector(op, 1), p.adds = sum.has_value(), p.gated = gated;
  p.x = x.rows;
  p.y = sum ? in(ops_[*sum]).rows : partial_of(i).value_or(out(ops_[gated ? i + 1 : i]).rows);
  if (!gated && paired_.count(op.weights[0])) {  // adapters add to what gates, before it does
    pairs_[op.outputs[0]] = {p.bias};
    p.bias = nullptr, p.y.width = p.w.n;
  }
  if (p.w.kind == Kind::codes) p.widened = widened_.as<uint16_t>();
  if (p.w.takes_bytes()) p.bytes = byte_rows_of(op);
  const bool converts = p.w.takes_tiles() && !x.rows.tiles;
  if (converts) p.x = {nullptr, tiles_.as<uint16_t>(), x.rows.width, half_};
  const bool takes_bytes = p.w.takes_bytes();
  const bool few = has_few_columns(p.w) && is_routing(op.outputs[0]);
  Product norming = p;
  if (norms) norming.unnormed = in(ops_[i - 1]).values(), norming.norm = norm_of(ops_[i - 1], vector(ops_[i - 1], 0));
  const bool in_place = norms && norming.unnormed == p.y.values;  // who norms a row reads it while others write theirs
  uint16_t* const place = sum ? nullptr : place_of(i);
  launches_.push_back([=](const Size& size) mutable {
    const int rows = count(x, size);
    if (!rows) return;
    if (takes_bytes) {
      if (rows == 1 && !in_place && linear_byte_row(norming, queue)) return;
      if (norms) rms_norm_into_bytes(norming.unnormed, norming.norm, p, rows, queue);
      else quantize_activations(p, rows, queue);
    } else if (norms) {
      if (!in_place && linear_quantized_norms(norming, rows, queue)) return linear_quantized(norming, rows, queue);
      if (!in_place && linear_half_norms(norming, rows, queue)) return linear_half(norming, rows, queue);
      rms_norm(norming.unnormed, norming.norm, rows, x.rows, queue);
    }
    p.y.copy = rows <= kPushedRows ? place : nullptr;
    if (converts) to_tiles(x.values(), rows, p.x, queue);
    if (few) linear_few(p, rows, queue);
    else if (p.w.kind == Kind::f32) linear_f32(p, rows, queue);
    else if (p.w.kind == Kind::half) linear_half(p, rows, queue);
    else if (p.w.kind == Kind::integers) linear_integer(p, rows, queue);
    else if (p.w.kind == Kind::float8) linear_float8(p, rows, queue);
    else linear_quantized(p, rows, queue);
  });
  return sum ? (int)(*sum - i) : gated;
}

void CudaRunner::bind_attention(const OpNode& op) {
  op.allow_only({"layer", "head_dim", "group", "scale", "cache_group", "window", "soft_cap", "q_heads", "kv_heads",
                 "q_head_begin", "kv_begin", "sinks", "alibi", "logn"},
                kName);
  Attention a;
  a.cache = layers_.at(op.integer("layer")), a.group = group_;
  a.first = shared_heads(op).first, a.queries = op.integer("q_heads");
  a.scale = (float)op.number("scale"), a.soft_cap = (float)op.number("soft_cap"), a.window = op.integer("window");
  a.qkv = in(op).values(), a.width = in(op).rows.width, a.out = out(op).rows;
  a.tables = data_->tables(op.integer("cache_group")), a.partials = partials_.as<float>(), a.most_runs = most_runs_;
  a.arrivals = arrivals_.as<int>();
  if (op.flag("sinks")) a.sinks = vector(op, 0);
  if (op.flag("alibi")) a.slopes = vector(op, op.flag("sinks"));
  const double logn = op.number("logn");
  const std::optional<Turn> turn = turn_;
  const std::optional<std::pair<HeadNorm, HeadNorm>> norms = head_norms_;
  turn_.reset(), head_norms_.reset();
  Attention whole = a;
  if (norms) whole.query_norm = norms->first.norm, whole.key_norm = norms->second.norm;
  const int* where = data_->where(op.integer("cache_group"));
  const int at_once = a.cache.type == CacheType::half ? 2 : 3;  // blocks of threads that attend on a processor
  const int wanted = at_once * device_.processors(), most = most_runs_;
  launches_.push_back([=, data = &*data_, queue = device_.queue()](const Size& size) {
    if (!size.rows) return;
    const Turn* turned = turn ? &*turn : nullptr;
    if (logn) scale_queries(a, data->positions(), logn, size.rows, queue);
    const int tiles = std::max(size.few * a.cache.kv_heads, 1);
    const int splits = size.runs > 1 ? std::clamp(wanted / tiles, 2, std::max(most, 2)) : 1;
    if (size.few && !size.many && store_and_attend(whole, turned, data->few(), size.few, splits, queue)) return;
    if (norms) head_norm(const_cast<float*>(a.qkv), a.width, norms->first, norms->second, size.rows, queue);
    const bool turns = turned && !size.few && attend_turns(a, *turned, queue);
    store_cache(a, where, turned, !turns, size.rows, queue);
    attend_few(a, data->few(), size.few, splits, queue);
    attend_many(a, data->many(), size.many, turns ? turned : nullptr, queue);
  });
}

void CudaRunner::bind_rotary_table(const OpNode& op) {
  op.allow_only(
      {"attention_factor", "dynamic", "base", "factor", "original_max", "rotary_dim", "table", "growth", "long_table"},
      kName);
  RotaryTable t;
  t.inverse = vector(op, 0), t.longer = op.flag("long_table") ? vector(op, 1) : nullptr;
  t.dim = op.integer("rotary_dim"), t.dynamic = op.flag("dynamic");
  t.powers = std::string(op.choice("growth")) == "powers", t.attention_factor = (float)op.number("attention_factor");
  t.base = op.number("base"), t.factor = op.number("factor"), t.original_max = op.number("original_max");
  size_t taken = 0;
  for (const auto& [number, other] : rotary_) taken += (size_t)limits_.max_rows * other.dim;
  if (const auto same = rotary_.find(op.integer("table")); same != rotary_.end())  // the other form has it
    taken = same->second.cosine - rotary_memory_.as<float>();
  t.cosine = rotary_memory_.as<float>() + taken, t.sine = t.cosine + (size_t)limits_.max_rows * (t.dim / 2);
  rotary_[op.integer("table")] = t;
  launches_.push_back([=, data = &*data_, queue = device_.queue()](const Size& size) {
    if (size.rows && t.dim) rotary_table(t, data->positions(), data->prompts(), size.rows, queue);
  });
}

}  // namespace cuda
}  // namespace as
