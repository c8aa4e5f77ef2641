// float32 GEMMs with few columns: logits of experts, gates of rows.
#include "cuda/kernels/gemm/gemm_small_n.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace {

constexpr int kWarps = 8;

// A warp computes kRows rows and kColumns columns of the result at a time. The CTA loads the weights of its columns
// into shared memory before the previous kernel has computed the rows.
template <int kRows, int kColumns, bool kWhole>
__global__ void __launch_bounds__(32 * kWarps) gemm_small_n_kernel(GemmArgs p, int rows) {
  extern __shared__ __align__(16) float weights[];
  const int first = blockIdx.x * kColumns, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_begin();
  bring_rows<kWhole>(p.w, first, kColumns, weights);
  await_previous();
  __syncthreads();
  for (int row = (blockIdx.y * kWarps + warp) * kRows; row < rows; row += gridDim.y * kWarps * kRows) {
    float sums[kRows][kColumns];
    multiply_rows<kRows, kColumns, kWhole>(p.x.values + (size_t)row * p.w.k, min(kRows, rows - row), weights, p.w.k,
                                           sums);
    if (lane) continue;
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        if (row + r < rows && first + c < p.w.n)
          p.y.values[(size_t)(row + r) * p.y.width + first + c] =
              p.bias ? __fadd_rn(sums[r][c], p.bias[first + c]) : sums[r][c];
  }
}

template <int kRows, int kColumns>
void start_few(const GemmArgs& p, int rows, const Queue& queue) {
  const auto kernel =
      p.w.k % kLaneColumns ? gemm_small_n_kernel<kRows, kColumns, false> : gemm_small_n_kernel<kRows, kColumns, true>;
  const size_t shared = (size_t)kColumns * padded_columns(p.w.k) * sizeof(float);
  const int columns = ceil_div(p.w.n, kColumns), groups = ceil_div(rows, kWarps * kRows);
  // Each CTA reads the weights again, so there are no more CTAs than run at once.
  const int most = 2 * sm_count() / columns;
  start(queue, kernel, dim3(columns, most < 1 ? 1 : groups < most ? groups : most), 32 * kWarps, shared, p, rows);
}

}  // namespace

bool has_small_n(const Matrix& m) {
  constexpr size_t kMaxShared = 96 << 10;  // of the four columns of a CTA
  return m.kind == Kind::f32 && m.n <= kMaxExperts && 4 * sizeof(float) * padded_columns(m.k) <= kMaxShared;
}

void gemm_small_n(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 4 * kWarps) start_few<1, 1>(p, rows, queue);
  else start_few<8, 4>(p, rows, queue);
}

}  // namespace as::cuda
