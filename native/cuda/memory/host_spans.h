// The prefix cache's second tier: pinned memory of the host, which the GPU reads and writes by itself, in the order of
// the steps that are queued.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device.h"

namespace as {
namespace cuda {

class HostSpans : public SpanStore {
 public:
  // layers: of caches of so many spans; device and caches must outlive this.
  HostSpans(const Device& device, const std::vector<LayerCache>& layers, int cache_spans, int spans);
  ~HostSpans() override;

  static size_t span_bytes(const std::vector<LayerCache>& layers);

  int spans() const override { return (int)keys_.size(); }
  // Queues the copies.
  void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override;
  double finish() override;

 private:
  void queue(const std::vector<SpanCopy>& copies, bool saves, size_t first);

  const Device& device_;
  const int layers_;
  size_t largest_ = 0;  // part of a span, of one layer
  std::vector<SpanKey> keys_;
  Memory memory_, parts_;
  struct Turn {
    Memory pairs;
    cudaEvent_t began, ended;
  };
  Turn turns_[2];  // one may still be under way when the next is queued
  Memory copies_;
  int turn_ = 0, under_way_ = 0;
};

}  // namespace cuda
}  // namespace as
