// Tiles of float32 GEMMs: each value is one chain of fused multiply-adds along K. For comparison, not for speed.
#pragma once
#include "cuda/kernels/gemm/epilogue.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kTile = 64, kDepth = 16, kTileThreads = 256, kEach = 4;  // a thread computes 4 x 4 values

// A thread's sums: of rows ty + 16 i and columns tx + 16 j of a tile, ty = thread / 16, tx = thread % 16. row_of(i):
// the row of x of the tile's row i; negative: there is none. columns: those of the tile that exist, rows of w.
template <typename RowOf>
__device__ void multiply_tile(const float* x, const float* w, int columns, int k, const RowOf& row_of,
                              float (&sums)[kEach][kEach]) {
  __shared__ float xs[kDepth][kTile + 1], ws[kDepth][kTile + 1];
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < kEach * kEach; i++) sums[i / kEach][i % kEach] = 0;
  for (int k0 = 0; k0 < k; k0 += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kTileThreads) {
      const int r = i / kDepth, c = i % kDepth, at = k0 + c, row = row_of(r);
      xs[c][r] = row >= 0 && at < k ? x[(size_t)row * k + at] : 0.0f;
      ws[c][r] = r < columns && at < k ? w[(size_t)r * k + at] : 0.0f;
    }
    __syncthreads();
    const int depth = min(kDepth, k - k0);
    for (int c = 0; c < depth; c++)
#pragma unroll
      for (int i = 0; i < kEach; i++)
#pragma unroll
        for (int j = 0; j < kEach; j++) sums[i][j] = fmaf(xs[c][ty + 16 * i], ws[c][tx + 16 * j], sums[i][j]);
    __syncthreads();
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
