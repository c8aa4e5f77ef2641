// One rank's model on its GPU: weights and program as they are built, then compiled; steps.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/model.h"
#include "batch/queued_decoder.h"
#include "cuda/memory/host_spans.h"
#include "cuda/runner.h"
#include "cuda/step/drafting.h"

namespace as {
namespace cuda {

class CudaExecutor : public Model {
 public:
  // window: to the other ranks of a group; null: there are none.
  CudaExecutor(int device, std::shared_ptr<LogitSampler> sampler, std::shared_ptr<Communicator> window = nullptr);
  // Another model on the GPU of this one, in the same stream: they run in turn. std::invalid_argument where there are
  // other ranks.
  CudaExecutor(const CudaExecutor& beside, std::shared_ptr<LogitSampler> sampler);
  ~CudaExecutor() override;

  int add_matrix(int rows, int k, const std::string& format, int group, int experts = 1);
  int add_vector(const std::vector<float>& values);
  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }
  const Device& device() const { return device_; }

  // With other ranks, when the program is there and before allocate(): the address of what they need of this GPU's
  // memory in steps of up to so many rows, "" without any; and then the addresses of all, in rank order. seconds: how
  // long the GPU waits for another rank.
  std::string share(int max_rows, double seconds);
  void connect(const std::vector<std::string>& addresses);
  // Compiles the program. Neither program nor weights may change from then on. masks: how many there are for plans to
  // name. adapters: as many as plans may name, if the program has ops for them. draft: a model beside this one, which
  // was allocated with the same spans: it makes drafts, and begin() does nothing.
  void allocate(const Limits& limits, int masks, const AdapterLimits& adapters = {},
                std::shared_ptr<CudaExecutor> draft = nullptr);
  // After allocate(): an empty adapter for this program, to be filled by any thread, while steps run.
  std::shared_ptr<Adapter> new_adapter() const;
  // Between steps, or while none names this index: plans may name the adapter by it from now on; null: no longer.
  void set_adapter(int index, std::shared_ptr<Adapter> adapter);
  // A second tier of the cache, after allocate() and before any step.
  void allocate_host_cache(int spans);
  size_t host_cache_bytes(int spans) const { return spans * HostSpans::span_bytes(layers()); }
  // After allocate(), between steps: weights go to pinned memory of the host, and back; what the cache held is lost.
  // Nothing happens if they are where they are to go. Both throw std::runtime_error, and change nothing, where there is
  // not enough memory.
  void unload();
  void load();
  StepOutput step(const std::string& plan, bool want_logits) override;
  bool begin(const std::string& plan) override;
  void draw() override;
  bool done() const override { return !decoder_ || decoder_->done(); }
  StepOutput finish() override;
  void set_profiling(bool on) override;
  std::vector<OpTime> profile() const { return runner_ ? runner_->profile() : std::vector<OpTime>(); }
  // After allocate(): which kernels the program runs.
  std::vector<KernelTable::Row> kernels() const;
  // Of the last step: experts and numbers of entries, of each tile of a row set's.
  std::vector<std::pair<int, int>> expert_tiles(int row_set) const;
  size_t cache_bytes() const { return runner_ ? runner_->cache_bytes() : 0; }

  // y [rows, n] = x w^T (+ bias): one matrix alone, for tests.
  // rounded: to 16 bits, as the products of ranks leave their partial sums.
  std::vector<float> multiply(int id, const float* x, const float* bias, int rows, GemmAlgo algo, bool rounded = false);
  // y [rows, top, n]: of each row, by each of the experts chosen [rows, top] for it, ascending; a stack alone, for
  // tests. tile_rows: 0 for what a step would take.
  std::vector<float> multiply_experts(int id, const float* x, const int* chosen, int rows, int top, GemmAlgo algo,
                                      int tile_rows);
  // y [rows, width] = the sum of parts [ranks, rows, width] (+ y), and normed: the same normed; with all on this GPU.
  // pushed: the parts of ranks from 1 on have been.
  void sum_ranks(const float* parts, int ranks, int rows, int width, const float* norm, const std::string& dtype,
                 bool adds, bool pushed, float* y, float* normed);

 private:
  std::vector<LayerCache> layers() const;  // of this model, and of the draft model
  void make_decoder();
  void check_loaded() const;

  const std::shared_ptr<Device> shared_device_;
  Device& device_;
  std::shared_ptr<LogitSampler> sampler_;
  const std::shared_ptr<Communicator> window_;
  Weights weights_;
  std::unique_ptr<Exchange> exchange_;
  int shared_rows_ = 0;
  bool unloaded_ = false;
  std::unique_ptr<Adapters> adapters_;
  std::unique_ptr<CudaRunner> runner_;
  std::unique_ptr<HostSpans> host_spans_;
  std::shared_ptr<CudaExecutor> draft_;
  std::optional<QueuedDecoder> decoder_;  // this one,
  std::optional<Drafting> drafting_;      // or, with a draft model, this one
};

}  // namespace cuda
}  // namespace as
