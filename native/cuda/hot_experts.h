// Experts that are chosen most, in the GPU's memory: it computes their entries itself, while ranks of experts compute
// the others'. Which experts these are follows their use between steps; no bit depends on it.
#pragma once
#include <atomic>
#include <vector>

#include "cuda/expert_stream.h"
#include "cuda/kernels/moe/dispatch.h"

namespace as::cuda {

class HotExperts : public PresentExperts {
 public:
  // source: where experts are; it must outlive this. rows, top: as of StreamLimits. bytes: of the GPU's memory that may
  // be taken. Throws std::invalid_argument if no expert fits, and std::runtime_error if memory is short.
  HotExperts(const Device& device, ExpertStream& source, const StreamLimits& limits, size_t bytes);
  ~HotExperts() override;
  HotExperts(const HotExperts&) = delete;
  HotExperts& operator=(const HotExperts&) = delete;

  bool has(int layer, int expert) const override { return slot_of_[layer * experts_ + expert] >= 0; }
  const int* flags(int layer) const override { return on_gpu<int>(layers_[layer].hot); }
  const char* const* panels(int layer, int rank, bool down) const override {
    return on_gpu<const char*>((down ? layers_[layer].down : layers_[layer].gate_up)[rank]);
  }
  HotExpertsOfLayer of_layer(int layer);
  // Computes the entries of hot experts. x, chosen, rows: as of ExpertStream::run().
  void multiply(int layer, const float* x, const Routing& chosen, int rows);
  MetEntries met(int layer, const Routing& chosen) const;
  // Before a step is queued: moves experts by their use. Waits for nothing.
  void between_steps();

  // As of ExpertStream. Afterwards no expert is hot.
  void give_back();
  void take_again() { slots_.take_again(); }

  int capacity() const { return (int)expert_in_.size(); }  // experts that there is room for
  // Entries, and how many of them were of hot experts, as counted some steps ago. Any thread may call these.
  int64_t entries() const { return entries_.load(std::memory_order_relaxed); }
  int64_t hits() const { return hits_.load(std::memory_order_relaxed); }

 private:
  struct Tables {  // of a layer: bytes from the beginning of tables_
    size_t hot;
    std::vector<size_t> gate_up, down;  // by rank: addresses of its experts' panels
  };
  struct Move {
    int expert, slot;  // expert: its number among all layers'
  };
  enum class State { idle, counting, moving };

  template <typename T>
  T* on_gpu(size_t at) const {
    return reinterpret_cast<T*>(tables_.as() + at);
  }
  void weigh();
  void choose();
  void begin_moves();
  void set_hot(int expert, int slot);  // in host_tables_; slot -1: it is not hot
  void publish();

  const Device& device_;
  ExpertStream& source_;
  const int experts_;  // of a layer
  std::vector<Tables> layers_;
  size_t slot_bytes_ = 0;
  Memory tables_, host_tables_, uses_, seen_, rows_, slots_;
  std::vector<Routing> routings_;   // by rank
  std::vector<float*> entries_of_;  // by rank
  cudaStream_t copies_ = nullptr;
  cudaEvent_t counted_ = nullptr, published_ = nullptr, moved_ = nullptr;
  State state_ = State::idle;
  unsigned steps_ = 0;
  std::vector<uint32_t> before_;  // uses when they were last weighed
  std::vector<float> scores_;
  std::vector<int> slot_of_, expert_in_;  // -1: none
  std::vector<Move> moves_;
  std::atomic<int64_t> entries_{0}, hits_{0};
};

}  // namespace as::cuda
