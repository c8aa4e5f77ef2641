// Experts that lie in the memory of ranks on CPUs, computed by the model's GPU in steps with many rows: their panels
// are copied over PCIe, the next ones while those before are computed. The bits are those that the ranks return.
#pragma once
#include <memory>
#include <vector>

#include "comm/expert_panels.h"
#include "cuda/exact_layer.h"
#include "cuda/memory/device.h"

namespace as::cuda {

struct StreamLimits {
  int rows = 0, top = 0;  // of the largest step, and experts of a row
  size_t bytes = 0;       // of the GPU's memory that may be taken
  int first_rows = -1;    // rows of a step from which on experts are copied; -1: chosen from measured speeds; 0: never
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

  // Pins the ranks' memory and measures how fast it is copied. Throws std::invalid_argument if experts have no exact
  // recipe or the GPU's memory does not suffice, and std::runtime_error if the memory cannot be pinned in time.
  ExpertStream(const Device& device, std::shared_ptr<const ExpertPanels> panels, const StreamLimits& limits);
  ~ExpertStream();
  ExpertStream(const ExpertStream&) = delete;
  ExpertStream& operator=(const ExpertStream&) = delete;

  bool takes(int rows) const { return rows >= first_rows_; }
  int first_rows() const { return first_rows_; }
  int layers() const { return panels_->layers(); }
  int ranks() const { return panels_->ranks(); }
  int experts() const { return experts_; }  // of a layer, on all ranks
  const Layer& layer(int rank, int number) const { return layers_[rank][number]; }
  char* scratch() const { return scratch_; }  // of exact_layer_bytes(), for the largest step
  // Queues the copy of a part of a rank's matrices.
  void copy(char* to, int rank, uint64_t at, size_t bytes, cudaStream_t stream) const;
  double bandwidth() const { return bandwidth_; }              // bytes/s over PCIe
  double pinning_seconds() const { return pinning_seconds_; }  // that pinning took
  // Rows, over all layers, that were computed here.
  int64_t computed_rows() const { return computed_rows_; }
  // Throws std::invalid_argument unless the layer takes rows of such widths with `top` experts each.
  void check_layer(int layer, int width, int sum_width, int top) const;
  // give_back() frees most of the GPU's memory while no step runs; take_again() allocates it again, and throws
  // std::runtime_error if memory runs out. A second call does nothing.
  void give_back() { memory_.give_back(); }
  void take_again() { memory_.take_again(); }
  // Whether run() is of a step whose rows are all padding: it copies nothing.
  void set_idle(bool idle) { idle_ = idle; }
  // y [rows, width] = the sums of all ranks of experts, added in rank order. x [rows, width]. chosen: the experts of
  // each row in entry_of, negative for padding rows, and their weights.
  void run(int layer, const float* x, const Routing& chosen, int rows, float* y);

 private:
  struct Slot {  // of the ring of experts
    cudaEvent_t copied = nullptr, used = nullptr;
  };

  void pin();
  void release();
  void place(const StreamLimits& limits);
  void measure();
  int chosen_rows(const StreamLimits& limits) const;
  void multiply(int rank, ExactGemm& p, uint64_t at, int entries);

  const Device& device_;
  const std::shared_ptr<const ExpertPanels> panels_;
  std::vector<std::vector<Layer>> layers_;  // by rank
  std::vector<char*> pinned_;
  cudaStream_t copies_ = nullptr;
  std::vector<Slot> slots_;
  size_t slot_bytes_ = 0;
  unsigned next_ = 0;      // slot
  Memory fixed_, memory_;  // biases and orders; the rest
  char *ring_ = nullptr, *scratch_ = nullptr;
  Routing routing_;
  int experts_ = 0;  // of a layer, on all ranks
  int first_rows_ = 0;
  double bandwidth_ = 0, pinning_seconds_ = 0;
  int64_t computed_rows_ = 0;
  bool idle_ = false;
};

}  // namespace as::cuda
