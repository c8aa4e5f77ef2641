#include "cuda/runner.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/hot_experts.h"
#include "cuda/memory/host_threads.h"
#include "cuda/ops/all_reduce.h"
#include "cuda/ops/aside.h"

namespace as::cuda {
namespace {

// Whether the output needs only the argmax of its unprocessed logits.
bool is_greedy(const SamplingParams& p, const Output& out) {
  return p.greedy() && !p.logprobs() && p.repetition_penalty == 1 && p.presence_penalty == 0 &&
         p.frequency_penalty == 0 && !p.no_repeat_ngram_size && p.bad_words.empty() && p.logit_bias.empty() &&
         (out.history >= p.min_length || p.eos.empty()) && !out.mask;
}

// Adds the launches of all ops. Returns which ops they compute; the first sum over ranks has none.
std::vector<LaunchedOps> bind_all(Binding& b) {
  std::vector<LaunchedOps> launched;
  bind_first_call(b);
  size_t first = 0;  // of the ops that the next launch computes
  for (size_t i = 0; i < b.ops.size(); i++) {
    const size_t before = b.launches.size();
    b.deferred = false;
    i += cuda_op(b.ops[i]).bind(b, i);
    if (b.deferred) continue;
    if (b.launches.size() > before) launched.push_back({first, i, std::move(b.also), before, b.launches.size()});
    b.also.clear(), first = i + 1;
  }
  return launched;
}

}  // namespace

CudaRunner::~CudaRunner() {
  cudaStreamSynchronize(device_.stream());  // a step may be running
  if (sampled_) cudaEventDestroy(sampled_);
}

CudaRunner::CudaRunner(const Device& device, const Program& program, Weights& weights, const Limits& limits,
                       LogitSampler& sampler, Masks* masks, const Ranks* ranks, const Adapters* adapters,
                       ExpertRanks* experts)
    : device_(device),
      program_(program),
      weights_(weights),
      limits_(limits),
      sampler_(sampler),
      ranks_(ranks ? std::optional<Ranks>(*ranks) : std::nullopt),
      workspace_(device, program, weights, limits, adapters, experts),
      times_(program),
      graphs_(device) {
  if (!workspace_.state_pages.empty()) states_.emplace(device, workspace_);
  compile(false);
  if (adapters && adapters->targets()) compile(true);
  const size_t outputs = limits.max_outputs;
  if (hidden_ >= 0)
    host_hidden_ =
        Memory(outputs * workspace_.tensors[hidden_].rows.width * sizeof(float), "hidden states", Memory::Where::host);
  if (!workspace_.samples()) return;
  const OpNode& sample = program.ops().back();
  const int width = logits().rows.width;
  host_argmax_ = Memory(workspace_.argmax.size(), "argmaxes", Memory::Where::host);
  host_logits_ = Memory(outputs * width * sizeof(float), "logits", Memory::Where::host);
  const auto dealt = rank_samples(ranks, workspace_, sample, width);
  device_sampler_.emplace(device_, logits().values(), workspace_.argmax.as<Argmax>(), width, (int)outputs, masks,
                          dealt ? &*dealt : nullptr);
  sampler_.attach(sample, host_logits_.as<float>(), width, (int)outputs, masks);
}

// Binds the ops of a form, and records for the profile which ops each launch computes.
void CudaRunner::compile(bool adapted) {
  const auto binding = [&](const Queue& queue) {
    return Binding(workspace_, weights_, ranks_ ? &*ranks_ : nullptr, paired_, adapted, queue);
  };
  Binding b = binding(device_.queue());
  const std::vector<LaunchedOps> launched = bind_all(b);
  std::vector<int> numbers;  // ops of the form in the program
  for (int i = 0; i < (int)program_.ops().size(); i++)
    if (adapted || !program_.ops()[i].adapts()) numbers.push_back(i);
  std::vector<OpTime> times(launched.empty() ? b.launches.size() : launched.front().begin);
  const auto has_launches = [&](size_t op) {
    return std::any_of(launched.begin(), launched.end(),
                       [&](const LaunchedOps& ops) { return ops.first <= op && op <= ops.last; });
  };
  for (const LaunchedOps& ops : launched) {
    std::vector<int> parts(numbers.begin() + ops.first, numbers.begin() + ops.last + 1);
    for (size_t op : ops.also)
      if (op < ops.first && !has_launches(op)) parts.insert(parts.begin(), numbers[op]);
    times.push_back(timed(parts, ops.end - ops.begin));
    times.resize(ops.end);
  }
  hidden_ = b.hidden_tensor;
  std::vector<int> orders;
  for (const OpTime& each : times) {  // several launches of an op follow the one that names it
    int order = orders.empty() ? 0 : orders.back();
    for (int part : each.op.parts) order = part;
    for (Op kind : {Op::linear, Op::all_reduce})
      for (int part : each.op.parts)
        if (program_.ops()[part].is(kind)) order = part;
    orders.push_back(order);
  }
  times_.set(adapted, std::move(times));
  if (const std::vector<Aside> asides = asides_of(b, launched); limits_.graphs && !asides.empty()) {
    Binding side = binding(device_.side_queue());
    bind_all(side);
    set_aside(asides, b, side.launches, [this] { return beside_; }, b.launches);
  }
  forms_[adapted] = {std::move(b.launches), b.heads_from, std::move(orders)};
}

OpTime CudaRunner::timed(const std::vector<int>& ops, size_t launches) const {
  OpTime made;
  made.launches = (int)launches;
  for (int part : ops) {
    const OpNode& op = program_.ops()[part];
    if (op.is(Op::all_reduce) && !ranks_) continue;
    made.op.parts.push_back(part);
    made.op.name += (made.op.name.empty() ? "" : "+") + std::string(op.spec->name);
    if (op.is(Op::span_attention) || op.is(Op::latent_attention) || op.is(Op::compressed_attention))
      made.layer = &workspace_.cache_of(op);
  }
  return made;
}

void CudaRunner::begin(const Batch& batch, bool want_logits) {
  device_.use();
  if (states_) states_->copy(batch);
  if (batch.rows.empty()) return;
  if (states_) states_->begin(batch);
  if (workspace_.experts && workspace_.experts->hot()) workspace_.experts->hot()->between_steps();
  const bool heads = !forms_[0].heads_from || want_logits ||
                     std::any_of(batch.outputs.begin(), batch.outputs.end(),
                                 [](const Output& out) { return out.wanted != Wanted::nothing; });
  const int padded = limits_.graphs && heads && workspace_.samples() && pads(batch)
                         ? padded_rows((int)batch.rows.size(), limits_.most_padded_rows())
                         : 0;
  const Size size = workspace_.data->copy(batch, padded, states_ ? &states_->positions() : nullptr, device_);
  begun_ = {heads && workspace_.samples() && !batch.outputs.empty(), want_logits, profiling_ && times_.due(),
            size.adapted, 1 - begun_.turn};
  if (padded && !size.prefills() && !size.given && !begun_.timed && !streams(size))
    graphs_.run(size, [&] { launch(size, true, false, true); });
  else launch(size, heads, begun_.timed);
}

// A launch belongs to the part in which its op begins. Sums over ranks are in the same part on all of them.
void CudaRunner::begin_part(const Batch& batch, int from, int to) {
  device_.use();
  if (workspace_.samples() || batch.rows.empty())
    throw std::invalid_argument("step plan: steps that sample, or have no rows, do not run in parts");
  if (!from) part_size_ = workspace_.data->copy(batch, 0, nullptr, device_);
  begun_ = {};
  const Form& form = forms_[0];
  for (size_t i = 0; i < form.launches.size(); i++)
    if (const int position = form.orders[i] * kOpPositions; from <= position && position < to)
      form.launches[i](part_size_);
}

bool CudaRunner::sample(const Batch& batch) {
  device_.use();
  sampling_ = begun_;
  copy_hidden(batch);
  assign_samples(batch);
  if (sampling_.heads) {
    if (sampling_.timed) times_.mark(sampling_.turn, device_.stream());
    device_sampler_->queue(batch, sampled_by_);
    if (sampling_.timed) times_.mark(sampling_.turn, device_.stream());
    if (std::find(sampled_by_.begin(), sampled_by_.end(), SampledBy::argmax) != sampled_by_.end())
      check(cudaMemcpyAsync(host_argmax_.as(), workspace_.argmax.as(),
                            batch.outputs.size() * kArgmaxParts * sizeof(Argmax), cudaMemcpyDeviceToHost,
                            device_.stream()),
            "copying argmaxes");
    copy_logits(batch, sampling_.want_logits);
  }
  if (!sampled_) check(cudaEventCreateWithFlags(&sampled_, cudaEventDisableTiming), "making an event");
  check(cudaEventRecord(sampled_, device_.stream()), "recording an event");
  return std::find(sampled_by_.begin(), sampled_by_.end(), SampledBy::host) == sampled_by_.end();
}

bool CudaRunner::done() const { return cudaEventQuery(sampled_) != cudaErrorNotReady; }

RunOutput CudaRunner::finish(const Batch& batch) {
  device_.use();
  check(cudaEventSynchronize(sampled_), "a step on the GPU");
  if (ranks_) ranks_->exchange.check_waits();
  if (workspace_.experts) workspace_.experts->check_waits();
  if (sampling_.timed) add_times(batch);
  RunOutput output;
  const size_t outputs = batch.outputs.size();
  output.samples.resize(outputs);
  if (hidden_rows_) {
    output.hidden_width = workspace_.tensors[hidden_].rows.width;
    output.hidden = std::move(hidden_values_);
    const float* const from = host_hidden_.as<float>();
    share_work((int64_t)output.hidden.size(), output.hidden.size() * sizeof(float),
               [&](int64_t begin, int64_t end) { std::copy(from + begin, from + end, output.hidden.begin() + begin); });
  }
  if (!sampling_.heads) return output;
  const int width = logits().rows.width;
  if (sampling_.want_logits) {
    output.logits.assign(host_logits_.as<float>(), host_logits_.as<float>() + outputs * width);
    output.logit_width = width;
  }
  device_sampler_->take(output.samples);
  Batch rest;  // what the host samples
  bool any = false;
  rest.outputs = batch.outputs, rest.slots = batch.slots;
  for (size_t i = 0; i < outputs; i++) {
    if (sampled_by_[i] == SampledBy::host) any = true;
    else rest.outputs[i].wanted = Wanted::nothing;
    if (sampled_by_[i] != SampledBy::argmax) continue;
    const Argmax best = merged(host_argmax_.as<Argmax>() + i * kArgmaxParts);
    std::fill_n(output.samples[i].top_ids, kMaxTopLogprobs, -1);
    if (best.not_finite || best.token < 0) output.samples[i].status = SampleStatus::kNotFinite;
    else output.samples[i].token = best.token;
  }
  if (any) sampler_.sample(rest, output.samples);
  return output;
}

// Whether a step is padded, so that a graph may serve it: each sequence has few rows, and nearly all rows have outputs,
// or the head's weights take longer than its rows. All ranks decide alike.
bool CudaRunner::pads(const Batch& batch) const {
  constexpr size_t kFewRows = 64;
  const size_t rows = batch.rows.size();
  if ((int)rows > limits_.most_padded_rows() || (rows > kFewRows && rows != batch.outputs.size())) return false;
  return std::all_of(batch.items.begin(), batch.items.end(), [&](const Item& item) {
    return item.count <= (states_ ? kShortRows : kOwnRows) && !(item.flags & kHidden);
  });
}

// Whether experts are copied to the GPU in a step of this size, which graphs do not record.
bool CudaRunner::streams(const Size& size) const {
  const ExpertStream* const stream = workspace_.experts ? workspace_.experts->stream() : nullptr;
  return stream && stream->takes(size.rows);
}

// Decides who samples each output.
void CudaRunner::assign_samples(const Batch& batch) {
  sampled_by_.clear();
  for (const Output& out : batch.outputs) {
    if (out.wanted == Wanted::nothing) sampled_by_.push_back(SampledBy::nobody);
    else if (out.wanted == Wanted::sample && is_greedy(batch.slot(out.slot).sampling, out))
      sampled_by_.push_back(SampledBy::argmax);
    else sampled_by_.push_back(SampledBy::device);
  }
}

// Queues the copy of the logits that the host samples from; all: of all logits.
void CudaRunner::copy_logits(const Batch& batch, bool all) {
  const size_t width = logits().rows.width;
  const auto wanted = [&](size_t i) { return all || sampled_by_[i] == SampledBy::host; };
  for (size_t begin = 0, end; begin < batch.outputs.size(); begin = end) {
    for (end = begin; end < batch.outputs.size() && wanted(end); end++) {}
    if (end > begin)
      check(cudaMemcpyAsync(host_logits_.as<float>() + begin * width, logits().values() + begin * width,
                            (end - begin) * width * sizeof(float), cudaMemcpyDeviceToHost, device_.stream()),
            "copying logits");
    else end++;
  }
}

// Queues the copy of hidden states for the items that request them.
void CudaRunner::copy_hidden(const Batch& batch) {
  hidden_rows_ = 0;
  if (hidden_ < 0) return;
  const Rows& from = workspace_.tensors[hidden_].rows;
  for (const Item& item : batch.items) {
    const size_t rows = item.outputs - item.drafts;  // drafts may be rejected
    if (!(item.flags & kHidden) || !rows) continue;
    check(cudaMemcpyAsync(host_hidden_.as<float>() + hidden_rows_ * from.width,
                          from.values + (size_t)item.output * from.width, rows * from.width * sizeof(float),
                          cudaMemcpyDeviceToHost, device_.stream()),
          "copying hidden states");
    hidden_rows_ += rows;
  }
  hidden_values_.resize(hidden_rows_ * from.width);  // the first touch of its memory takes time, while the GPU computes
}

void CudaRunner::launch(const Size& size, bool heads, bool timed, bool beside) {
  const Form& form = forms_[size.adapted];
  beside_ = beside;
  if (timed) times_.begin(begun_.turn);
  for (size_t i = 0; i < (heads ? form.launches.size() : form.heads_from); i++) {
    if (timed) times_.mark(begun_.turn, device_.stream());
    form.launches[i](size);
  }
  if (timed) times_.mark(begun_.turn, device_.stream());
}

// Adds the times of the step whose samples were just copied.
void CudaRunner::add_times(const Batch& batch) {
  StepSize size;
  size.rows = (double)batch.rows.size(), size.outputs = (double)batch.outputs.size();
  size.world = ranks_ ? ranks_->communicator.size() : 1;
  size.weight_bytes = weights_.sizes();
  const Form& form = forms_[sampling_.form];
  times_.add(sampling_.turn, sampling_.form, sampling_.heads ? form.launches.size() : form.heads_from, sampling_.heads,
             batch, size);
}

void CudaRunner::set_profiling(bool on) {
  profiling_ = on;
  if (on) times_.clear();
}

std::pair<int, int> CudaRunner::warm_up(int count) {
  device_.use();
  if (warm_sizes_.empty()) {
    warm_sizes_ = warm_up_sizes(workspace_, !forms_[1].launches.empty(), ranks_.has_value());
    if (device_sampler_) device_sampler_->warm_up();
  }
  const int all = (int)warm_sizes_.size();
  ExpertStream* const stream = workspace_.experts ? workspace_.experts->stream() : nullptr;
  if (stream) stream->set_idle(true);
  for (; count > 0 && warmed_ < all; count--, warmed_++) {
    const bool decodes = limits_.graphs && !warm_sizes_[warmed_].prefill_tiles,
               graph = decodes && !streams(warm_sizes_[warmed_]);
    // All ranks run as many steps, because their kernels wait for each other, also where only one copies experts. The
    // first step of a size loads kernels.
    for (int i = 0; i < (decodes ? 2 : 1); i++) {
      const Size size = workspace_.data->copy_idle(warm_sizes_[warmed_], device_);
      if (graph && (graphs_.has(size) || graphs_.has_room()))
        graphs_.run(size, [&] { launch(size, true, false, true); });
      else launch(size, true);
      device_.wait();
      if (ranks_) ranks_->exchange.check_waits();
      if (workspace_.experts) workspace_.experts->check_waits();
    }
  }
  if (stream) stream->set_idle(false);
  return {warmed_, all};
}

}  // namespace as::cuda
