// float32 GEMMs: each value is one chain of fused multiply-adds along K. For comparison, not for speed.
#include "cuda/kernels/gemm/epilogue.cuh"

namespace as::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4;  // a thread computes 4 x 4 values

__global__ void __launch_bounds__(kThreads) gemm_f32_kernel(GemmArgs p, int rows) {
  after_previous();
  __shared__ float xs[kDepth][kTile + 1], ws[kDepth][kTile + 1];
  const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile, k = p.w.k;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  float sums[kEach][kEach] = {};
  for (int k0 = 0; k0 < k; k0 += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int r = i / kDepth, c = i % kDepth, at = k0 + c;
      xs[c][r] = row0 + r < rows && at < k ? p.x.values[(size_t)(row0 + r) * k + at] : 0.0f;
      ws[c][r] = column0 + r < p.w.n && at < k ? p.w.values[(size_t)(column0 + r) * k + at] : 0.0f;
    }
    __syncthreads();
    const int depth = k - k0 < kDepth ? k - k0 : kDepth;
    for (int c = 0; c < depth; c++)
#pragma unroll
      for (int i = 0; i < kEach; i++)
#pragma unroll
        for (int j = 0; j < kEach; j++) sums[i][j] = fmaf(xs[c][ty + 16 * i], ws[c][tx + 16 * j], sums[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; i++)
    finish<kEach>(p, rows, p.w.n, sums[i], [&](int j) { return Place{row0 + ty + 16 * i, column0 + tx + 16 * j}; });
}

}  // namespace

void gemm_f32(const GemmArgs& p, int rows, const Queue& queue) {
  start(queue, gemm_f32_kernel, dim3(ceil_div(p.w.n, kTile), ceil_div(rows, kTile)), kThreads, 0, p, rows);
}

}  // namespace as::cuda
