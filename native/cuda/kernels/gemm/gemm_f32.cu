// float32 GEMMs.
#include "cuda/kernels/gemm/gemm_f32.cuh"

namespace as::cuda {
namespace {

__global__ void __launch_bounds__(kTileThreads) gemm_f32_kernel(GemmArgs p, int rows) {
  after_previous();
  const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile, k = p.w.k;
  float sums[kEach][kEach];
  multiply_tile(
      p.x.values, p.w.values + (size_t)column0 * k, p.w.n - column0, k,
      [&](int i) { return row0 + i < rows ? row0 + i : -1; }, sums);
#pragma unroll
  for (int i = 0; i < kEach; i++)
    finish<kEach>(p, rows, p.w.n, sums[i], [&](int j) {
      return Place{row0 + (int)threadIdx.x / 16 + 16 * i, column0 + (int)threadIdx.x % 16 + 16 * j};
    });
}

}  // namespace

void gemm_f32(const GemmArgs& p, int rows, const Queue& queue) {
  start(queue, gemm_f32_kernel, dim3(ceil_div(p.w.n, kTile), ceil_div(rows, kTile)), kTileThreads, 0, p, rows);
}

}  // namespace as::cuda
