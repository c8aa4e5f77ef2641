// Weighted sums of rows' entries, optionally with the norm that follows.
#include <algorithm>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kEight = 8, kThreads = 512;

// A CTA computes a row; a thread computes eight columns of it, and further ones of rows with more than 4,096 columns.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Combination c) {
  const int row = blockIdx.x, width = c.y.width, top = c.routing.top, first = kEight * threadIdx.x,
            stride = kEight * blockDim.x;
  const int* entries = c.routing.entry_of + (size_t)row * top;
  const float* shares = c.routing.shares + (size_t)row * top;
  const float one = c.norm.unit_offset ? 1.0f : 0.0f;
  let_next_begin();
  float weights[kEight];  // prefetched before the previous kernel has written the entries
  if (c.norm.weight) read_eight(c.norm.weight, first, width, weights);
  await_previous();
  float squares = 0, kept[kEight];
  for (int column = first; column < width; column += stride) {
    float before[kEight] = {}, sum[kEight] = {};
    if (c.adds) read_eight(c.y.values + (size_t)row * width, column, width, before);
#pragma unroll 8
    for (int i = 0; i < top; i++) {
      const int entry = entries[i];
      const float share = shares[i];
      if (entry < 0) continue;
      float values[kEight];
      read_eight(c.entries + (size_t)entry * width, column, width, values);
#pragma unroll
      for (int j = 0; j < kEight; j++) sum[j] = fmaf(values[j], share, sum[j]);
    }
#pragma unroll
    for (int j = 0; j < kEight; j++) {
      if (c.adds) sum[j] = __fadd_rn(before[j], sum[j]);
      squares = fmaf(sum[j], sum[j], squares);
      if (column == first) kept[j] = sum[j];
    }
    put_eight(c.y, row, column, width, sum);
  }
  if (!c.norm.weight) return;
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, blockDim.x) / width + c.norm.eps);
  for (int column = first; column < width; column += stride) {
    if (column > first) {
      read_eight(c.y.values + (size_t)row * width, column, width, kept);
      read_eight(c.norm.weight, column, width, weights);
    }
#pragma unroll
    for (int j = 0; j < kEight; j++) kept[j] = kept[j] * factor * (weights[j] + one);
    put_eight(c.normed, row, column, width, kept);
  }
}

}  // namespace

void combine_experts(const Combination& c, int rows, const Queue& queue) {
  const int threads = std::min(ceil_div(c.y.width, 32 * kEight) * 32, kThreads);
  start(queue, combine_kernel, rows, threads, 0, c);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
