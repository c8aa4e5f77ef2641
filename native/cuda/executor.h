// One rank's model on its GPU. Its weights and program are built, then compiled. Then it runs steps.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch/model.h"
#include "batch/queued_decoder.h"
#include "cuda/hot_experts.h"
#include "cuda/memory/host_spans.h"
#include "cuda/runner.h"

namespace as::cuda {

class CudaExecutor : public Model {
 public:
  // communicator: connects the ranks of a group; null: there is one rank. costs: of the GPU's kernels.
  CudaExecutor(int device, std::shared_ptr<LogitSampler> sampler, std::shared_ptr<Communicator> communicator = nullptr,
               const ChipCosts& costs = {});
  // Another model on the same GPU and stream; the two take turns. Without a communicator it is whole, also beside one
  // of several ranks: two sums a layer would take longer than a small model's weights, and ranks make the same drafts.
  CudaExecutor(const CudaExecutor& other, std::shared_ptr<LogitSampler> sampler,
               std::shared_ptr<Communicator> communicator = nullptr);
  ~CudaExecutor() override;

  int add_matrix(int rows, int k, const std::string& format, int group, int experts = 1,
                 const std::vector<int>& order = {});
  int add_vector(const std::vector<float>& values);
  // The matrix `id` of `other`, which is on the same GPU and must outlive its use.
  int share_matrix(const CudaExecutor& other, int id);
  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }
  const Device& device() const { return device_; }

  // With other ranks, after the program is built and before allocate(): share() returns the address of the memory that
  // other ranks access in steps of up to max_rows rows, max_outputs of them with outputs ("" with one rank); connect()
  // takes the addresses of all ranks, in rank order. seconds: how long the GPU waits for another rank.
  std::string share(int max_rows, int max_outputs, double seconds, bool by_host);
  void connect(const std::vector<std::string>& addresses);
  // Before allocate(): the connected exchange with ranks of experts, which the program dispatches rows to.
  void set_exchange(std::shared_ptr<ExpertExchange> exchange) { expert_exchange_ = std::move(exchange); }
  // After set_exchange(): the GPU computes the experts of steps with many rows itself, from the ranks' memory. Throws
  // as ExpertStream does, and then ranks of experts compute them.
  // hot_bytes: of the GPU's memory for experts that are chosen most, whose entries it computes in other steps; not 0:
  // ranks of experts return entries.
  void stream_experts(std::shared_ptr<const ExpertPanels> panels, const StreamLimits& limits, size_t hot_bytes);
  const ExpertStream* expert_stream() const { return expert_stream_.get(); }
  const HotExperts* hot_experts() const { return hot_experts_.get(); }
  // Whether allocate() has ended. Only then may threads that do not load read hot_experts() and expert_stream().
  bool allocated() const { return allocated_.load(std::memory_order_acquire); }
  // In a mixed group, since allocate(), before which all are 0: messages that the GPU has sent, nanoseconds until it
  // saw all answers to each, and in which each rank of experts has computed them. Any thread may call it.
  struct ExpertTimes {
    int64_t messages = 0, waited = 0;
    std::vector<int64_t> computed;
  };
  ExpertTimes expert_times() const;
  // Compiles the program; afterwards program and weights may not change. masks: how many masks plans may refer to.
  // adapters: how many adapters plans may refer to, if the program has ops for them. drafts: a draft model, or
  // the layers of a draft head, on the same GPU and allocated with the same spans.
  void allocate(const Limits& limits, int masks, const AdapterLimits& adapters = {},
                std::vector<std::shared_ptr<CudaExecutor>> drafts = {});
  // After allocate(): an empty adapter for this program. Any thread may fill it while steps run.
  std::shared_ptr<Adapter> new_adapter() const;
  // Sets the adapter with this index; null removes it. Only between steps, or while no plan refers to the index.
  void set_adapter(int index, std::shared_ptr<Adapter> adapter);
  // Adds a host cache, after allocate() and before any step. file: -1 for pinned memory; see SpanRecords.
  void allocate_host_cache(int spans, int file, size_t offset);
  std::pair<std::vector<SpanCopy>, int> verify_host_cache() const;  // of a file
  size_t host_cache_bytes(int spans) const { return SpanRecords::bytes_for(span_pieces(this->spans()), spans); }
  // After allocate(), between steps: unload() moves the weights to pinned host memory, and load() moves them back. The
  // cache's content is lost. A second call does nothing. Both throw std::runtime_error, and change nothing, if memory
  // runs out.
  void unload();
  void load();
  // After allocate(), between steps: CudaRunner::warm_up() of this model, and of its drafts'.
  std::pair<int, int> warm_up(int count);
  StepOutput step(std::string_view plan, bool want_logits) override;
  bool begin(std::string_view plan) override;
  void sample() override;
  bool done() const override { return !decoder_ || decoder_->done(); }
  StepOutput finish() override;
  void set_profiling(bool on) override;
  std::vector<OpTime> profile() const { return runner_ ? runner_->profile() : std::vector<OpTime>(); }
  // After allocate(): which kernels the program runs.
  std::vector<KernelTable::Row> kernels() const;
  // (expert, entries) of each tile of a row set in the last step.
  std::vector<std::pair<int, int>> expert_tiles(int row_set) const;
  size_t cache_bytes() const { return runner_ ? runner_->cache_bytes() : 0; }

  // Throws DeviceLost, as if a kernel's CTAs had waited in vain for each other, for tests.
  void stall();
  // y [rows, n] = x w^T (+ bias) with one matrix, for tests.
  // rounded: y is rounded to 16 bits, as partial sums of ranks are.
  std::vector<float> multiply(int id, const float* x, const float* bias, int rows, GemmAlgo algo, bool rounded = false);
  // y [rows, top, n]: each row times the matrices of its experts, chosen [rows, top] in ascending order, for tests.
  // tile_rows: 0 for the number that a step chooses. rounded: y is rounded to 16 bits, as entries are.
  std::vector<float> multiply_experts(int id, const float* x, const int* chosen, int rows, int top, GemmAlgo algo,
                                      int tile_rows, bool rounded = false);
  // y [rows, width] = the sum of parts [ranks, rows, width] (+ y), and normed = its norm, with all parts on this GPU.
  // way: as ranks read each other's parts: "read"; "pushed": those of ranks from 1 on are in the buffers that other
  // ranks push to; "host": by host memory, each rank in turn.
  void sum_ranks(const float* parts, int ranks, int rows, int width, const float* norm, const std::string& dtype,
                 bool adds, const std::string& way, float* y, float* normed);

 private:
  std::vector<SpanRange> spans() const;  // of this model and of its drafts
  void make_decoder();
  void check_loaded() const;
  void give_experts_back();
  struct EndOfStep;

  const std::shared_ptr<Device> shared_device_;
  Device& device_;
  std::shared_ptr<LogitSampler> sampler_;
  const std::shared_ptr<Communicator> communicator_;
  Weights weights_;
  std::unique_ptr<Exchange> exchange_;
  int shared_rows_ = 0, shared_outputs_ = 0;  // of share()
  bool unloaded_ = false;
  std::shared_ptr<ExpertExchange> expert_exchange_;
  std::unique_ptr<ExpertStream> expert_stream_;
  std::unique_ptr<HotExperts> hot_experts_;
  int streamed_rows_ = 0;  // of the largest step, of stream_experts()
  std::unique_ptr<ExpertRanks> expert_ranks_;
  std::unique_ptr<Adapters> adapters_;
  std::unique_ptr<CudaRunner> runner_;
  std::unique_ptr<SpanStore> host_spans_;
  const FileSpans* file_spans_ = nullptr;  // host_spans_, if it is a file
  std::vector<std::shared_ptr<CudaExecutor>> drafts_;
  std::deque<DraftRunner> draft_runners_;  // of drafts_
  std::optional<QueuedDecoder> decoder_;
  std::atomic<bool> allocated_{false};
};

}  // namespace as::cuda
