#include "cpu/runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>

#include "batch/draft_head.h"
#include "cpu/ops/entries.h"
#include "cpu/ops/gemm.h"
#include "cpu/ops/indexer.h"
#include "cpu/ops/routing.h"

namespace as {
namespace {

constexpr size_t kNowhere = SIZE_MAX;  // a tensor without memory

// The first and the last op that uses a tensor.
struct LiveRange {
  int first = -1, last = -1;
};

std::vector<LiveRange> live_ranges(const Program& program, const std::vector<FusedOp>& ops) {
  const std::vector<bool> never = never_written(program, ops);
  std::vector<LiveRange> ranges(program.tensors().size());
  for (int i = 0; i < (int)ops.size(); i++)
    for (int p : ops[i].parts)
      for (const auto* list : {&program.ops()[p].inputs, &program.ops()[p].outputs})
        for (int t : *list) {
          if (never[t]) continue;
          if (ranges[t].first < 0) ranges[t].first = i;
          ranges[t].last = i;
        }
  return ranges;
}

}  // namespace

CpuRunner::CpuRunner(const Core& core, const Program& program, const Weights& weights, const RunnerLimits& limits,
                     const CacheLimits& cache, bool fused, Masks* masks, Adapters* adapters)
    : core_(core), program_(program), weights_(weights), limits_(limits) {
  if (limits.max_rows < 1 || limits.max_outputs < 1 || limits.max_slots < 1 || limits.max_length < 1)
    throw std::invalid_argument("allocate: sizes must be positive");
  constexpr Op kLast[] = {Op::sample, Op::hidden_states, Op::return_sums};
  if (program.ops().empty() ||
      std::none_of(std::begin(kLast), std::end(kLast), [&](Op op) { return program.ops().back().is(op); }))
    throw std::invalid_argument("the op list must end with sample, hidden_states or return_sums");
  check_experts();
  allocate_cache(cache);
  const auto gates = [&](const OpNode& linear) {
    const Packed& m = weights.matrix(linear.weights[0]);
    return m.n % (2 * m.panel) == 0;
  };
  for (int s = 0; s < (int)program.row_sets().size(); s++) {
    const RowSet& set = program.row_sets()[s];
    routings_.push_back(s <= kOutputRows ? nullptr : std::make_shared<Routing>(max_rows_of(set.of), set.times));
  }
  const bool adapt =
      adapters && std::any_of(program.ops().begin(), program.ops().end(), [](const OpNode& op) { return op.adapts(); });
  if (adapt) adapters_ = adapters;
  Needs needs;
  std::vector<std::pair<Form*, std::vector<size_t>>> forms;
  for (Form* form : {&plain_, &adapted_}) {
    const bool with = form == &adapted_;
    if (with && !adapt) continue;
    form->ops = fused ? fuse(program, core.world == 1, with, gates) : one_by_one(program, with);
    forms.emplace_back(form, lay_out(*form, needs));
  }
  allocate(needs);
  bool takes_states = false;  // a draft head has its model's
  for (const OpNode& op : program.ops()) {
    takes_states |= op.is(Op::kept_hidden);
    if (op.is(Op::keep_hidden) && !takes_states)
      own_states_.resize(DraftHead::places(limits.max_rows, limits.max_slots, limits.draft_layers) *
                         program.in(op).width);
  }
  states_ = own_states_.data();
  for (auto& [form, offsets] : forms) {
    for (size_t t = 0; t < offsets.size(); t++)
      if (offsets[t] != kNowhere) form->tensors[t].data = reinterpret_cast<float*>(activations_.as() + offsets[t]);
    bind(*form, masks, adapters_);
  }
}

void CpuRunner::bind(Form& form, Masks* masks, const Adapters* adapters) {
  rotary_.clear(), attention_.clear();  // each form's ops have their own
  form.begin = steps_.size();
  for (size_t i = 0; i < form.ops.size(); i++) {
    const FusedOp& fused = form.ops[i];
    Binding binding{core_,     {},      limits_, cache_,   scratch_, rotary_,      attention_,
                    routings_, output_, masks,   adapters, &states_, &slot_pages_, core_.exchange};
    for (size_t p = 0; p < fused.parts.size(); p++) {
      const OpNode& op = program_.ops()[fused.parts[p]];
      Part part{op, weights_, {}, {}};
      for (int t : op.inputs) part.inputs.push_back(bound(form, i, p, t, false));
      for (int t : op.outputs) part.outputs.push_back(bound(form, i, p, t, true));
      binding.parts.push_back(std::move(part));
    }
    if (const Part* add = binding.part(Op::add))
      binding.feeds_sum = feeds_sum(program_, form.ops, i, add->op.inputs[0]);
    const Bind bind = cpu_op(binding.kinds());
    if (!bind) throw std::invalid_argument("the CPU backend has no op " + fused.name);
    if (binding.parts[0].is(Op::dispatched_rows)) layers_.push_back(steps_.size());
    Step step{fused, bind(binding), {}};
    const OpNode& last = binding.parts.back().op;
    if (last.is(Op::span_attention) || last.is(Op::latent_attention) || last.is(Op::compressed_attention) ||
        last.is(Op::indexer))
      step.layout = &cache_.layer(last.integer("cache_group"), last.integer("layer")).layout;
    steps_.push_back(std::move(step));
    if (last.is(Op::hidden_states)) form.heads = steps_.size();
  }
  form.end = steps_.size();
}

void CpuRunner::allocate_cache(const CacheLimits& limits) {
  if (limits.span_size != 16 && limits.span_size != 32 && limits.span_size != 64 && limits.span_size != 128)
    throw std::invalid_argument("span size must be 16, 32, 64 or 128, got " + std::to_string(limits.span_size));
  for (const CacheGroup& group : program_.cache_groups())
    if (group.kind != CacheKind::full && group.kind != CacheKind::sliding && group.kind != CacheKind::latent)
      throw std::invalid_argument(std::string("the CPU backend has no cache group of kind ") + name_of(group.kind));
  if (limits.num_spans < 1) throw std::invalid_argument("allocate: sizes must be positive");
  LayerCaches layers;
  for (const OpNode& op : program_.ops()) {
    if (op.is(Op::span_attention) && !op.integer("kv_heads")) continue;
    if (op.is(Op::indexer) && op.integer("rate")) continue;  // compress keeps what it reads
    const bool pairs = core_.k.rules.bf16_pairs;
    LayerCache layer;
    layer.kv_heads = 1;
    if (op.is(Op::compressed_attention) && is_quantized(limits.dtype))
      throw std::invalid_argument("a cache of compressed positions must have type float32 or bfloat16");
    if (op.is(Op::latent_attention))
      layer.layout =
          latent_layout(limits.dtype, limits.span_size, program_.in(op, 2).width, op.integer("latent_dim"), pairs);
    else if (op.is(Op::indexer))
      layer.layout = index_layout(limits.dtype, limits.span_size, program_.in(op, 2).width, pairs);
    else if (op.is(Op::compressed_attention))
      layer.layout = row_layout(limits.dtype, limits.span_size, program_.in(op, 1).width, pairs);
    else if (op.is(Op::compress))
      layer.layout = entry_layout(limits.dtype, entries_of_span(limits.span_size, op.integer("rate")),
                                  program_.in(op).width / (op.flag("overlapping") ? 4 : 2), pairs);
    else if (op.is(Op::span_attention))
      layer.layout = span_layout(limits.dtype, limits.span_size, op.integer("head_dim"), pairs),
      layer.kv_heads = op.integer("kv_heads");
    else continue;
    const auto place = std::make_pair(op.integer("cache_group"), op.integer("layer"));
    if (op.is(Op::compress)) {
      LayerCache kept = layer;
      kept.layout = row_layout(DType::f32, limits.span_size, program_.in(op).width, pairs);
      layers.emplace(std::make_pair(op.integer("rows_group"), op.integer("rows_layer")), kept);
    }
    const LayerCache& found = layers.emplace(place, layer).first->second;
    if (found.layout.bytes != layer.layout.bytes || found.layout.head_dim != layer.layout.head_dim ||
        found.kv_heads != layer.kv_heads)
      throw std::invalid_argument(std::string("op ") + op.spec->name + ": layer " +
                                  std::to_string(op.integer("layer")) + " has two sizes");
  }
  cache_.allocate(std::move(layers), limits.span_size, limits.num_spans);
}

// The matrix in whose format an op stores the rows of a tensor, or null.
const Packed* CpuRunner::converted_for(const std::vector<FusedOp>& ops, size_t op, int tensor) const {
  const OpNode& last = program_.ops()[ops[op].parts.back()];
  const bool gated = last.is(Op::silu_mul) && ops[op].parts.size() > 1;
  if (!has(last.outputs, tensor) || !(gated || last.is(Op::rms_norm) || last.is(Op::span_attention))) return nullptr;
  const OpNode* reader = only_linear(program_, ops, op, tensor);
  if (!reader) return nullptr;
  const Packed& m = weights_.matrix(reader->weights[0]);
  return (gated ? m.pairs : core_.k.converted_layout(m).bytes > 0) ? &m : nullptr;
}

// A tensor as part `part` of ops[op] sees it.
Tensor CpuRunner::bound(const Form& form, size_t op, size_t part, int tensor, bool output) const {
  const std::vector<FusedOp>& ops = form.ops;
  Tensor t = form.tensors[tensor];
  const auto writes = [&](size_t i, size_t parts) {
    for (size_t p = 0; p < parts; p++)
      if (has(program_.ops()[ops[i].parts[p]].outputs, tensor)) return true;
    return false;
  };
  if (!output && writes(op, part)) return t;  // written by an earlier part: floats
  for (size_t i = output ? op + 1 : op; i-- > 0;) {
    if (!writes(i, ops[i].parts.size())) continue;
    t.converted_for = converted_for(ops, i, tensor);
    if (!t.converted_for) break;
    t.converted = core_.k.converted_layout(*t.converted_for).bytes;
    const OpNode& last = program_.ops()[ops[i].parts.back()];
    const bool attention = last.is(Op::span_attention);
    t.converted_from = attention ? 2 : last.is(Op::silu_mul) ? kManyRows : 1;
    t.converted_rows = attention ? attended_.as() : reinterpret_cast<char*>(t.data);
    break;
  }
  return t;
}

int CpuRunner::max_rows_of(int row_set) const {
  if (row_set <= kOutputRows) return row_set == kOutputRows ? limits_.max_outputs : limits_.max_rows;
  const RowSet& set = program_.row_sets()[row_set];
  const int64_t rows = (int64_t)set.times * max_rows_of(set.of);
  if (rows > kLargestCount)
    throw std::invalid_argument("steps of " + std::to_string(limits_.max_rows) + " rows have " + std::to_string(rows) +
                                " rows of experts, too many");
  return (int)rows;
}

// Checks that the stacks of matrices have the sizes that the ops expect.
void CpuRunner::check_experts() const {
  for (const OpNode& op : program_.ops()) {
    const int wanted = op.is(Op::expert_linear) ? op.integer("experts")
                       : op.is(Op::head_linear) ? op.integer("heads")
                                                : 1;
    for (int w : op.weights)
      if (program_.weights()[w].k && weights_.experts(w) != wanted)
        throw std::invalid_argument(std::string("op ") + op.spec->name + " takes a matrix of " +
                                    std::to_string(wanted) + " experts, weight " + std::to_string(w) + " has " +
                                    std::to_string(weights_.experts(w)));
  }
}

// Assigns every tensor an offset in the activations' memory and returns the offsets. Tensors whose live ranges do not
// overlap share memory.
std::vector<size_t> CpuRunner::lay_out(Form& form, Needs& all) const {
  const std::vector<FusedOp>& ops = form.ops;
  const auto& specs = program_.tensors();
  const std::vector<LiveRange> ranges = live_ranges(program_, ops);
  std::vector<size_t> needs(specs.size());
  size_t &converted = all.converted, &attended = all.attended, &gated = all.gated, &widest = all.widest;
  for (size_t t = 0; t < specs.size(); t++) {
    if (specs[t].type != TensorType::float32)
      throw std::invalid_argument(std::string("the CPU backend has no tensors of ") + name_of(specs[t].type));
    needs[t] = (size_t)max_rows((int)t) * specs[t].width * sizeof(float);
  }
  for (size_t i = 0; i < ops.size(); i++)
    for (int p : ops[i].parts) {
      const OpNode& op = program_.ops()[p];
      for (int t : op.outputs)
        if (const Packed* m = converted_for(ops, i, t)) {
          const size_t bytes = core_.k.converted_layout(*m).bytes * max_rows(t);
          size_t& need = op.is(Op::span_attention) ? attended : needs[t];
          need = std::max(need, bytes);
        }
      if (op.is(Op::rms_norm)) widest = std::max(widest, (size_t)program_.in(op).width);
      if (op.is(Op::linear) && program_.ops()[ops[i].parts.back()].is(Op::silu_mul))
        gated = std::max(gated, (size_t)program_.out(op).width * (kManyRows - 1) * sizeof(float));
      if (op.is(Op::linear))
        converted = std::max(converted, converted_bytes(core_, weights_.matrix(op.weights[0]), max_rows(op.inputs[0])));
      if (op.is(Op::head_linear))
        converted =
            std::max(converted, head_linear_bytes(core_, weights_.matrix(op.weights[0]), max_rows(op.inputs[0])));
      if (op.is(Op::expert_linear)) {
        const Packed& m = weights_.matrix(op.weights[0]);
        const size_t entries = std::max(max_rows(op.outputs[0]), core_.pool.size()),
                     row = core_.k.converted_layout(m).bytes;
        converted = std::max(converted, entries * (row ? row : m.inputs * sizeof(float)));
        gated = std::max(gated, core_.pool.size() * (kManyRows - 1) * 2 * kGatedPanels * m.panel * sizeof(float));
      }
      if (op.is(Op::indexer)) {
        const int heads = program_.in(op, 1).width, rate = op.integer("rate");
        const SpanLayout* entries =
            rate ? &cache_.layer(op.integer("cache_group"), op.integer("layer")).layout : nullptr;
        all.indexed = std::max(all.indexed, indexer_bytes(core_.pool.size(), limits_.max_length / std::max(1, rate),
                                                          heads, program_.in(op).width / heads, entries));
      }
      if (op.is(Op::lora))
        all.lora = std::max(all.lora, lora_bytes(adapters_->limits, max_rows(op.inputs[1]), (int)ops[i].parts.size()));
      if (op.is(Op::expert_lora))
        all.lora = std::max(all.lora, lora_bytes(adapters_->limits, kLoraRows * core_.pool.size(), 1));
    }

  struct Region {
    size_t bytes, offset;
    int free_after;
  };
  std::vector<Region> regions;
  std::vector<int> region_of(specs.size(), -1), order(specs.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return ranges[a].first < ranges[b].first; });
  for (int t : order) {
    if (ranges[t].first < 0) continue;
    int best = -1;
    for (int r = 0; r < (int)regions.size(); r++) {
      if (regions[r].free_after >= ranges[t].first) continue;
      const auto waste = [&](int q) {
        return regions[q].bytes > needs[t] ? regions[q].bytes - needs[t] : needs[t] - regions[q].bytes;
      };
      if (best < 0 || waste(r) < waste(best)) best = r;
    }
    if (best < 0) regions.push_back({0, 0, -1}), best = (int)regions.size() - 1;
    regions[best].bytes = std::max(regions[best].bytes, needs[t]);
    regions[best].free_after = ranges[t].last;
    region_of[t] = best;
  }
  size_t total = 0;
  for (Region& r : regions) r.offset = total, total += (r.bytes + 4095) / 4096 * 4096;
  all.activations = std::max(all.activations, total);
  std::vector<size_t> offsets(specs.size(), kNowhere);
  form.tensors.resize(specs.size());
  for (size_t t = 0; t < specs.size(); t++) {
    Tensor& tensor = form.tensors[t];
    tensor.width = specs[t].width, tensor.row_set = specs[t].rows;
    int set = specs[t].rows;
    for (; set > kOutputRows; set = program_.row_sets()[set].of) tensor.times *= program_.row_sets()[set].times;
    tensor.of_outputs = set == kOutputRows;
    if (region_of[t] >= 0) offsets[t] = regions[region_of[t]].offset;
  }
  return offsets;
}

void CpuRunner::allocate(const Needs& needs) {
  activations_ = Buffer(needs.activations, "activations");
  attended_ = Buffer(needs.attended, "converted activations");
  scratch_.gated = Buffer(needs.gated, "gate and up");
  scratch_.converted = Buffer(needs.converted, "converted activations");
  scratch_.row_bytes = (needs.widest * sizeof(float) + 63) / 64 * 64;
  scratch_.rows = Buffer(core_.pool.size() * scratch_.row_bytes, "norms");
  scratch_.lora = Buffer(needs.lora, "adapters' products");
  scratch_.indexed = Buffer(needs.indexed, "an indexer's scores");
}

int CpuRunner::state_spans() const {
  size_t bytes = 0;
  for (const auto& [op, pages] : slot_pages_) bytes += pages->state_bytes();
  const size_t span = cache_.span_bytes();
  return span ? (int)((bytes + span - 1) / span) : 0;
}

// Copies states to spans, then from spans to slots. Each thread copies the states of some of the ops.
void CpuRunner::copy_states(const Batch& batch) {
  std::vector<std::pair<SlotPages*, size_t>> parts;  // with the offset of their state
  size_t bytes = 0;
  for (const auto& [op, pages] : slot_pages_) parts.emplace_back(pages.get(), bytes), bytes += pages->state_bytes();
  for (const StateCopy& copy : batch.saved_states)
    for (const auto& [pages, offset] : parts) pages->check(copy.slot, copy.position);
  core_.pool.run([&](int thread) {
    const auto mine = part((int)parts.size(), thread, core_.pool.size());
    for (const auto* copies : {&batch.saved_states, &batch.loaded_states}) {
      for (const StateCopy& copy : *copies)
        for (int i = mine.first; i < mine.second; i++) {
          const auto& [pages, offset] = parts[i];
          cache_.copy(copy.spans, offset, pages->state(copy.slot), pages->state_bytes(), copies == &batch.saved_states);
        }
      if (!core_.pool.barrier()) return;  // a state may be loaded from spans to which another one is saved
    }
  });
  for (const StateCopy& copy : batch.loaded_states)
    for (const auto& [pages, offset] : parts) pages->loaded(copy.slot, copy.position);
}

RunOutput CpuRunner::run(const Batch& batch, bool want_logits) {
  begin(batch, want_logits);
  for (Step* step : needed_) runs_.push_back({step, {}});
  run_steps(batch, false, want_logits);
  return std::move(output_);
}

void CpuRunner::run_experts(const Batch& batch, int layer) {
  const Step* const first = &steps_[layers_.at(layer)];
  begin(batch, false);
  for (Step* step : needed_)
    if (step >= first) runs_.push_back({step, {}});
  run_steps(batch, false, false);
}

RunOutput CpuRunner::run_part(const Batch& batch, int from, int to) {
  if (!from) begin(batch, false);
  runs_.clear();
  for (Step* step : needed_) {
    // By the ops of the program, which are those of every rank: ranks may need and fuse others, and a share of a sum
    // over ranks must be in the same part on all of them.
    const int first = order_of(*step) * kOpPositions;
    const Share share{std::clamp(from - first, 0, kOpPositions), std::clamp(to - first, 0, kOpPositions)};
    if (share.begin < share.end) runs_.push_back({step, share});
  }
  run_steps(batch, true, false);
  return to < positions() ? RunOutput{} : std::move(output_);
}

// The index of an op by whose position it belongs to parts of a step: of its sum over ranks if it has one, else of its
// product, which costs the most, else of its last one.
int CpuRunner::order_of(const Step& step) const {
  for (Op kind : {Op::all_reduce, Op::linear})
    for (int part : step.parts.parts)
      if (program_.ops()[part].is(kind)) return part;
  return step.parts.parts.back();
}

// Finds the ops that a step needs.
void CpuRunner::begin(const Batch& batch, bool want_logits) {
  if (!batch.saved_states.empty() || !batch.loaded_states.empty()) copy_states(batch);
  output_ = {};
  needed_.clear(), runs_.clear();
  if (batch.rows.empty()) return;
  output_.samples.resize(batch.outputs.size());
  form_ = adapters_ && adapters_->begin(batch) ? &adapted_ : &plain_;
  const bool heads = !form_->heads || want_logits ||
                     std::any_of(batch.outputs.begin(), batch.outputs.end(),
                                 [](const Output& out) { return out.wanted != Wanted::nothing; });
  for (size_t i = form_->begin; i < (heads ? form_->end : form_->heads); i++)
    if (steps_[i].op && steps_[i].op->needed(batch)) needed_.push_back(&steps_[i]);
  for (Step* step : needed_) step->op->begin(batch);
}

// Runs runs_: whole ops or shares of them. All threads of the rank run them.
void CpuRunner::run_steps(const Batch& batch, bool shares, bool want_logits) {
  if (batch.rows.empty()) return;
  const Tensor logits = want_logits ? form_->tensors[program_.ops().back().inputs[0]] : Tensor{};
  using Clock = std::chrono::steady_clock;
  const std::function<void(int)> task = [&](int thread) {
    auto before = Clock::now();
    for (const Run& run : runs_) {
      core_.pool.guard([&] {
        if (shares) run.step->op->run_share(batch, run.share, thread);
        else run.step->op->run(batch, thread);
      });
      if (!core_.pool.barrier()) return;
      if (profiling_ && thread == 0) {
        const auto now = Clock::now();
        record(*run.step, batch, run.share, std::chrono::duration<double>(now - before).count());
        before = now;
      }
    }
    if (want_logits && thread == 0)
      core_.pool.guard([&] {
        output_.logits.assign(logits.data, logits.data + batch.outputs.size() * logits.width);
        output_.logit_width = logits.width;
      });
  };
  try {
    core_.pool.run(task);
  } catch (const std::exception& e) {
    if (core_.peers) core_.peers->abort(std::string("rank ") + std::to_string(core_.rank) + ": " + e.what());
    throw;
  }
}

// How many positions an item's rows see up to their own, of all rows. Windows are not regarded, segments are.
double CpuRunner::seen_by(const Item& item, const Slot& slot, const OpNode& attention) {
  double seen = (double)item.count * item.start + 0.5 * item.count * (item.count + 1.0);
  if (!attention.is(Op::span_attention) || !attention.flag("segments") || slot.segments.empty()) return seen;
  seen = 0;
  int begin = 0;
  for (int end : slot.segments) seen += 0.5 * (end - begin) * (end - begin + 1.0), begin = end;
  return seen;
}

// Counts an op once, with the time of all of its shares.
void CpuRunner::record(Step& step, const Batch& batch, const Share& share, double seconds) const {
  if (share.begin) seconds += step.shares;
  step.shares = seconds;
  if (!share.ends()) return;
  StepSize size;
  size.rows = (double)batch.rows.size(), size.outputs = (double)batch.outputs.size(), size.world = core_.world;
  if (step.layout) {
    size.position_bytes = (double)step.layout->bytes / step.layout->span_size;
    for (const Item& item : batch.items) {
      size.seen += seen_by(item, batch.slot(item.slot), program_.ops()[step.parts.parts.back()]);
      size.context += item.start + item.count;
    }
  }
  size.weight_bytes = weights_.sizes();
  const Cost cost = cost_of(program_, step.parts, size);
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
