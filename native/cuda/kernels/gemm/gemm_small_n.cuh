// Shared parts of float32 GEMMs with few columns. Each value is the sum of 32 chains of fused multiply-adds, one for
// each lane, over four adjacent columns of every 128. The chains are added by warp_sum().
#pragma once
#include "cuda/kernels/gemm/epilogue.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kLaneColumns = 4, kWarpColumns = 32 * kLaneColumns;  // adjacent columns of a lane; of a warp

// Columns that a row of weights occupies in shared memory, with padding.
AS_BOTH inline int padded_columns(int k) { return (k + kWarpColumns - 1) / kWarpColumns * kWarpColumns; }

// Columns [column, column + 4) of a row of length k; zeros beyond the row's end. kWhole: k is a multiple of 4.
template <bool kWhole>
__device__ float4 read_four(const float* row, int column, int k) {
  if (column >= k) return make_float4(0, 0, 0, 0);
  if constexpr (kWhole) {
    return *reinterpret_cast<const float4*>(row + column);
  } else {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = column + i < k ? row[column + i] : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
  }
}
__device__ inline float multiply_add(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Copies rows [first, first + count) of a matrix to shared memory, by all threads of a CTA.
template <bool kWhole>
__device__ void bring_rows(const Matrix& m, int first, int count, float* to) {
  const int length = padded_columns(m.k);
  for (int i = threadIdx.x * kLaneColumns; i < count * length; i += blockDim.x * kLaneColumns) {
    const int row = first + i / length;
    *reinterpret_cast<float4*>(to + i) =
        row < m.n ? read_four<kWhole>(m.values + (size_t)row * m.k, i % length, m.k) : make_float4(0, 0, 0, 0);
  }
}

// Multiplies kRows rows of x, of which the first `there` exist, with kColumns rows of weights in shared memory, by a
// warp. Every lane gets the sums.
template <int kRows, int kColumns, bool kWhole>
__device__ void multiply_rows(const float* x, int there, const float* weights, int k, float (&sums)[kRows][kColumns]) {
  const int length = padded_columns(k);
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int c = 0; c < kColumns; c++) sums[r][c] = 0;
#pragma unroll(kRows == 1 ? 8 : 2)
  for (int at = threadIdx.x % 32 * kLaneColumns; at < length; at += kWarpColumns) {
    float4 rows[kRows], columns[kColumns];
#pragma unroll
    for (int r = 0; r < kRows; r++)
      rows[r] = r < there ? read_four<kWhole>(x + (size_t)r * k, at, k) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int c = 0; c < kColumns; c++) columns[c] = *reinterpret_cast<const float4*>(weights + c * length + at);
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++) sums[r][c] = multiply_add(rows[r], columns[c], sums[r][c]);
  }
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int c = 0; c < kColumns; c++) sums[r][c] = warp_sum(sums[r][c]);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
