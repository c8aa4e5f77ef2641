// Copies of states between slots' pages and spans of the cache.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 256, kEach = 4, kMostSpans = 768;  // kMostSpans: as many as a launch's arguments can have

struct Spans {
  int first, count;  // first: of these spans among those of the state
  int32_t ids[kMostSpans];
};

__global__ void __launch_bounds__(kThreads)
    copy_state_kernel(const StatePart* parts, const SpanLayer* layers, int layer_count, size_t span_bytes, int slot,
                      bool to_spans, const __grid_constant__ Spans spans) {
  after_previous();
  const StatePart part = parts[blockIdx.y];
  char* page = part.pages + slot * part.stride;
  for (int k = 0; k < kEach; k++) {
    const size_t at = (((size_t)blockIdx.x * kEach + k) * kThreads + threadIdx.x) * sizeof(uint4);
    if (at >= part.bytes) return;
    const size_t offset = part.offset + at, within = offset % span_bytes;
    const int span = (int)(offset / span_bytes) - spans.first;
    if (span < 0 || span >= spans.count) continue;
    int layer = 0;
    while (layer + 1 < layer_count && layers[layer + 1].offset <= within) layer++;
    char* place = layers[layer].data + spans.ids[span] * layers[layer].bytes + within - layers[layer].offset;
    uint4 *from = reinterpret_cast<uint4*>(to_spans ? page + at : place),
          *to = reinterpret_cast<uint4*>(to_spans ? place : page + at);
    *to = *from;
  }
}

}  // namespace

void copy_state(const StatePart* parts, int part_count, size_t largest, const SpanLayer* layers, int layer_count,
                size_t span_bytes, int slot, const int32_t* spans, int count, bool to_spans, const Queue& queue) {
  Spans some;
  for (some.first = 0; some.first < count; some.first += some.count) {
    some.count = count - some.first < kMostSpans ? count - some.first : kMostSpans;
    for (int i = 0; i < some.count; i++) some.ids[i] = spans[some.first + i];
    start(queue, copy_state_kernel, dim3(ceil_div(largest, kThreads * kEach * (int)sizeof(uint4)), part_count),
          kThreads, 0, parts, layers, layer_count, span_bytes, slot, to_spans, some);
  }
}

}  // namespace as::cuda
