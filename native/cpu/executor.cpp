#include "cpu/executor.h"

#include <algorithm>
#include <climits>
#include <stdexcept>

#include "comm/expert_exchange.h"
#include "cpu/ops/gemm.h"

namespace as {
Executor::Executor(int rank, int world, std::shared_ptr<SharedMemory> shared_memory, std::vector<int> cpus, int threads)
    : rank_(rank),
      world_(world),
      shared_memory_(std::move(shared_memory)),
      pool_(std::make_shared<Pool>(threads, std::move(cpus), shared_memory_ ? shared_memory_->spin() : true)),
      weights_(*pool_, kernels()) {
  if (world < 1 || rank < 0 || rank >= world)
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in 0..." + std::to_string(world - 1));
  if (world > 1 && !shared_memory_) throw std::invalid_argument("a group of several ranks needs shared memory");
}

Executor::Executor(Sibling, const Executor& other)
    : rank_(other.rank_),
      world_(other.world_),
      shared_memory_(other.shared_memory_),
      pool_(other.pool_),
      weights_(*pool_, kernels()) {}

int Executor::add_matrix(int out_features, int in_features, const std::string& dtype, int group_size, int experts,
                         const ScaleLayout& scaling, std::vector<int> order) {
  const int id = weights_.add_matrix(out_features, in_features, dtype, group_size, experts, scaling, std::move(order));
  program_.add_matrix(out_features, in_features, dtype, group_size, scaling);
  return id;
}

int Executor::add_vector(std::vector<float> values) {
  program_.add_vector((int)values.size());
  return weights_.add_vector(std::move(values));
}

int Executor::share_matrix(const Executor& other, int id) {
  if (other.pool_ != pool_) throw std::invalid_argument("share_matrix: the models do not share threads");
  const int own = weights_.share_matrix(other.weights_, id);
  program_.add_weight(other.program_.weights()[id]);
  return own;
}

void Executor::allocate(const RunnerLimits& limits, const CacheLimits& cache, bool fused,
                        std::vector<std::shared_ptr<Executor>> drafts, int masks, const AdapterLimits& adapters,
                        bool queued) {
  std::vector<const Model*> models;
  for (const auto& draft : drafts) {
    if (!draft->runner_) throw std::invalid_argument("allocate() of the draft model comes first");
    models.push_back(draft.get());
  }
  check_drafts(models, limits.max_rows, limits.max_slots);
  if (exchange_) exchange_->check_connected();
  if (exchange_ && (queued || !drafts.empty() || adapters.count))
    throw std::invalid_argument("a mixed group has no queued steps, no drafts by a model and no adapters");
  drafts_ = std::move(drafts);
  allocate_masks(masks, rank_ == 0);
  check_adapters(adapters.count, adapters.max_rank, INT_MAX);
  adapters_ = adapters.count ? std::make_unique<Adapters>(adapters) : nullptr;
  RunnerLimits own = limits;
  own.draft_layers = std::max((int)drafts_.size(), 1);
  runner_ = std::make_unique<CpuRunner>(core(), program_, weights_, own, cache, fused, masks_.get(), adapters_.get());
  slot_limits_ = {limits.max_rows,
                  limits.max_outputs,
                  limits.max_slots,
                  limits.max_length,
                  cache.span_size,
                  cache.num_spans,
                  program_.windows(),
                  masks,
                  runner_->hidden_states(),
                  0,
                  std::vector<char>(adapters.count),
                  runner_->state_spans(),
                  needs_whole_sequences(),
                  merged_rows(),
                  queued ? 0 : given_width(),
                  true,
                  sees_images_whole()};
  for (const auto& draft : drafts_) draft->runner_->share_states(*runner_);
  if (queued) asynchronous_.emplace(*runner_);
  make_decoder();
}

void Executor::make_decoder() {
  std::unique_ptr<Drafter> drafter;
  std::vector<Runner*> programs;
  for (const auto& draft : drafts_) programs.push_back(draft->runner_.get());
  if (!drafts_.empty()) drafter = make_drafter(programs, drafts_.front()->is_draft_head(), slot_limits_);
  if (asynchronous_) queued_.emplace(*asynchronous_, std::move(drafter), host_cache_.get(), slot_limits_);
  else decoder_.emplace(*runner_, std::move(drafter), host_cache_.get(), slot_limits_);
}

std::shared_ptr<Adapter> Executor::new_adapter() const {
  if (!adapters_) throw std::invalid_argument("there is no room for adapters");
  return std::make_shared<Adapter>(adapters_->limits, adapter_targets());
}

void Executor::set_adapter(int index, std::shared_ptr<const Adapter> adapter) {
  if (!runner_) throw std::invalid_argument("allocate() before set_adapter()");
  check_adapter(index);
  slot_limits_.adapters[index] = adapter != nullptr;
  if (queued_) queued_->set_adapter(index, adapter != nullptr);
  else decoder_->set_adapter(index, adapter != nullptr);
  adapters_->set(index, std::move(adapter));
}

std::vector<const SpanCache*> Executor::caches() const {
  if (!runner_) throw std::invalid_argument("allocate() before the second tier of its cache");
  std::vector<const SpanCache*> caches{&runner_->cache()};
  for (const auto& draft : drafts_) caches.push_back(&draft->runner_->cache());
  return caches;
}

void Executor::allocate_host_cache(int spans, int file, size_t offset) {
  host_cache_ = std::make_unique<HostCache>(caches(), *pool_, spans, file, offset);
  slot_limits_.host_spans = spans;
  make_decoder();
}

std::pair<std::vector<SpanCopy>, int> Executor::verify_host_cache() {
  if (!host_cache_) throw std::invalid_argument("there is no second tier");
  return host_cache_->verify();
}

StepOutput Executor::step(std::string_view plan, bool want_logits) {
  if (!runner_) throw std::invalid_argument("allocate() before step()");
  if (exchange_ && exchange_->holds_experts()) return compute_experts();
  struct End {  // also if the plan is rejected, which ranks of experts do not know
    ExpertExchange* exchange;
    ~End() {
      if (exchange) exchange->end_step();
    }
  } const end{exchange_.get()};
  if (queued_) return queued_->step(plan, want_logits);
  return decoder_->step(plan, want_logits);
}

StepOutput Executor::compute_experts() {
  struct Patience {
    Pool& pool;
    explicit Patience(Pool& pool) : pool(pool) { pool.set_patient(true); }
    ~Patience() { pool.set_patient(false); }
  } const patience(*pool_);
  description_.reset();  // the model's rank has read it before its first step
  exchange_->begin_step();
  while (exchange_->await_message()) {
    dispatched_.rows.resize(exchange_->message_rows()), dispatched_.outputs.resize(exchange_->message_outputs());
    // A message without rows: the GPU's step had only padding.
    if (dispatched_.rows.empty()) exchange_->take(), exchange_->send_sums();
    else runner_->run_experts(dispatched_, exchange_->message_layer());
  }
  return {};
}

void Executor::set_profiling(bool on) {
  if (runner_) runner_->set_profiling(on);
}

const std::vector<CpuRunner::Step>& Executor::steps() const {
  static const std::vector<CpuRunner::Step> none;
  return runner_ ? runner_->steps() : none;
}

void Executor::multiply(int id, const float* x, const float* bias, float* y, int rows) {
  multiply(id, 1, x, bias, y, rows);
}

// With the first `experts` matrices of a stack, one after the other: y is the last one's.
void Executor::multiply(int id, int experts, const float* x, const float* bias, float* y, int rows) {
  const Packed& m = weights_.matrix(id);
  const Core all = core();
  const size_t need = converted_bytes(all, m, rows);
  if (need > scratch_.size()) scratch_ = Buffer(need, "converted activations");
  Tensor input;
  input.data = const_cast<float*>(x), input.width = m.inputs;
  pool_->run([&](int thread) {
    Activations a;
    if (!activations(all, thread, m, input, rows, {0, rows}, scratch_, a)) return;
    const WorkUnit share = work_unit_of(thread, pool_->size(), m.panels(), rows);
    if (share.empty()) return;
    a.x += (size_t)share.r0 * m.inputs, a.converted += share.r0 * a.stride;
    for (int e = 0; e < experts; e++)
      all.k.matmul(weights_.matrix(id, e), a, bias, y + (size_t)share.r0 * m.n, m.n, share.r1 - share.r0, share.p0,
                   share.p1);
  });
}

std::vector<std::pair<const void*, size_t>> Executor::memory() const {
  auto all = weights_.memory();
  if (cache_bytes()) all.emplace_back(runner_->cache().memory().as(), cache_bytes());
  return all;
}

}  // namespace as
