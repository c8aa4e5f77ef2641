// The weights of residual streams, their sum by these, and its norm in one kernel: a CTA for each row sums and norms,
// while others make the weights that are used after the layer's part.
#include <algorithm>

#include "cuda/kernels/norm/stream_weights.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

// kEights: of adjacent columns of a thread.
template <int kEights>
__global__ void __launch_bounds__(kThreads)
    merge_and_norm_kernel(const float* x, const __grid_constant__ StreamWeights by, float* weights, Norm norm, Rows out,
                          int rows) {
  extern __shared__ float shared[];
  after_previous();
  const int n = by.streams, width = out.width;
  if ((int)blockIdx.x >= rows) {
    const int warp = threadIdx.x / 32, row = (blockIdx.x - rows) * kWarps + warp;
    if (row < rows) weigh_others(by, weights + (size_t)row * by.width, shared + warp * n * n);
    return;
  }
  const int row = blockIdx.x;
  for (int i = threadIdx.x; i < n; i += kThreads) shared[i] = pre_weight(by, weights + (size_t)row * by.width, i);
  __syncthreads();
  float sums[kEights][8] = {}, squares = 0;
  const auto column = [](int e) { return (e * kThreads + (int)threadIdx.x) * 8; };
#pragma unroll 4
  for (int i = 0; i < n; i++) {
#pragma unroll
    for (int e = 0; e < kEights; e++) {
      float values[8];
      read_eight(x + ((size_t)row * n + i) * width, column(e), width, values);
#pragma unroll
      for (int j = 0; j < 8; j++) sums[e][j] = fmaf(shared[i], values[j], sums[e][j]);
    }
  }
#pragma unroll
  for (int e = 0; e < kEights; e++)
#pragma unroll
    for (int j = 0; j < 8; j++) squares = fmaf(sums[e][j], sums[e][j], squares);
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, kThreads) / width + norm.eps);
  const float one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int e = 0; e < kEights; e++) {
    float scales[8];
    read_eight(norm.weight, column(e), width, scales);
#pragma unroll
    for (int j = 0; j < 8; j++) sums[e][j] = sums[e][j] * factor * (scales[j] + one);
    put_eight(out, row, column(e), width, sums[e]);
  }
}

}  // namespace

void merge_and_norm(const float* x, const StreamWeights& by, float* weights, const Norm& norm, int rows,
                    const Rows& out, const Queue& queue) {
  const auto kernel = out.width <= 8 * kThreads ? merge_and_norm_kernel<1> : merge_and_norm_kernel<2>;
  const size_t floats = std::max(by.streams, by.width > by.streams ? kWarps * by.streams * by.streams : 0);
  const int others = by.width > by.streams ? ceil_div(rows, kWarps) : 0;
  start(queue, kernel, rows + others, kThreads, floats * sizeof(float), x, by, weights, norm, out, rows);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
