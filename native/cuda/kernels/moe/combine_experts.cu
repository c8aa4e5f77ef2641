// Weighted sums of rows' entries, and sums with a gated shared expert, optionally with the norm that follows.
#include <algorithm>

#include "cuda/kernels/gemm/gemm_small_n.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kEight = 8, kThreads = 512;

// Norms a row of which each thread keeps its first eight columns and has summed the squares of all of its own. weights:
// of these eight columns.
__device__ void norm_row(const NormedSum& c, int row, float squares, float (&kept)[kEight], float (&weights)[kEight]) {
  const int width = c.y.width, first = kEight * threadIdx.x, stride = kEight * blockDim.x;
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, blockDim.x) / width + c.norm.eps);
  const float one = c.norm.unit_offset ? 1.0f : 0.0f;
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

int threads_of(int width) { return std::min(ceil_div(width, 32 * kEight) * 32, kThreads); }

// A CTA computes a row; a thread computes eight columns of it, and further ones of rows with more than 4,096 columns.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Combination c) {
  const int row = blockIdx.x, width = c.y.width, top = c.routing.top, first = kEight * threadIdx.x,
            stride = kEight * blockDim.x;
  const int* entries = c.routing.entry_of + (size_t)row * top;
  const float* shares = c.routing.shares + (size_t)row * top;
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
  if (c.norm.weight) norm_row(c, row, squares, kept, weights);
}

// The same threads. The first warp computes the row's gate.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads) add_shared_expert_kernel(const __grid_constant__ SharedSum c) {
  extern __shared__ __align__(16) float gate_weights[];
  __shared__ float gate;
  const int row = blockIdx.x, width = c.y.width, first = kEight * threadIdx.x, stride = kEight * blockDim.x;
  const size_t begin = (size_t)row * width;
  let_next_begin();
  bring_rows<kWhole>(c.gate.w, 0, 1, gate_weights);
  float weights[kEight];  // prefetched before the previous kernel has written the rows
  if (c.norm.weight) read_eight(c.norm.weight, first, width, weights);
  await_previous();
  __syncthreads();
  float before[kEight] = {}, sum[kEight], shared[kEight];
  const auto read = [&](int column) {
    if (c.adds) read_eight(c.y.values + begin, column, width, before);
    read_eight(c.routed + begin, column, width, sum), read_eight(c.shared + begin, column, width, shared);
  };
  read(first);
  if (threadIdx.x < 32) {
    float dot[1][1];
    multiply_rows<1, 1, kWhole>(c.gate.x.values + (size_t)row * c.gate.w.k, 1, gate_weights, c.gate.w.k, dot);
    if (threadIdx.x == 0) gate = c.gate.bias ? __fadd_rn(dot[0][0], *c.gate.bias) : dot[0][0];
  }
  __syncthreads();
  const float factor = 1.0f / (1.0f + expf(-gate));  // of sigmoid_mul()
  float squares = 0, kept[kEight];
  for (int column = first; column < width; column += stride) {
    if (column > first) read(column);
#pragma unroll
    for (int j = 0; j < kEight; j++) {
      sum[j] = __fadd_rn(sum[j], __fmul_rn(shared[j], factor));
      if (c.adds) sum[j] = __fadd_rn(before[j], sum[j]);
      squares = fmaf(sum[j], sum[j], squares);
      if (column == first) kept[j] = sum[j];
    }
    put_eight(c.y, row, column, width, sum);
  }
  if (c.norm.weight) norm_row(c, row, squares, kept, weights);
}

}  // namespace

void combine_experts(const Combination& c, int rows, const Queue& queue) {
  start(queue, combine_kernel, rows, threads_of(c.y.width), 0, c);
}

void add_shared_expert(const SharedSum& c, int rows, const Queue& queue) {
  const auto kernel = c.gate.w.k % kLaneColumns ? add_shared_expert_kernel<false> : add_shared_expert_kernel<true>;
  start(queue, kernel, rows, threads_of(c.y.width), padded_columns(c.gate.w.k) * sizeof(float), c);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
