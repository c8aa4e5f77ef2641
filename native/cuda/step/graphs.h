// CUDA graphs of decode steps. A graph replays all launches of a step at the cost of one.
#pragma once
#include <functional>
#include <map>

#include "cuda/step/step_data.h"

namespace as::cuda {

class StepGraphs {
 public:
  using Size = StepData::Size;

  explicit StepGraphs(const Device& device) : device_(device) {}
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Runs the launches of a step, which depend on its size alone. The first step of a size runs launch by launch, which
  // loads its kernels; the second is recorded, and later ones replay it.
  void run(const Size& size, const std::function<void()>& launch);
  // Whether steps of a size are replayed.
  bool has(const Size& size) const;
  // Whether the device has room for another graph besides what steps allocate.
  bool has_room() const;

 private:
  // Graphs by size; null: the step has run once, launch by launch.
  using Graphs = std::map<Size, cudaGraphExec_t>;

  cudaError_t record(const std::function<void()>& launch, cudaGraphExec_t* graph) const;

  const Device& device_;
  Graphs graphs_;
  bool records_ = true;  // false: memory for another graph ran out
};

}  // namespace as::cuda
