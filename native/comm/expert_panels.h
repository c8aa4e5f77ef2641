// How ranks of experts lay out their matrices in memory, and how the model's rank of a mixed group finds them, so that
// its GPU can copy and compute them (cuda/expert_stream.h).
//
// A rank of experts keeps its matrices in a SharedBlock. It describes them in another one, which the model's rank reads
// when ranks connect. What the CUDA backend calls is defined here, because it is a library of its own.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "comm/shared_block.h"
#include "cpu/kernels/format.h"

namespace as {

// A layer's experts on a rank: the slices of a matrix of each, one after the other.
struct ExpertStack {
  Packed layout;                 // of an expert, without addresses
  uint64_t panels = 0;           // bytes from the beginning of the rank's matrices to the first expert
  uint64_t bias = 0, order = 0;  // bytes from the beginning of the description: floats [experts, n]; layout.order's
                                 // integers [k]; 0: there are none

  size_t bytes() const { return (size_t)layout.panels() * layout.panel_bytes; }  // of an expert
};

// What comes of the two halves of a row, gate and up.
enum class ExpertGate : int32_t { silu, gelu_tanh, gelu, clamped_silu };

struct ExpertLayer {
  int begin = 0, end = 0;  // the rank's experts
  ExpertGate gate = ExpertGate::silu;
  float alpha = 0, limit = 0;  // of clamped_silu
  ExpertStack gate_up, down;

  int experts() const { return end - begin; }
};

// Numbers of rows for which a rank measures how long it takes for an expert.
constexpr int kTimedRows[] = {4, 16, 64, 256};
constexpr int kTimings = sizeof kTimedRows / sizeof *kTimedRows;

// The beginning of a description. The layers follow, then biases and orders.
struct ExpertDescription {
  int64_t layers = 0;
  double seconds[kTimings] = {};  // that an expert of the first layer takes with kTimedRows rows
};

class ExpertPanels {
 public:
  // For a rank of experts: the address by which others find its matrices, of which the first `bytes` bytes are used,
  // and the description.
  static std::string address(const SharedBlock& matrices, size_t bytes, const SharedBlock& description);

  // For the model's rank: opens the memory of all ranks of experts. addresses: theirs, in order. Throws
  // std::invalid_argument.
  explicit ExpertPanels(const std::vector<std::string>& addresses);

  int ranks() const { return (int)ranks_.size(); }
  int layers() const { return (int)description(0).layers; }
  const ExpertLayer& layer(int rank, int number) const {
    return reinterpret_cast<const ExpertLayer*>(ranks_[rank].description.data() + sizeof(ExpertDescription))[number];
  }
  double seconds(int rank, int timing) const { return description(rank).seconds[timing]; }
  // A rank's matrices; its first expert in a stack.
  char* matrices(int rank) const { return ranks_[rank].matrices.data(); }
  size_t matrices_bytes(int rank) const { return ranks_[rank].bytes; }
  // Null if there are none.
  const float* bias(int rank, const ExpertStack& stack) const {
    return stack.bias ? reinterpret_cast<const float*>(ranks_[rank].description.data() + stack.bias) : nullptr;
  }
  const int* order(int rank, const ExpertStack& stack) const {
    return stack.order ? reinterpret_cast<const int*>(ranks_[rank].description.data() + stack.order) : nullptr;
  }

 private:
  struct Rank {
    SharedBlock matrices, description;
    size_t bytes;  // of matrices
  };
  struct Address;

  const ExpertDescription& description(int rank) const {
    return *reinterpret_cast<const ExpertDescription*>(ranks_[rank].description.data());
  }
  void check(int rank) const;

  std::vector<Rank> ranks_;
};

}  // namespace as
