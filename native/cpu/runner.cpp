#include "cpu/runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>

#include "cpu/ops/product.h"

namespace as {
namespace {

bool is(const OpNode& op, const char* name) { return !std::strcmp(op.spec->name, name); }

// The steps after which a tensor's value is no longer wanted, and the first that writes it.
struct Life {
  int first = -1, last = -1;
};

std::vector<Life> lives_of(const std::vector<FusedOp>& ops, size_t tensors) {
  std::vector<Life> lives(tensors);
  for (int i = 0; i < (int)ops.size(); i++)
    for (const auto* list : {&ops[i].op.inputs, &ops[i].op.outputs})
      for (int t : *list) {
        if (lives[t].first < 0) lives[t].first = i;
        lives[t].last = i;
      }
  return lives;
}

}  // namespace

CpuRunner::CpuRunner(const Core& core, const Program& program, const Weights& weights, const RunnerLimits& limits,
                     const CacheLimits& cache)
    : core_(core), program_(program), weights_(weights), limits_(limits) {
  if (limits.max_rows < 1 || limits.max_outputs < 1 || limits.max_slots < 1 || limits.max_length < 1)
    throw std::invalid_argument("allocate: sizes must be positive");
  if (program.ops().empty() || !is(program.ops().back(), "sample"))
    throw std::invalid_argument("the op list must end with sample");
  if (program.row_sets().size() > 2) throw std::invalid_argument("the CPU backend has no rows of experts");
  allocate_cache(cache);
  const std::vector<FusedOp> ops = fuse(program, [&](const OpNode& linear) {
    const Packed& m = weights.matrix(linear.weights[0]);
    return m.n % (2 * m.panel) == 0;
  });
  tensors_ = allocate_tensors(ops);
  for (size_t i = 0; i < ops.size(); i++) {
    const OpNode& op = ops[i].op;
    const Bind bind = cpu_op(op.spec->name);
    if (!bind) throw std::invalid_argument(std::string("the CPU backend has no op ") + op.spec->name);
    std::vector<Tensor> inputs, outputs;
    for (int t : op.inputs) inputs.push_back(bound(ops, i, t, false));
    for (int t : op.outputs) outputs.push_back(bound(ops, i, t, true));
    const Binding binding{core_,   program, op,       std::move(inputs), std::move(outputs), weights,
                          limits_, cache_,  scratch_, rotary_,           attention_,         drawn_};
    Step step{op.spec->name, ops[i].first, {}, ops[i], bind(binding)};
    if (is(op, "span_attention")) step.layout = &cache_.layer(op.integer("layer")).layout;
    steps_.push_back(std::move(step));
  }
}

void CpuRunner::allocate_cache(const CacheLimits& limits) {
  if (limits.span_size != 16 && limits.span_size != 32 && limits.span_size != 64 && limits.span_size != 128)
    throw std::invalid_argument("span size must be 16, 32, 64 or 128, got " + std::to_string(limits.span_size));
  if (limits.num_spans.size() != program_.cache_groups().size())
    throw std::invalid_argument("sizes of " + std::to_string(limits.num_spans.size()) +
                                " cache groups, the program has " + std::to_string(program_.cache_groups().size()));
  for (const CacheGroup& group : program_.cache_groups())
    if (group.kind != CacheKind::full)
      throw std::invalid_argument(std::string("the CPU backend has no cache group of kind ") + name_of(group.kind));
  for (int n : limits.num_spans)
    if (n < 1) throw std::invalid_argument("allocate: sizes must be positive");
  std::map<int, LayerCache> layers;
  for (const OpNode& op : program_.ops()) {
    if (!is(op, "span_attention")) continue;
    LayerCache layer;
    layer.layout = span_layout(limits.dtype, limits.span_size, op.integer("head_dim"), core_.k.rules.bf16_pairs);
    layer.group = op.integer("cache_group"), layer.kv_heads = op.integer("kv_heads");
    if (!layers.emplace(op.integer("layer"), layer).second)
      throw std::invalid_argument("op span_attention: two for layer " + std::to_string(op.integer("layer")));
  }
  std::vector<LayerCache> all;
  for (auto& [index, layer] : layers) {
    if (index != (int)all.size())
      throw std::invalid_argument("op span_attention: layer " + std::to_string(index) + " of a model with " +
                                  std::to_string(layers.size()));
    all.push_back(layer);
  }
  cache_.allocate(std::move(all), limits.num_spans);
}

// The matrix for which ops[writer] prepares the rows that it writes to a tensor, or null.
const Packed* CpuRunner::prepared_for(const std::vector<FusedOp>& ops, size_t writer, int tensor) const {
  const OpNode& op = ops[writer].op;
  const bool gated = is(op, "linear+silu_mul");
  if (op.outputs.back() != tensor || !(gated || is(op, "rms_norm") || is(op, "add+rms_norm"))) return nullptr;
  const OpNode* reader = only_reader(ops, writer, tensor);
  if (!reader) return nullptr;
  const Packed& m = weights_.matrix(reader->weights[0]);
  return (gated ? m.pairs : core_.k.prepared(m).bytes > 0) ? &m : nullptr;
}

// A tensor as ops[index] has it: what is written to it now, or was last.
Tensor CpuRunner::bound(const std::vector<FusedOp>& ops, size_t index, int tensor, bool output) const {
  Tensor t = tensors_[tensor];
  for (size_t i = output ? index + 1 : index; i-- > 0;) {
    const auto& written = ops[i].op.outputs;
    if (std::find(written.begin(), written.end(), tensor) == written.end()) continue;
    t.prepared_for = prepared_for(ops, i, tensor);
    if (t.prepared_for) t.prepared = core_.k.prepared(*t.prepared_for).bytes;
    break;
  }
  return t;
}

// Gives every tensor memory; tensors whose lives do not overlap share it.
std::vector<Tensor> CpuRunner::allocate_tensors(const std::vector<FusedOp>& ops) {
  const auto& specs = program_.tensors();
  const std::vector<Life> lives = lives_of(ops, specs.size());
  std::vector<size_t> needs(specs.size());
  size_t scratch = 0;
  for (size_t t = 0; t < specs.size(); t++) {
    if (specs[t].type != TensorType::float32)
      throw std::invalid_argument(std::string("the CPU backend has no tensors of ") + name_of(specs[t].type));
    needs[t] = (size_t)(specs[t].rows == kOutputRows ? limits_.max_outputs : limits_.max_rows) * specs[t].width *
               sizeof(float);
  }
  for (size_t i = 0; i < ops.size(); i++) {
    const OpNode& op = ops[i].op;
    for (int t : op.outputs)
      if (const Packed* m = prepared_for(ops, i, t)) {
        const int rows = specs[t].rows == kOutputRows ? limits_.max_outputs : limits_.max_rows;
        needs[t] = std::max(needs[t], core_.k.prepared(*m).bytes * rows);
      }
    if (is(op, "linear") || is(op, "linear+silu_mul")) {
      const int rows = program_.in(op).rows == kOutputRows ? limits_.max_outputs : limits_.max_rows;
      scratch = std::max(scratch, prepared_bytes(core_, weights_.matrix(op.weights[0]), rows));
    }
  }
  scratch_ = Buffer(scratch, "prepared activations");

  struct Region {
    size_t bytes, offset;
    int free_after;
  };
  std::vector<Region> regions;
  std::vector<int> region_of(specs.size(), -1), order(specs.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return lives[a].first < lives[b].first; });
  for (int t : order) {
    if (lives[t].first < 0) continue;
    int best = -1;
    for (int r = 0; r < (int)regions.size(); r++) {
      if (regions[r].free_after >= lives[t].first) continue;
      const auto waste = [&](int q) {
        return regions[q].bytes > needs[t] ? regions[q].bytes - needs[t] : needs[t] - regions[q].bytes;
      };
      if (best < 0 || waste(r) < waste(best)) best = r;
    }
    if (best < 0) regions.push_back({0, 0, -1}), best = (int)regions.size() - 1;
    regions[best].bytes = std::max(regions[best].bytes, needs[t]);
    regions[best].free_after = lives[t].last;
    region_of[t] = best;
  }
  size_t total = 0;
  for (Region& r : regions) r.offset = total, total += (r.bytes + 4095) / 4096 * 4096;
  activations_ = Buffer(total, "activations");
  std::vector<Tensor> tensors(specs.size());
  for (size_t t = 0; t < specs.size(); t++) {
    tensors[t].width = specs[t].width, tensors[t].of_outputs = specs[t].rows == kOutputRows;
    if (region_of[t] >= 0) tensors[t].data = reinterpret_cast<float*>(activations_.as() + regions[region_of[t]].offset);
  }
  return tensors;
}

Drawn CpuRunner::run(const Batch& batch, bool want_logits) {
  drawn_ = {};
  for (Step& step : steps_)
    if (step.op) step.op->begin(batch);
  const Tensor logits = want_logits ? tensors_[program_.ops().back().inputs[0]] : Tensor{};
  using Clock = std::chrono::steady_clock;
  const std::function<void(int)> task = [&](int thread) {
    auto last = Clock::now();
    for (Step& step : steps_) {
      if (!step.op) continue;
      core_.pool.guard([&] { step.op->run(batch, thread); });
      if (!core_.pool.barrier()) return;
      if (profiling_ && thread == 0) {
        const auto now = Clock::now();
        record(step, batch, std::chrono::duration<double>(now - last).count());
        last = now;
      }
    }
    if (want_logits && thread == 0)
      core_.pool.guard([&] {
        drawn_.logits.assign(logits.data, logits.data + batch.outputs.size() * logits.width);
        drawn_.logit_width = logits.width;
      });
  };
  try {
    core_.pool.run(task);
  } catch (const std::exception& e) {
    if (core_.window) core_.window->abort(std::string("rank ") + std::to_string(core_.rank) + ": " + e.what());
    throw;
  }
  return std::move(drawn_);
}

void CpuRunner::record(Step& step, const Batch& batch, double seconds) const {
  StepSize size;
  size.rows = (double)batch.rows.size(), size.outputs = (double)batch.outputs.size(), size.world = core_.world;
  if (step.layout) {
    size.position_bytes = (double)step.layout->bytes / step.layout->span_size;
    for (const Item& item : batch.items) {
      size.seen += (double)item.count * item.start + 0.5 * item.count * (item.count + 1.0);
      size.context += item.start + item.count;
    }
  }
  size.weight_bytes = weights_.sizes();
  const OpNode& op = step.fused.op;
  const Cost cost = op.spec->cost(program_, op, size);
  Counters& c = step.counters;
  c.least = c.count ? std::min(c.least, seconds) : seconds;
  c.most = std::max(c.most, seconds);
  c.total += seconds;
  c.count++;
  c.bytes += cost.bytes, c.operations += cost.operations;
}

void CpuRunner::set_profiling(bool on) {
  profiling_ = on;
  if (!on) return;
  for (Step& step : steps_) step.counters = {};
}

}  // namespace as
