// float32 GEMMs of few columns and long rows. The threads of a CTA share out each of its sums.
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/norm/thread_columns.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kEach = kThreadColumns;

// A thread has columns [4 t, 4 t + 4) of every 1,024, as one chain; block_sum() adds the threads' sums. So the order of
// a sum does not depend on how many rows and columns a CTA has. kNorms: rows are p.unnormed, whose squares are added in
// the same way.
template <int kRows, int kColumns, bool kWhole, bool kNorms>
__global__ void __launch_bounds__(kThreads) gemm_long_k_kernel(const __grid_constant__ GemmArgs p, int rows) {
  __shared__ float parts[kWarps][kRows * kColumns], squared[kNorms ? kWarps : 1][kRows];
  after_previous();
  const int column0 = blockIdx.x * kColumns, row0 = blockIdx.y * kRows, k = p.w.k;
  const float* rows_of = kNorms ? p.unnormed : p.x.values;
  float sums[kRows][kColumns] = {}, squares[kRows] = {};
#pragma unroll(kRows == 1 ? 8 : 2)
  for (int at = threadIdx.x * kEach; at < k; at += kThreads * kEach) {
    float w[kColumns][kEach];
#pragma unroll
    for (int c = 0; c < kColumns; c++)
      read_columns<kWhole>(p.w.values + (size_t)min(column0 + c, p.w.n - 1) * k, at, k, w[c]);
    if constexpr (kNorms) {
      float norm[kEach];
      read_columns<kWhole>(p.norm.weight, at, k, norm);
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int i = 0; i < kEach; i++) w[c][i] *= norm[i];
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float x[kEach];
      read_columns<kWhole>(rows_of + (size_t)min(row0 + r, rows - 1) * k, at, k, x);
      if constexpr (kNorms)
#pragma unroll
        for (int i = 0; i < kEach; i++) squares[r] = fmaf(x[i], x[i], squares[r]);
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int i = 0; i < kEach; i++) sums[r][c] = fmaf(x[i], w[c][i], sums[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const float sum = warp_sum(sums[r][c]);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][r * kColumns + c] = sum;
    }
    if constexpr (kNorms) {
      const float sum = warp_sum(squares[r]);
      if (threadIdx.x % 32 == 0) squared[threadIdx.x / 32][r] = sum;
    }
  }
  __syncthreads();
  const int row = row0 + threadIdx.x / kColumns, column = column0 + threadIdx.x % kColumns;
  if (threadIdx.x >= kRows * kColumns || row >= rows || column >= p.w.n) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; i++) sum += parts[i][threadIdx.x];
  if constexpr (kNorms) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i++) all += squared[i][threadIdx.x / kColumns];
    sum *= 1.0f / sqrtf(all / k + p.norm.eps);
  }
  p.y.values[(size_t)row * p.y.width + column] = p.bias ? __fadd_rn(sum, p.bias[column]) : sum;
}

template <int kRows, int kColumns, bool kNorms>
void start_long_k(const GemmArgs& p, int rows, const Queue& queue) {
  const auto kernel = p.w.k % kEach ? gemm_long_k_kernel<kRows, kColumns, false, kNorms>
                                    : gemm_long_k_kernel<kRows, kColumns, true, kNorms>;
  start(queue, kernel, dim3(ceil_div(p.w.n, kColumns), ceil_div(rows, kRows)), kThreads, 0, p, rows);
}

}  // namespace

void gemm_long_k(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr int kFewRows = 16;
  if (rows <= kFewRows)
    p.unnormed ? start_long_k<1, 1, true>(p, rows, queue) : start_long_k<1, 1, false>(p, rows, queue);
  else p.unnormed ? start_long_k<8, 4, true>(p, rows, queue) : start_long_k<8, 4, false>(p, rows, queue);
}

}  // namespace as::cuda
