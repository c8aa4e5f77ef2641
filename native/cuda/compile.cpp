// From a program to launches: CudaRunner's constructor.
#include <algorithm>
#include <stdexcept>

#include "cuda/runner.h"

namespace as {
namespace cuda {
namespace {

constexpr const char* kName = "the CUDA backend";
constexpr size_t kAlign = 1024;  // bytes: of tensors in the arena

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(std::string(kName) + " has no " + what);
}

Norm norm_of(const OpNode& op, const float* weight) {
  return {weight, (float)op.number("eps"), op.flag("unit_offset")};
}

Heads heads_of(const OpNode& op) { return {op.integer("offset"), op.integer("heads"), op.integer("head_dim")}; }

}  // namespace

size_t span_bytes(int span_size, int head_dim, bool bf16) {
  LayerCache one{nullptr, bf16, span_size, 1, head_dim, (head_dim + 7) / 8 * 8};
  return one.span_bytes();
}

CudaRunner::CudaRunner(const Device& device, const Program& program, Weights& weights, const Limits& limits,
                       LogitSampler& sampler, Masks* masks)
    : device_(device), program_(program), weights_(weights), limits_(limits), sampler_(sampler) {
  check_program();
  device_.use();
  most_runs_ = (limits.max_length + kRunTokens - 1) / kRunTokens;
  allocate_tensors();
  allocate_cache();
  data_.emplace(limits.max_rows, limits.max_outputs, limits.max_slots,
                (limits.max_length + limits.span_size - 1) / limits.span_size, limits.span_size, group_);
  for (size_t i = 0; i < program.ops().size(); i++) i += bind(i);
  const OpNode& sample = program.ops().back();
  const int width = in(sample).rows.width;
  const size_t outputs = limits.max_outputs;
  best_ = Memory(outputs * kBestParts * sizeof(Best), "draws"),
  host_best_ = Memory(best_.size(), "draws", Memory::Where::host);
  host_logits_ = Memory(outputs * width * sizeof(float), "logits", Memory::Where::host);
  launches_.push_back(
      [=, logits = in(sample).values(), best = best_.as<Best>(), queue = device_.queue()](const Size& size) {
        if (size.outputs) best_tokens(logits, width, size.outputs, best, queue);
      });
  sampler_.attach(sample, host_logits_.as<float>(), width, (int)outputs, masks);
}

void CudaRunner::check_program() const {
  const Limits& l = limits_;
  if (l.max_rows < 1 || l.max_outputs < 1 || l.max_slots < 1 || l.max_length < 1 || l.num_spans < 1)
    throw std::invalid_argument("allocate: sizes must be positive");
  if (l.span_size != 16 && l.span_size != 32 && l.span_size != 64 && l.span_size != 128)
    throw std::invalid_argument("span size must be 16, 32, 64 or 128, got " + std::to_string(l.span_size));
  if ((int64_t)l.num_spans * l.span_size > kLargestCount * 64ll)
    throw std::invalid_argument("a cache of " + std::to_string(l.num_spans) + " spans is too large");
  if (program_.ops().empty() || !program_.ops().back().is("sample"))
    throw std::invalid_argument("the op list must end with sample");
  if (program_.cache_groups().size() != 1 || program_.cache_groups()[0].kind != CacheKind::full)
    refuse("cache groups but the one of full attention");
  if (program_.row_sets().size() > kOutputRows + 1) refuse("experts");
  for (const TensorSpec& tensor : program_.tensors())
    if (tensor.type != TensorType::float32) refuse(std::string("tensors of ") + name_of(tensor.type));
}

int CudaRunner::max_rows(int tensor) const {
  return program_.tensors()[tensor].rows == kOutputRows ? limits_.max_outputs : limits_.max_rows;
}

// Whether a tensor is bfloat16: linears of such weights alone read it, and ops that round make it.
bool CudaRunner::in_tiles(int tensor) const {
  bool read = false;
  for (const OpNode& op : program_.ops()) {
    if (has(op.inputs, tensor)) {
      if (!op.is("linear") || !weights_.matrix(op.weights[0]).tiles) return false;
      read = true;
    }
    if (has(op.outputs, tensor) && !op.is("rms_norm") && !op.is("silu_mul") && !op.is("span_attention")) return false;
  }
  return read;
}

void CudaRunner::allocate_tensors() {
  const auto& specs = program_.tensors();
  size_t bytes = 0, converted = 0;
  std::vector<size_t> offsets;
  for (int t = 0; t < (int)specs.size(); t++) {
    offsets.push_back(bytes);
    const size_t need =
        in_tiles(t) ? tiles_bytes(max_rows(t), specs[t].width) : (size_t)max_rows(t) * specs[t].width * sizeof(float);
    bytes += (need + kAlign - 1) / kAlign * kAlign;
  }
  activations_ = Memory(bytes, "activations");
  for (int t = 0; t < (int)specs.size(); t++) {
    Tensor tensor{{nullptr, nullptr, specs[t].width}, specs[t].rows};
    char* data = activations_.as() + offsets[t];
    if (in_tiles(t)) tensor.rows.tiles = reinterpret_cast<uint16_t*>(data);
    else tensor.rows.values = reinterpret_cast<float*>(data);
    tensors_.push_back(tensor);
  }
  size_t rotary = 0;
  for (const OpNode& op : program_.ops()) {
    if (op.is("rotary_table")) rotary += (size_t)limits_.max_rows * op.integer("rotary_dim") * sizeof(float);
    if (op.is("linear") && weights_.matrix(op.weights[0]).tiles && in(op).values())
      converted = std::max(converted, tiles_bytes(max_rows(op.inputs[0]), in(op).rows.width));
  }
  rotary_memory_ = Memory(rotary, "rotary tables");
  tiles_ = Memory(converted, "activations in bfloat16");
}

void CudaRunner::allocate_cache() {
  std::map<int, LayerCache> layers;
  size_t bytes = 0, partials = 0;
  int groups = 0;
  for (const OpNode& op : program_.ops()) {
    if (!op.is("span_attention")) continue;
    LayerCache layer{nullptr, limits_.bf16_cache, limits_.span_size, op.integer("kv_heads"), op.integer("head_dim"), 0};
    layer.padded_dim = (layer.head_dim + 7) / 8 * 8;
    if (layer.head_dim > kLargestHead)
      refuse("heads of " + std::to_string(layer.head_dim) + " features, at most " + std::to_string(kLargestHead));
    const int q_heads = op.integer("q_heads"), group = q_heads / layer.kv_heads;
    if (q_heads % layer.kv_heads || op.integer("group") != group || op.integer("q_head_begin") ||
        op.integer("kv_begin"))
      refuse("heads of several ranks");
    if (groups++ && group != group_) refuse("layers of different numbers of query heads to a KV head");
    group_ = group;
    if (!layers.emplace(op.integer("layer"), layer).second)
      throw std::invalid_argument("op span_attention: two for layer " + std::to_string(op.integer("layer")));
    bytes += layer.span_bytes() * limits_.num_spans;
    partials = std::max(partials, partial_floats(layer.head_dim) * layer.kv_heads);
  }
  cache_ = Memory(bytes, "the KV cache");
  char* next = cache_.as();
  for (auto& [index, layer] : layers) {
    if (index != (int)layers_.size())
      throw std::invalid_argument("op span_attention: layer " + std::to_string(index) + " of a model with " +
                                  std::to_string(layers.size()));
    layer.data = next, next += layer.span_bytes() * limits_.num_spans;
    layers_.push_back(layer);
  }
  const int few = std::min(limits_.max_rows, limits_.max_slots);  // tiles of a step: a sequence has one at most
  partials_ = Memory(partials * few * most_runs_ * sizeof(float), "partial results of attention");
}

int CudaRunner::bind(size_t i) {
  const OpNode& op = program_.ops()[i];
  const Queue queue = device_.queue();
  const auto add_launch = [&](Launch launch, int row_set) {
    launches_.push_back([launch = std::move(launch), row_set](const Size& size) {
      if (row_set == kOutputRows ? size.outputs : size.rows) launch(size);
    });
  };
  if (op.is("linear")) return bind_linear(i);
  if (op.is("span_attention")) return bind_attention(i), 0;
  if (op.is("rotary_table")) return bind_rotary_table(op), 0;
  if (op.is("all_reduce")) {
    if (!op.outputs.empty() && op.outputs[0] != op.inputs[0]) refuse("all_reduce into another tensor");
    return 0;
  }
  if (op.is("sample")) return 0;
  if (op.is("hidden_states")) {
    hidden_ = op.inputs[0], heads_from_ = launches_.size();
    host_hidden_ =
        Memory((size_t)limits_.max_outputs * in(op).rows.width * sizeof(float), "hidden states", Memory::Where::host);
    return 0;
  }
  if (op.is("embedding")) {
    const Tensor y = out(op);
    add_launch([=, table = weights_.matrix(op.weights[0]), begin = op.integer("vocab_begin"),
                factor = (float)op.number("scale"), data = &*data_](
                   const Size& size) { embed(table, data->tokens(), size.rows, begin, factor, y.rows, queue); },
               kAllRows);
    return 0;
  }
  const Tensor x = in(op), y = out(op);
  if (op.is("rms_norm")) {
    add_launch(
        [=, norm = norm_of(op, vector(op, 0)), next = next_product(i), this](const Size& size) {
          const int rows = count(x, size);
          rms_norm(x.values(), norm, rows, y.rows, ahead(next, rows), queue);
        },
        x.row_set);
  } else if (op.is("silu_mul")) {
    add_launch([=](const Size& size) { silu_mul(x.values(), count(x, size), y.rows, queue); }, x.row_set);
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
  } else if (op.is("select_rows")) {
    add_launch(
        [=, data = &*data_](const Size& size) { select_rows(x.values(), data->chosen(), size.outputs, y.rows, queue); },
        kOutputRows);
  } else if (op.is("head_norm")) {
    if (y.values() != x.values()) refuse("op head_norm into another tensor");
    add_launch([=, heads = heads_of(op), norm = norm_of(op, vector(op, 0))](
                   const Size& size) { head_norm(x.values(), x.rows.width, heads, norm, count(x, size), queue); },
               x.row_set);
  } else if (op.is("rope")) {
    if (y.values() != x.values()) refuse("op rope into another tensor");
    const auto table = rotary_.find(op.integer("table"));
    if (table == rotary_.end()) throw std::invalid_argument("no rotary table " + std::to_string(op.integer("table")));
    const Turn turn{table->second, std::string(op.choice("pairs")) == "interleaved"};
    const OpNode& next = program_.ops()[i + 1];
    if (next.is("span_attention") && next.inputs[0] == op.inputs[0] && !op.integer("offset") &&
        op.integer("head_dim") == next.integer("head_dim") &&
        op.integer("heads") == next.integer("q_heads") + next.integer("kv_heads")) {
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

std::optional<size_t> CudaRunner::sum_after(size_t linear) const {
  const auto& ops = program_.ops();
  const int made = ops[linear].outputs[0];
  size_t i = linear + 1;
  while (i < ops.size() && ops[i].is("all_reduce")) i++;
  if (i == ops.size() || !ops[i].is("add") || ops[i].inputs[1] != made || ops[i].inputs[0] == made) return {};
  if (out(ops[i]).values() != in(ops[i]).values()) return {};
  for (size_t later = i + 1; later < ops.size(); later++) {
    if (has(ops[later].inputs, made)) return {};
    if (has(ops[later].outputs, made)) break;
  }
  return i;
}

// Whether ops[linear] makes gates and what they gate for the next op alone.
bool CudaRunner::is_gated(size_t linear) const {
  const auto& ops = program_.ops();
  const OpNode &op = ops[linear], &next = ops[linear + 1];
  const int made = op.outputs[0];
  if (!next.is("silu_mul") || next.inputs[0] != made || !weights_.matrix(op.weights[0]).tiles) return false;
  for (size_t i = 0; i < ops.size(); i++)  // nobody else wants the matrix as it is
    if (i != linear && has(ops[i].weights, op.weights[0])) return false;
  for (size_t later = linear + 2; later < ops.size(); later++) {
    if (has(ops[later].inputs, made)) return false;
    if (has(ops[later].outputs, made)) break;
  }
  return true;
}

int CudaRunner::bind_linear(size_t i) {
  const OpNode& op = program_.ops()[i];
  const Tensor x = in(op);
  const Queue queue = device_.queue();
  const std::optional<size_t> sum = sum_after(i);
  const bool gated = is_gated(i);
  if (gated) weights_.pair(op.weights[0]);
  Product p;
  p.w = weights_.matrix(op.weights[0]), p.bias = vector(op, 1), p.adds = sum.has_value(), p.gated = gated;
  p.x = x.rows;
  p.y = sum ? in(program_.ops()[*sum]).rows : out(program_.ops()[gated ? i + 1 : i]).rows;
  const bool converts = p.w.tiles && x.values();
  if (converts) p.x = {nullptr, tiles_.as<uint16_t>(), x.rows.width};
  launches_.push_back([=](const Size& size) {
    const int rows = count(x, size);
    if (!rows) return;
    if (converts) to_tiles(x.values(), rows, p.x, queue);
    if (p.w.tiles) linear_bf16(p, rows, queue);
    else linear_f32(p, rows, queue);
  });
  return sum ? (int)(*sum - i) : gated;
}

// The matrix that the first product after ops[i] reads; -1: none.
int CudaRunner::next_product(size_t i) const {
  const auto& ops = program_.ops();
  for (i++; i < ops.size(); i++)
    if (ops[i].is("linear")) return weights_.matrix(ops[i].weights[0]).tiles ? ops[i].weights[0] : -1;
  return -1;
}

// What kernels of few rows ask for before a product: memory would be idle meanwhile.
Ahead CudaRunner::ahead(int matrix, int rows) const {
  constexpr int kFewRows = 128;
  static const size_t kMost = getenv("AS_AHEAD") ? (size_t)atoi(getenv("AS_AHEAD")) << 20 : 24 << 20;  // XXX
  if (matrix < 0 || rows > kFewRows) return {};
  const Matrix& m = weights_.matrix(matrix);
  return {m.tiles, std::min(tiles_bytes(m.n, m.k), kMost)};
}

void CudaRunner::bind_attention(size_t i) {
  const OpNode& op = program_.ops()[i];
  op.allow_only({"layer", "head_dim", "group", "scale", "cache_group", "window", "soft_cap", "q_heads", "kv_heads"},
                kName);
  Attention a;
  a.cache = layers_.at(op.integer("layer")), a.group = group_;
  a.scale = (float)op.number("scale"), a.soft_cap = (float)op.number("soft_cap"), a.window = op.integer("window");
  a.qkv = in(op).values(), a.width = in(op).rows.width, a.out = out(op).rows;
  a.tables = data_->tables(), a.partials = partials_.as<float>(), a.most_runs = most_runs_;
  const std::optional<Turn> turn = turn_;
  turn_.reset();
  constexpr int kTilesAProcessor = 3;  // that attend at once
  const int wanted = kTilesAProcessor * device_.processors(), most = most_runs_;
  launches_.push_back([=, data = &*data_, queue = device_.queue(), next = next_product(i), this](const Size& size) {
    if (!size.rows) return;
    const Turn* turned = turn ? &*turn : nullptr;
    const int tiles = std::max(size.few * a.cache.kv_heads, 1);
    const int splits = size.runs > 1 ? std::clamp(wanted / tiles, 2, std::max(most, 2)) : 1;
    if (size.few && !size.many &&
        store_and_attend(a, turned, data->few(), size.few, splits, ahead(next, size.rows), queue))
      return;
    store_cache(a, data->where(), turned, size.rows, queue);
    attend(a, data->few(), size.few, true, splits, queue);
    attend(a, data->many(), size.many, false, 1, queue);
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
  t.cosine = rotary_memory_.as<float>() + taken, t.sine = t.cosine + (size_t)limits_.max_rows * (t.dim / 2);
  rotary_[op.integer("table")] = t;
  launches_.push_back([=, data = &*data_, queue = device_.queue()](const Size& size) {
    if (size.rows && t.dim) rotary_table(t, data->positions(), data->prompts(), size.rows, queue);
  });
}

}  // namespace cuda
}  // namespace as
