#include "cuda/memory/timing.h"

#include <algorithm>
#include <vector>

namespace as::cuda {
namespace {

struct Event {
  cudaEvent_t event = nullptr;
  Event() { check(cudaEventCreate(&event), "making an event"); }
  ~Event() { cudaEventDestroy(event); }
};

}  // namespace

Seconds seconds_of(const Device& device, int times, const std::function<void()>& work,
                   const std::function<void()>& prepare) {
  const Event begin, end;
  std::vector<double> all;
  for (int i = 0; i <= times; i++) {
    if (prepare) prepare();
    check(cudaEventRecord(begin.event, device.stream()), "timing");
    work();
    check(cudaEventRecord(end.event, device.stream()), "timing");
    device.wait();
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "timing");
    if (i) all.push_back(1e-3 * milliseconds);
  }
  std::sort(all.begin(), all.end());
  return {all.front(), all[all.size() / 2]};
}

}  // namespace as::cuda
