// Copies of spans between the cache and pinned host memory.
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256, kEach = 16;
constexpr size_t kChunk = (size_t)kThreads * kEach * sizeof(uint4);  // bytes of a CTA

__global__ void __launch_bounds__(kThreads) copy_kernel(const SpanPart* parts, const SpanPair* pairs, bool saves) {
  after_previous();
  const SpanPart part = parts[blockIdx.y];
  const SpanPair pair = pairs[blockIdx.z];
  uint4* here = reinterpret_cast<uint4*>(part.cache + pair.span * part.bytes);
  uint4* there = reinterpret_cast<uint4*>(part.host + pair.host * part.host_stride);
  uint4 *to = saves ? there : here, *from = saves ? here : there;
  const size_t count = part.bytes / sizeof(uint4), first = (size_t)blockIdx.x * kThreads * kEach + threadIdx.x;
  uint4 values[kEach];
#pragma unroll
  for (int k = 0; k < kEach; k++)
    if (const size_t i = first + k * kThreads; i < count) values[k] = from[i];
#pragma unroll
  for (int k = 0; k < kEach; k++)
    if (const size_t i = first + k * kThreads; i < count) to[i] = values[k];
}

}  // namespace

void copy_spans(const SpanPart* parts, int ranges, size_t largest, const SpanPair* pairs, int count, bool saves,
                const Queue& queue) {
  constexpr int kMost = 32768;  // most pairs in the grid's third dimension
  for (int first = 0; first < count; first += kMost)
    start(queue, copy_kernel,
          dim3(ceil_div(largest, (int)kChunk), ranges, count - first < kMost ? count - first : kMost), kThreads, 0,
          parts, pairs + first, saves);
}

}  // namespace as::cuda
