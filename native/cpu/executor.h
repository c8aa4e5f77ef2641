// One rank's model on its CPUs: weights and program are added, then compiled, then run in steps.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/decoder.h"
#include "batch/model.h"
#include "comm/shared_block.h"
#include "comm/shared_memory.h"
#include "cpu/host_cache.h"
#include "cpu/pool.h"
#include "cpu/queued_runner.h"
#include "cpu/runner.h"
#include "cpu/weights.h"
#include "program/program.h"

namespace as {

struct Sibling {};  // names a constructor

class Executor : public Model {
 public:
  Executor(int rank, int world, std::shared_ptr<SharedMemory> shared_memory, std::vector<int> cpus, int threads);
  // A second model that shares the threads of `other`: they run in turn.
  Executor(Sibling, const Executor& other);

  // Ids number matrices and vectors together. dtype, order: see Weights. experts: size of a stack for expert_linear.
  int add_matrix(int out_features, int in_features, const std::string& dtype, int group_size, int experts = 1,
                 const ScaleLayout& scaling = {}, std::vector<int> order = {});
  int add_vector(std::vector<float> values);
  // The matrix `id` of `other`, which shares this model's threads and must outlive its use.
  int share_matrix(const Executor& other, int id);
  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }

  // For a rank of experts whose matrices the GPU of the model's rank may read: before add_matrix(), with the bytes that
  // all of them take; and after the program is built: the address by which that rank finds them (ExpertPanels). Throws
  // std::invalid_argument that says why a GPU cannot compute them.
  void share_matrices(size_t bytes) { weights_.share(bytes); }
  std::string describe_experts();
  // Before allocate(): with the other ranks of a mixed group. A program with return_sums is that of a rank of experts,
  // whose steps compute what it is sent.
  void set_exchange(std::shared_ptr<ExpertExchange> exchange) { exchange_ = std::move(exchange); }
  // Before allocate(): activations (silu and others) have the bits that they have on every device (kernels/silu.h).
  void use_exact_activations() { exact_ = true; }
  // Compiles the program; program and weights must not change afterwards. drafts: a draft model, or the layers of a
  // draft head, which share this one's threads and were allocated with the same spans. masks: how many plans may refer
  // to. adapters: limits, if the program has lora ops. queued: begin() queues steps, as on asynchronous devices, for
  // tests.
  void allocate(const RunnerLimits& limits, const CacheLimits& cache, bool fused = true,
                std::vector<std::shared_ptr<Executor>> drafts = {}, int masks = 0, const AdapterLimits& adapters = {},
                bool queued = false);
  // After allocate(): an empty adapter for this program. Any thread may fill it while steps run.
  std::shared_ptr<Adapter> new_adapter() const;
  // Called between steps: sets the adapter that plans refer to by this index. null: none.
  void set_adapter(int index, std::shared_ptr<const Adapter> adapter);
  // After allocate() and before any step: adds a second tier of `spans` spans for the cache and the drafters'
  // caches. file, offset: see HostCache.
  void allocate_host_cache(int spans, int file, size_t offset);
  std::pair<std::vector<SpanCopy>, int> verify_host_cache();
  size_t host_cache_bytes(int spans) const { return HostCache::bytes_for(caches(), spans); }
  StepOutput step(std::string_view plan, bool want_logits) override;
  bool begin(std::string_view plan) override { return queued_ && queued_->begin(plan); }
  void sample() override { queued_->sample(); }
  bool done() const override { return !queued_ || queued_->done(); }
  StepOutput finish() override { return queued_->finish(); }
  void set_profiling(bool on) override;
  // Empty before allocate().
  const std::vector<CpuRunner::Step>& steps() const;

  // y [rows, out features] = x w^T (+ bias) by all threads, for one matrix. For tests and microbenchmarks.
  void multiply(int id, const float* x, const float* bias, float* y, int rows);

  int64_t barriers() const { return pool_->barriers(); }  // barriers passed so far

  size_t cache_bytes() const { return runner_ ? runner_->cache().memory().size() : 0; }
  std::vector<std::pair<const void*, size_t>> memory()
      const;  // weights and cache, to check on which node their pages are

 private:
  std::vector<const SpanCache*> caches() const;
  void make_decoder();
  Core core() {
    return {rank_,
            world_,
            world_ > 1 ? shared_memory_.get() : nullptr,
            *pool_,
            exact_ ? *kernels().exact : kernels(),
            exchange_.get()};
  }
  StepOutput compute_experts();
  void multiply(int id, int experts, const float* x, const float* bias, float* y, int rows);
  double time_expert(int id, int rows);

  int rank_, world_;
  std::shared_ptr<SharedMemory> shared_memory_;
  std::shared_ptr<Pool> pool_;
  Weights weights_;
  std::shared_ptr<ExpertExchange> exchange_;
  bool exact_ = false;
  std::unique_ptr<SharedBlock> description_;  // until the first step
  Batch dispatched_;                          // of a rank of experts
  std::vector<std::shared_ptr<Executor>> drafts_;
  std::unique_ptr<Adapters> adapters_;
  std::unique_ptr<CpuRunner> runner_;
  std::unique_ptr<HostCache> host_cache_;
  std::optional<Decoder> decoder_;
  std::optional<QueuedCpuRunner> asynchronous_;  // of queued_
  std::optional<QueuedDecoder> queued_;          // in place of decoder_
  Buffer scratch_;                               // of multiply()
};

}  // namespace as
