// Experts that lie in the memory of ranks on CPUs, computed by the model's GPU in steps with many rows: their panels
// are copied over PCIe, the next ones while those before are computed. The bits are those that the ranks return.
//
// Ranks may compute some of each layer's experts meanwhile, those with the fewest uses in such steps so far, and return
// their entries.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "comm/expert_exchange.h"
#include "comm/expert_split.h"
#include "cuda/exact_layer.h"
#include "cuda/kernels/moe/dispatch.h"
#include "cuda/memory/device.h"

namespace as::cuda {

struct StreamLimits {
  int rows = 0, top = 0;  // of the largest step, and experts of a row
  size_t bytes = 0;       // of the GPU's memory that may be taken
  int first_rows = -1;    // rows of a step from which on experts are copied; -1: chosen from measured speeds; 0: never
  int by_ranks = -1;   // a layer's experts that ranks compute in such steps; -1: chosen from measured speeds and uses
  int split_rows = 0;  // of the largest step in which ranks compute any
};

// Experts that the GPU has already, which need not be copied.
class PresentExperts {
 public:
  virtual ~PresentExperts() = default;
  virtual bool has(int layer, int expert) const = 0;
  // On the GPU: [experts] not 0 for those that it has, of a layer.
  virtual const int* flags(int layer) const = 0;
  // On the GPU: addresses of the panels of each expert of a rank; null: it does not have them.
  virtual const char* const* panels(int layer, int rank, bool down) const = 0;
};

// Groups the entries of a rank's experts [begin, end), as exact_layer.h takes them, in an own routing. chosen: the
// experts of each row in entry_of, negative for padding rows, and their weights.
void group_choices(const Routing& chosen, int begin, int end, int rows, Routing& own, const Queue& queue);

class ExpertStream {
 public:
  struct Layer : ExactLayer {
    int begin = 0, end = 0;                // experts
    uint64_t gate_up_at = 0, down_at = 0;  // in the rank's memory
  };

  // Pins the ranks' memory and measures how fast it is copied. exchange: with these ranks, connected before the first
  // step. Throws std::invalid_argument if experts have no exact recipe or the GPU's memory does not suffice, and
  // std::runtime_error if the memory cannot be pinned in time.
  ExpertStream(const Device& device, std::shared_ptr<const ExpertPanels> panels,
               std::shared_ptr<const ExpertExchange> exchange, const StreamLimits& limits);
  ~ExpertStream();
  ExpertStream(const ExpertStream&) = delete;
  ExpertStream& operator=(const ExpertStream&) = delete;

  bool takes(int rows) const { return rows >= first_rows_; }
  int first_rows() const { return first_rows_; }
  // Before the first layer of a step whose experts are copied: chooses those that ranks compute. last_rows: of the last
  // layer, whose experts are not copied if it has too few.
  void begin_step(int rows, int last_rows);
  // Whether ranks compute some in the latest step; multiply() is for such steps, run() for others.
  bool is_split() const { return is_split_; }
  int largest_split() const { return split_.empty() ? 0 : std::min(limits_.split_rows, limits_.rows); }  // rows
  int layers() const { return panels_->layers(); }
  int ranks() const { return panels_->ranks(); }
  int experts() const { return experts_; }  // of a layer, on all ranks
  const Layer& layer(int rank, int number) const { return layers_[rank][number]; }
  char* scratch() const { return scratch_; }  // of exact_layer_bytes(), for the largest step
  // Queues the copy of a part of a rank's matrices.
  void copy(char* to, int rank, uint64_t at, size_t bytes, cudaStream_t stream) const;
  double bandwidth() const { return bandwidth_; }              // bytes/s over PCIe
  double pinning_seconds() const { return pinning_seconds_; }  // that pinning took
  // Rows, over all layers, that were computed here. Any thread may call it.
  int64_t computed_rows() const { return computed_rows_.load(std::memory_order_relaxed); }
  int64_t split_rows() const { return split_rows_; }        // those of them some of whose experts ranks computed
  int64_t split_experts() const { return split_experts_; }  // how many these were, of all layers and steps
  const ExpertRates& rates() const { return rates_; }
  // Throws std::invalid_argument unless the layer takes rows of such widths with `top` experts each.
  void check_layer(int layer, int width, int sum_width, int top) const;
  // give_back() frees most of the GPU's memory while no step runs; take_again() allocates it again, and throws
  // std::runtime_error if memory runs out. A second call does nothing.
  void give_back() { memory_.give_back(); }
  void take_again() { memory_.take_again(); }
  // Whether run() and multiply() are of a step whose rows are all padding: they copy nothing.
  void set_idle(bool idle) { idle_ = idle; }
  // Experts that are not copied; they must outlive the last step. null: there are none.
  void set_present(const PresentExperts* present) { present_ = present; }
  // y [rows, width] = the sums of all ranks of experts, added in rank order. x [rows, width]. chosen: the experts of
  // each row in entry_of, negative for padding rows, and their weights.
  void run(int layer, const float* x, const Routing& chosen, int rows, float* y);
  // The entries of the experts that ranks do not compute; and where all entries meet.
  void multiply(int layer, const float* x, const Routing& chosen, int rows);
  MetEntries met(int layer, const Routing& chosen, int rows) const;
  // Counts the uses of a layer's experts, for later steps.
  void count(int layer, const Routing& chosen, int rows);

 private:
  struct Slot {  // of the ring of experts
    cudaEvent_t copied = nullptr, used = nullptr;
  };

  void pin();
  void release();
  void place(const StreamLimits& limits);
  void measure();
  ExpertRates measured_rates() const;
  void read_uses();
  void learn();
  MultiplyExperts products(int layer, int rank, int entries);
  float* entries_of(int layer, int rank, int rows) const;
  void multiply_copied(int layer, int rank, bool down, ExactGemm& p, int entries);

  const Device& device_;
  const std::shared_ptr<const ExpertPanels> panels_;
  const std::shared_ptr<const ExpertExchange> exchange_;
  std::vector<std::vector<Layer>> layers_;  // by rank
  std::vector<char*> pinned_;
  cudaStream_t copies_ = nullptr;
  std::vector<Slot> slots_;
  size_t slot_bytes_ = 0;
  unsigned next_ = 0;      // slot
  Memory fixed_, memory_;  // biases and orders; the rest
  char *ring_ = nullptr, *scratch_ = nullptr;
  Routing routing_;
  struct Entries {  // of a rank, where entries meet; the last rank's are in scratch_
    Routing routing;
    float* values = nullptr;
  };
  std::vector<Entries> split_;   // by rank
  std::vector<ExpertSet> sets_;  // by layer: that ranks compute
  bool is_split_ = false;
  int copied_layers_ = 0;  // of the latest step
  Memory uses_, seen_;     // [layers, experts]; and on the host
  cudaEvent_t counted_ = nullptr;
  bool counting_ = false;
  std::vector<uint32_t> before_;
  std::vector<float> scores_;
  const StreamLimits limits_;
  ExpertRates rates_;
  struct Shared {  // since ranks were last learned from
    int64_t messages = 0;
    int rows = 0;                // of the latest step
    std::vector<double> timed;   // seconds of each rank, by the times that were measured
    std::vector<int64_t> until;  // nanoseconds of each rank by then
  } shared_;
  int64_t learned_messages_ = 0;
  const PresentExperts* present_ = nullptr;
  int experts_ = 0;  // of a layer, on all ranks
  int first_rows_ = 0;
  double bandwidth_ = 0, pinning_seconds_ = 0;
  std::atomic<int64_t> computed_rows_{0};
  int64_t split_rows_ = 0, split_experts_ = 0;
  bool idle_ = false;
};

}  // namespace as::cuda
