#include "cuda/step/graphs.h"

namespace as::cuda {
namespace {

constexpr size_t kReserve = 256 << 20;  // bytes of the device's memory that graphs recorded in advance leave

}  // namespace

StepGraphs::~StepGraphs() {
  for (auto& [size, graph] : graphs_)
    if (graph) cudaGraphExecDestroy(graph);
}

bool StepGraphs::has(const Size& size) const {
  const auto found = graphs_.find(size);
  return found != graphs_.end() && found->second;
}

bool StepGraphs::has_room() const { return records_ && device_.free_bytes() >= kReserve; }

void StepGraphs::run(const Size& size, const std::function<void()>& launch) {
  if (!records_ && !graphs_.count(size)) return launch();
  const auto [found, first] = graphs_.try_emplace(size, nullptr);
  if (first) return launch();
  cudaGraphExec_t& graph = found->second;
  cudaError_t result = graph ? cudaSuccess : record(launch, &graph);
  if (result == cudaSuccess) result = cudaGraphLaunch(graph, device_.stream());
  if (result != cudaErrorMemoryAllocation) return check(result, "replaying a step");
  // There is no memory for a graph, or for its first launch: this step and later sizes run launch by launch.
  cudaGetLastError();
  if (graph) cudaGraphExecDestroy(graph);
  records_ = false, graphs_.erase(found);
  launch();
}

// Records launches as a graph. Returns why it could not be made.
cudaError_t StepGraphs::record(const std::function<void()>& launch, cudaGraphExec_t* graph) const {
  cudaGraph_t recorded = nullptr;
  check(cudaStreamBeginCapture(device_.stream(), cudaStreamCaptureModeThreadLocal), "recording a step");
  try {
    launch();
  } catch (...) {
    cudaStreamEndCapture(device_.stream(), &recorded);
    if (recorded) cudaGraphDestroy(recorded);
    throw;
  }
  check(cudaStreamEndCapture(device_.stream(), &recorded), "recording a step");
  const cudaError_t made = cudaGraphInstantiate(graph, recorded, 0);
  cudaGraphDestroy(recorded);
  return made;
}

}  // namespace as::cuda
