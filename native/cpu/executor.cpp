#include "cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "cpu/pack.h"
#include "cpu/row_hash.h"

namespace as {
namespace {

const std::map<std::string, OpType> kOpTypes = {{"rotary_table", OpType::rotary_table},
                                                {"embedding", OpType::embedding},
                                                {"all_reduce", OpType::all_reduce},
                                                {"rms_norm", OpType::rms_norm},
                                                {"linear", OpType::linear},
                                                {"head_norm", OpType::head_norm},
                                                {"rope", OpType::rope},
                                                {"span_attention", OpType::span_attention},
                                                {"silu_mul", OpType::silu_mul},
                                                {"add", OpType::add},
                                                {"select_rows", OpType::select_rows},
                                                {"sample", OpType::sample}};

}  // namespace

Executor::Executor(int rank, int world, std::shared_ptr<Window> window, std::vector<int> cpus, int threads)
    : rank_(rank),
      world_(world),
      window_(std::move(window)),
      pool_(threads, std::move(cpus), window_ ? window_->spin() : true),
      k_(kernels()) {
  if (world < 1 || rank < 0 || rank >= world)
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in 0..." + std::to_string(world - 1));
  if (world > 1 && !window_) throw std::invalid_argument("a group of several ranks needs a window");
}

int Executor::add_matrix(int out_features, int in_features, Format format, int group_size) {
  if (out_features < 1 || in_features < 1)
    throw std::invalid_argument("matrix of " + std::to_string(out_features) + " x " + std::to_string(in_features) +
                                ": both must be positive");
  if (group_size < 0 || (group_size % 32 && group_size != 8 && group_size != 16))
    throw std::invalid_argument("group_size must be 0, 8, 16 or a multiple of 32, got " + std::to_string(group_size));
  Packed packed = layout(out_features, in_features, k_.rules, format, group_size);
  if (packed.planes && packed.group > kMaxIntegerK)
    throw std::invalid_argument("matrix of " + std::to_string(in_features) +
                                " input features: sums of 8-bit products are exact up to " +
                                std::to_string(kMaxIntegerK) + " in a group");
  packed.data = weights_.take(matrix_bytes(packed), "weights");
  matrices_.push_back({packed, 0});
  return (int)matrices_.size() - 1;
}

// The matrix, of which rows [row_offset, row_offset + rows) are to be columns [column, column + k) of rows of `columns`
// values in groups of `group`.
const Packed& Executor::checked_part(int id, long rows, long row_offset, long column, long columns, long group) const {
  const Packed& m = matrices_.at(id).packed;
  if (rows < 0 || row_offset < 0 || row_offset + rows > m.n || column < 0 || column + m.k > columns)
    throw std::invalid_argument("rows " + std::to_string(row_offset) + "..." + std::to_string(row_offset + rows) +
                                " of columns " + std::to_string(column) + "... of " + std::to_string(columns) +
                                " do not fit a matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k));
  if (is_quantized(m.format))
    for (long g = 0, first = column; g < m.groups(); first += m.group_k(g), g++)
      if (group < 1 || first / group != (first + m.group_k(g) - 1) / group)
        throw std::invalid_argument("groups of " + std::to_string(m.group) + " from column " + std::to_string(column) +
                                    " on are not parts of groups of " + std::to_string(group));
  return m;
}

void Executor::fill_quantized(int id, const StoredRows& source, long rows, long row_offset, long column) {
  const Packed& m = checked_part(id, rows, row_offset, column, source.columns, source.group);
  if (!is_quantized(m.format) || bits_of(m.format) != source.bits)
    throw std::invalid_argument("values of " + std::to_string(source.bits) + " bits do not fit a matrix of " +
                                std::to_string(bits_of(m.format)));
  const long first = row_offset / m.panel, last = (row_offset + rows + m.panel - 1) / m.panel;
  pool_.run([&](int thread) {
    const auto [p0, p1] = part(last - first, thread, pool_.size());
    const long r0 = std::max(row_offset, (first + p0) * m.panel),
               r1 = std::min(row_offset + rows, (first + p1) * m.panel);
    if (r0 < r1) place_rows(m, source, row_offset, column, r0, r1);
  });
}

long Executor::quantize(const SourceRows& source, const QuantizedRows& out, long rows) {
  std::atomic<long> bad{0};
  pool_.run([&](int thread) {
    const auto [r0, r1] = part(rows, thread, pool_.size());
    pool_.guard([&, r0 = r0, r1 = r1] { bad += quantize_rows(k_, source, out, r0, r1); });
  });
  return bad;
}

long Executor::fill_matrix(int id, const SourceRows& source, long rows) {
  const long row_offset = source.row_offset, stride = source.stride;
  const Packed& m = checked_part(id, rows, row_offset, source.column, source.columns, source.group);
  std::atomic<long> bad{0};
  std::atomic<uint64_t> hash{0};
  const size_t item = source.type == SourceType::f32 ? 4 : 2;
  const long first = row_offset / m.panel, last = (row_offset + rows + m.panel - 1) / m.panel;
  auto fill = [&](long r0, long r1) {
    if (is_quantized(m.format)) {
      bad += k_.quantize(m, source, r0, r1);
      return;
    }
    auto pack = [&](auto tag) {
      using S = decltype(tag);
      auto* s = static_cast<const typename S::Storage*>(source.data) + source.column;
      if (m.format == Format::f32) bad += pack_rows<S>(s, stride, m.k, row_offset, r0, r1, m.panel, (float*)m.data);
      else bad += pack_rows<S>(s, stride, m.k, row_offset, r0, r1, m.panel, (uint16_t*)m.data, m.pairs);
    };
    if (source.type == SourceType::f32) pack(F32{});
    else if (source.type == SourceType::f16) pack(F16{});
    else pack(BF16{});
  };
  pool_.run([&](int thread) {
    const auto [p0, p1] = part(last - first, thread, pool_.size());  // whole panels a thread: no two write one line
    uint64_t sum = 0;
    for (long panel = first + p0; panel < first + p1; panel++) {
      const long r0 = std::max(row_offset, panel * m.panel), r1 = std::min(row_offset + rows, (panel + 1) * m.panel);
      const char* row = static_cast<const char*>(source.data) + ((r0 - row_offset) * stride + source.column) * item;
      for (long r = r0; r < r1; r++, row += stride * item)
        sum += row_hash(row, m.k * item, r);  // brings the panel into the cache
      fill(r0, r1);
    }
    hash += sum;
  });
  matrices_[id].source_hash += hash;
  return bad;
}

int Executor::add_vector(std::vector<float> values) {
  vectors_.push_back(std::move(values));
  return (int)vectors_.size() - 1;
}

int Executor::add_tensor(int width, bool logit_rows) {
  if (width < 1) throw std::invalid_argument("tensor width must be positive, got " + std::to_string(width));
  tensors_.push_back({width, logit_rows});
  return (int)tensors_.size() - 1;
}

void Executor::add_op(const std::string& type, std::vector<int> inputs, std::vector<int> outputs,
                      std::vector<int> weights, Attributes attributes) {
  const auto found = kOpTypes.find(type);
  if (found == kOpTypes.end()) throw std::invalid_argument("unknown op " + type);
  Op op;
  op.type = found->second;
  op.name = type;
  op.inputs = std::move(inputs), op.outputs = std::move(outputs), op.weights = std::move(weights);
  op.attributes = std::move(attributes);
  auto get = [&](const char* name, double otherwise = NAN) {
    const auto it = op.attributes.find(name);
    if (it != op.attributes.end()) return it->second;
    if (std::isnan(otherwise)) throw std::invalid_argument("op " + type + " needs attribute " + name);
    return otherwise;
  };
  // Counts, widths and positions of any model; products of two fit 64 bits.
  auto whole = [&](const char* name, double otherwise = NAN) {
    const double value = get(name, otherwise);
    if (!(std::abs(value) <= 1 << 24))
      throw std::invalid_argument("op " + type + ": attribute " + name + " is " + std::to_string(value));
    return (int)value;
  };
  auto need = [&](size_t n_in, size_t n_out, size_t least_weights, size_t most_weights) {
    if (op.inputs.size() != n_in || op.outputs.size() != n_out || op.weights.size() < least_weights ||
        op.weights.size() > most_weights)
      throw std::invalid_argument("op " + type + ": wrong number of inputs, outputs or weights");
    for (const auto* list : {&op.inputs, &op.outputs})
      for (int t : *list)
        if (t < 0 || t >= (int)tensors_.size())
          throw std::invalid_argument("op " + type + ": no tensor " + std::to_string(t));
    const bool selects = op.type == OpType::select_rows;  // all others have as many rows as their input
    for (int t : op.outputs)
      if (!op.inputs.empty() && tensors_[t].logit_rows != (tensors_[op.inputs[0]].logit_rows || selects))
        throw std::invalid_argument("op " + type + ": input and output differ in rows");
  };
  auto width_is = [&](int tensor, long width, const char* what) {
    if (tensors_[tensor].width != width)
      throw std::invalid_argument("op " + type + ": " + what + " is " + std::to_string(tensors_[tensor].width) +
                                  " wide, expected " + std::to_string(width));
  };
  auto vector_is = [&](int id, size_t n) {
    if (vectors_.at(id).size() != n)
      throw std::invalid_argument("op " + type + ": vector of " + std::to_string(vectors_[id].size()) +
                                  " values, expected " + std::to_string(n));
  };
  switch (op.type) {
    case OpType::rotary_table:
      need(0, 0, 1, 1);
      if (rotary_.dim) throw std::invalid_argument("op rotary_table: there can be one");
      rotary_ = {vectors_.at(op.weights[0]), (float)get("attention_factor", 1),
                 get("dynamic", 0) != 0,     get("base", 0),
                 get("factor", 1),           get("original_max", 0),
                 whole("rotary_dim")};
      vector_is(op.weights[0], rotary_.dim / 2);
      break;
    case OpType::embedding:
      need(0, 1, 1, 1);
      op.vocab_begin = whole("vocab_begin");
      width_is(op.outputs[0], matrices_.at(op.weights[0]).packed.k, "output");
      if (out(op).logit_rows) throw std::invalid_argument("op embedding: its output must have a row for each token");
      break;
    case OpType::all_reduce:
      need(1, 1, 0, 0);
      break;
    case OpType::rms_norm:
      need(1, 1, 1, 1);
      op.eps = (float)get("eps");
      width_is(op.outputs[0], in(op).width, "output");
      vector_is(op.weights[0], in(op).width);
      break;
    case OpType::linear: {
      need(1, 1, 1, 2);
      const Packed& m = matrices_.at(op.weights[0]).packed;
      width_is(op.inputs[0], m.k, "input");
      width_is(op.outputs[0], m.n, "output");
      if (op.weights.size() == 2) vector_is(op.weights[1], m.n);
      break;
    }
    case OpType::head_norm:
      op.eps = (float)get("eps");
      [[fallthrough]];
    case OpType::rope:
      if (op.inputs.empty() || op.inputs.size() > 1)
        throw std::invalid_argument("op " + type + " takes one input, changed in place");
      op.offset = whole("offset"), op.heads = whole("heads"), op.head_dim = whole("head_dim");
      op.rotary_dim = whole("rotary_dim", op.head_dim);
      if (op.offset < 0 || op.heads < 0 || op.head_dim < 1 || op.rotary_dim < 0 || op.rotary_dim > op.head_dim ||
          op.rotary_dim % 2 || op.offset + (long)op.heads * op.head_dim > tensors_.at(op.inputs[0]).width)
        throw std::invalid_argument("op " + type + " reaches past its input");
      if (op.type == OpType::rope && op.rotary_dim != rotary_.dim)
        throw std::invalid_argument("op rope: rotary_dim differs from rotary_table's");
      if (op.type == OpType::head_norm) vector_is(op.weights.at(0), op.head_dim);
      break;
    case OpType::span_attention: {
      need(1, 1, 0, 0);
      op.layer = whole("layer");
      AttentionShape s;
      s.q_heads = whole("q_heads"), s.kv_heads = whole("kv_heads"), s.head_dim = whole("head_dim");
      s.padded_dim = (s.head_dim + 15) / 16 * 16;
      s.q_head_begin = whole("q_head_begin", 0), s.group = whole("group"), s.kv_begin = whole("kv_begin", 0);
      s.scale = (float)get("scale");
      width_is(op.inputs[0], (s.q_heads + 2l * s.kv_heads) * s.head_dim, "input");
      width_is(op.outputs[0], (long)s.q_heads * s.head_dim, "output");
      if (op.layer < 0 || s.head_dim < 1 || s.group < 1 || s.q_heads < 1 || s.kv_heads < 1 || s.q_head_begin < 0 ||
          s.kv_begin < 0 || (s.kv_begin + s.kv_heads + 1l) * s.group > 1 << 28 || tensors_[op.inputs[0]].logit_rows)
        throw std::invalid_argument("op span_attention: a layer, head_dim, group or number of heads that cannot be");
      if (shape_.head_dim && !(shape_ == s))
        throw std::invalid_argument("all layers must have the same attention shape");
      shape_ = s;
      break;
    }
    case OpType::silu_mul:
      need(1, 1, 0, 0);
      width_is(op.inputs[0], 2l * out(op).width, "input");
      break;
    case OpType::add:
      need(2, 1, 0, 0);
      width_is(op.inputs[1], in(op).width, "second input");
      if (in(op).logit_rows != in(op, 1).logit_rows) throw std::invalid_argument("op add: its inputs differ in rows");
      break;
    case OpType::select_rows:
      need(1, 1, 0, 0);
      if (in(op).logit_rows) throw std::invalid_argument("op select_rows: its input must have a row for each token");
      width_is(op.outputs[0], in(op).width, "output");
      break;
    case OpType::sample:
      need(1, 0, 0, 0);
      op.vocab_begin = whole("vocab_begin"), op.vocab_size = whole("vocab_size");
      check_shard(op.vocab_begin, in(op).width, op.vocab_size);
      if (!in(op).logit_rows)
        throw std::invalid_argument("op sample: its input must have a row for each row that samples");
      break;
  }
  ops_.push_back(std::move(op));
}

// Gives every tensor memory; tensors whose lives do not overlap share it.
void Executor::plan_buffers() {
  struct Life {
    int first = -1, last = -1;
  };
  std::vector<Life> lives(tensors_.size());
  for (int i = 0; i < (int)ops_.size(); i++)
    for (const auto* list : {&ops_[i].inputs, &ops_[i].outputs})
      for (int t : *list) {
        // What an op writes that is computed together with the one before lives from that one on.
        if (lives[t].first < 0) lives[t].first = i && (ops_[i - 1].gated || ops_[i - 1].normed) ? i - 1 : i;
        lives[t].last = i;
      }
  struct Region {
    size_t floats;
    int free_after;
    size_t offset;
  };
  std::vector<Region> regions;
  std::vector<int> region_of(tensors_.size(), -1);
  std::vector<int> order(tensors_.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return lives[a].first < lives[b].first; });
  for (int t : order) {
    if (lives[t].first < 0) continue;
    const size_t need = (size_t)(tensors_[t].logit_rows ? max_slots_ : max_rows_) * tensors_[t].width;
    int best = -1;
    for (int r = 0; r < (int)regions.size(); r++) {
      if (regions[r].free_after >= lives[t].first) continue;
      const auto waste = [&](int q) {
        return regions[q].floats > need ? regions[q].floats - need : need - regions[q].floats;
      };
      if (best < 0 || waste(r) < waste(best)) best = r;
    }
    if (best < 0) regions.push_back({0, -1, 0}), best = (int)regions.size() - 1;
    regions[best].floats = std::max(regions[best].floats, need);
    regions[best].free_after = lives[t].last;
    region_of[t] = best;
  }
  size_t total = 0;
  for (Region& r : regions) r.offset = total, total += (r.floats + 1023) / 1024 * 1024;
  activations_ = Buffer(total * sizeof(float), "activations");
  for (size_t t = 0; t < tensors_.size(); t++)
    if (region_of[t] >= 0) tensors_[t].data = activations_.as<float>() + regions[region_of[t]].offset;
}

void Executor::allocate(int max_rows, int max_slots, int max_length, int layers, int kv_heads, int head_dim,
                        int span_size, int num_spans, DType cache_dtype) {
  if (ops_.empty() || ops_.back().type != OpType::sample)
    throw std::invalid_argument("the op list must end with sample");
  if (kv_heads != shape_.kv_heads || head_dim != shape_.head_dim)
    throw std::invalid_argument("cache and span_attention disagree on KV heads or head_dim");
  if (span_size != 16 && span_size != 32 && span_size != 64 && span_size != 128)
    throw std::invalid_argument("span size must be 16, 32, 64 or 128, got " + std::to_string(span_size));
  for (const Op& op : ops_)
    if (op.type == OpType::span_attention && op.layer >= layers)
      throw std::invalid_argument("op span_attention: layer " + std::to_string(op.layer) + " of a model with " +
                                  std::to_string(layers));
  if (max_rows < 1 || max_slots < 1 || num_spans < 1 || layers < 1)
    throw std::invalid_argument("allocate: sizes must be positive");
  max_rows_ = max_rows, max_slots_ = max_slots, max_length_ = max_length, layers_ = layers;
  span_size_ = span_size, num_spans_ = num_spans;
  fuse();
  plan_buffers();
  layout_ = span_layout(cache_dtype, span_size, head_dim, k_.rules.bf16_pairs);
  cache_ = Buffer(layout_.bytes * layers * num_spans * kv_heads, "the KV cache");
  const size_t partials = partials_bytes(layout_, pool_.size(), max_length);
  partials_ = Buffer(partials, "partial results of attention");
  attention_scratch_ =
      Buffer(attention_bytes(layout_, pool_.size(), max_length) - partials, "scratch memory of attention");
  size_t prepared = 0;
  for (const Op& op : ops_)
    if (op.type == OpType::linear)
      prepared =
          std::max(prepared, prepared_bytes(matrices_[op.weights[0]].packed, in(op).logit_rows ? max_slots : max_rows));
  prepared_ = Buffer(prepared, "prepared activations");
  gated_ = Buffer(fed_bytes(), "prepared activations");
  int widest = 0;
  for (const Op& op : ops_)
    if (op.type == OpType::rms_norm) widest = std::max(widest, in(op).width);
  norms_ = Buffer((size_t)pool_.size() * widest * sizeof(float), "norms");
  cosine_.resize((size_t)max_rows * rotary_.dim / 2), sine_.resize(cosine_.size());
  slots_.assign(max_slots, {}), outlook_.assign(max_slots, {});
  rows_.reserve(max_rows), logit_rows_.reserve(max_slots);
  blobs_.resize(max_slots);
  allocated_ = true;
}

// Throws on a plan that the slots, the cache or the buffers do not allow. Changes nothing but `outlook_`.
void Executor::check(const Plan& plan) {
  auto slot_of = [&](int i) -> Outlook& {
    if (i < 0 || i >= max_slots_)
      throw std::invalid_argument("step plan: slot " + std::to_string(i) + " is not in 0..." +
                                  std::to_string(max_slots_ - 1));
    return outlook_[i];
  };
  auto begin = [&](int i) {
    Outlook& slot = slot_of(i);
    const Slot& now = slots_[i];
    slot = {now.live, (long)now.history.size(), (long)now.spans.size(), now.cached};
  };
  for (int i : plan.free) begin(i);
  for (const NewSequence& s : plan.fresh) begin(s.slot);
  for (const Work& w : plan.work) begin(w.slot);
  for (int i : plan.free) slot_of(i).live = false;
  for (const NewSequence& s : plan.fresh) {
    if (slot_of(s.slot).live) throw std::invalid_argument("step plan: slot " + std::to_string(s.slot) + " is in use");
    slot_of(s.slot) = {true, (long)s.history.size(), 0, 0};
  }
  long rows = 0, samples = 0;
  for (const Work& w : plan.work) {
    Outlook& slot = slot_of(w.slot);
    if (!slot.live) throw std::invalid_argument("step plan: slot " + std::to_string(w.slot) + " has no sequence");
    slot.history += (long)w.append.size(), slot.spans += (long)w.spans.size();
    for (int32_t s : w.spans)
      if (s < 0 || s >= num_spans_)
        throw std::invalid_argument("step plan: span " + std::to_string(s) + " is not in 0..." +
                                    std::to_string(num_spans_ - 1));
    const long end = (long)w.start + w.count;
    if (w.start < 0 || w.count < 1 || end > slot.history || end > max_length_ || slot.spans * span_size_ < end ||
        (slot.cached > 0 && w.start != slot.cached) || (slot.cached == 0 && w.start % span_size_ != 0))
      throw std::invalid_argument("step plan: positions " + std::to_string(w.start) + "..." + std::to_string(end) +
                                  " of slot " + std::to_string(w.slot) + " do not follow its " +
                                  std::to_string(slot.cached) + " cached positions, or history (" +
                                  std::to_string(slot.history) + ") or spans (" + std::to_string(slot.spans) +
                                  ") do not cover them");
    if (w.sample && end != slot.history)
      throw std::invalid_argument("step plan: only a sequence's last row can sample");
    slot.cached = (int)end;
    rows += w.count, samples += w.sample;
  }
  if (rows > max_rows_ || samples > max_slots_)
    throw std::invalid_argument("step plan: " + std::to_string(rows) + " rows, " + std::to_string(samples) +
                                " that sample; at most " + std::to_string(max_rows_) + " and " +
                                std::to_string(max_slots_) + " fit");
}

// Brings the slots up to date with a plan that was checked, and lists the step's rows.
void Executor::begin_step(const Plan& plan) {
  for (int i : plan.free) slots_[i].live = false;
  for (const NewSequence& s : plan.fresh) {
    Slot& slot = slots_[s.slot];
    slot.live = true;
    slot.sampling = s.sampling, slot.history = s.history;
    slot.spans.clear();
    slot.cached = 0;
  }
  rows_.clear(), logit_rows_.clear();
  for (const Work& w : plan.work) {
    Slot& slot = slots_[w.slot];
    slot.history.insert(slot.history.end(), w.append.begin(), w.append.end());
    slot.spans.insert(slot.spans.end(), w.spans.begin(), w.spans.end());
    for (int p = w.start; p < w.start + w.count; p++) rows_.push_back({w.slot, p, slot.history[p]});
    slot.cached = w.start + w.count;
    if (w.sample) logit_rows_.push_back((int)rows_.size() - 1);
  }
}

StepOutput Executor::step(const std::string& bytes, bool want_logits) {
  if (!allocated_) throw std::invalid_argument("allocate() before step()");
  const Plan plan = Plan::parse(bytes);
  check(plan);
  begin_step(plan);
  output_ = {}, wide_.clear();
  want_logits_ = want_logits;
  if (rows_.empty()) return {};
  make_tiles(plan);
  if (profiling_) measure_attention(plan);
  using Clock = std::chrono::steady_clock;
  const std::function<void(int)> task = [&](int thread) {
    auto last = Clock::now();
    for (size_t i = 0; i < ops_.size(); i++) {
      Op& op = ops_[i];
      if (op.type == OpType::all_reduce && world_ == 1) continue;
      const int more = within(op);
      pool_.guard([&] { run_op(op, thread); });
      if (!pool_.barrier()) return;
      if (profiling_ && thread == 0) {
        const auto now = Clock::now();
        record(op, more, std::chrono::duration<double>(now - last).count());
        last = now;
      }
      i += more;
    }
  };
  try {
    pool_.run(task);
  } catch (const std::exception& e) {
    if (window_) window_->abort(std::string("rank ") + std::to_string(rank_) + ": " + e.what());
    throw;
  }
  return std::move(output_);
}

void Executor::run_op(Op& op, int thread) {
  switch (op.type) {
    case OpType::rotary_table:
      return rotary_table(op, thread);
    case OpType::embedding:
      return embedding(op, thread);
    case OpType::all_reduce:
      return window_->all_reduce(in(op).data, (size_t)rows_of(in(op)) * in(op).width, thread, pool_.size());
    case OpType::rms_norm:
      return rms_norm(op, thread);
    case OpType::linear:
      return within(op) ? gated_linear(op, thread) : linear(op, thread);
    case OpType::head_norm:
      return head_norm(op, thread);
    case OpType::rope:
      return rope(op, thread);
    case OpType::span_attention:
      return span_attention(op, thread);
    case OpType::silu_mul:
      return silu_mul(op, thread);
    case OpType::add:
      return within(op) ? add_norm(op, thread) : add(op, thread);
    case OpType::select_rows:
      return select_rows(op, thread);
    case OpType::sample:
      return sample(op, thread);
  }
}

size_t Executor::weight_bytes() const {
  size_t total = 0;
  for (const Matrix& m : matrices_) total += matrix_bytes(m.packed);
  for (const auto& v : vectors_) total += v.size() * sizeof(float);
  return total;
}

std::vector<std::pair<const void*, size_t>> Executor::memory() const {
  std::vector<std::pair<const void*, size_t>> all;
  for (const Matrix& m : matrices_) all.emplace_back(m.packed.data, matrix_bytes(m.packed));
  if (cache_.size()) all.emplace_back(cache_.as(), cache_.size());
  return all;
}

}  // namespace as
