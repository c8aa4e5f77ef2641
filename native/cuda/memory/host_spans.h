// The second tier of the prefix cache: pinned host memory. Kernels read and write it in stream order with the steps.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device.h"

namespace as::cuda {

class HostSpans : public SpanStore {
 public:
  // layers: caches with cache_spans spans each. The device and the caches must outlive this.
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
  size_t largest_ = 0;  // bytes of the largest layer's part of a span
  std::vector<SpanKey> keys_;
  Memory memory_, parts_;
  struct Turn {
    Memory pairs;
    cudaEvent_t began, ended;
  };
  Turn turns_[2];  // one may still be copied when the next is queued
  Memory copies_;
  int turn_ = 0, under_way_ = 0;
};

}  // namespace as::cuda
