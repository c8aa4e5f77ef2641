// Products in float32 whose results have few columns: logits of experts, gates of rows. Each value is the sum of 32
// chains of fused multiply-adds, of four adjacent columns of every 128 each, in pairs at growing distance.
#include "cuda/experts.h"
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kEach = 4, kAround = 32 * kEach;  // adjacent columns of a lane, of a warp
constexpr int kWarps = 8;

// Columns [column, column + 4) of a row of k, zeros where there are none. kWhole: all there and aligned.
template <bool kWhole>
__device__ float4 read_four(const float* row, int column, int k) {
  if constexpr (kWhole) {
    return *reinterpret_cast<const float4*>(row + column);
  } else {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = column + i < k ? row[column + i] : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
  }
}
__device__ float multiply_add(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// A warp has kRows rows and kColumns columns of the result at a time. The columns' weights, which are the block's, are
// in shared memory before the kernel before this one has made the rows.
template <int kRows, int kColumns, bool kWhole>
__global__ void __launch_bounds__(32 * kWarps) linear_few_kernel(Product p, int rows) {
  extern __shared__ __align__(16) float weights[];  // [kColumns][length]
  const int k = p.w.k, length = (k + kAround - 1) / kAround * kAround, first = blockIdx.x * kColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_begin();
  for (int i = threadIdx.x * kEach; i < kColumns * length; i += 32 * kWarps * kEach) {
    const int c = i / length, at = i % length;
    const bool there = first + c < p.w.n && at < k;
    const float4 found =
        there ? read_four<kWhole>(p.w.values + (size_t)(first + c) * k, at, k) : make_float4(0, 0, 0, 0);
    *reinterpret_cast<float4*>(weights + i) = found;
  }
  await_previous();
  __syncthreads();
  for (int row = (blockIdx.y * kWarps + warp) * kRows; row < rows; row += gridDim.y * kWarps * kRows) {
    float sums[kRows][kColumns] = {};
#pragma unroll(kRows == 1 ? 8 : 2)
    for (int at = lane * kEach; at < length; at += kAround) {
      float4 x[kRows], w[kColumns];
#pragma unroll
      for (int r = 0; r < kRows; r++)
        x[r] = row + r < rows && at < k ? read_four<kWhole>(p.x.values + (size_t)(row + r) * k, at, k)
                                        : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int c = 0; c < kColumns; c++) w[c] = *reinterpret_cast<const float4*>(weights + c * length + at);
#pragma unroll
      for (int r = 0; r < kRows; r++)
#pragma unroll
        for (int c = 0; c < kColumns; c++) sums[r][c] = multiply_add(x[r], w[c], sums[r][c]);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const float sum = warp_sum(sums[r][c]);
        if (lane || row + r >= rows || first + c >= p.w.n) continue;
        p.y.values[(size_t)(row + r) * p.y.width + first + c] = p.bias ? __fadd_rn(sum, p.bias[first + c]) : sum;
      }
  }
}

template <int kRows, int kColumns>
void start_few(const Product& p, int rows, const Queue& queue) {
  const auto kernel =
      p.w.k % kEach ? linear_few_kernel<kRows, kColumns, false> : linear_few_kernel<kRows, kColumns, true>;
  const size_t shared = (size_t)kColumns * ceil_div(p.w.k, kAround) * kAround * sizeof(float);
  allow_shared(kernel, shared);
  const int columns = ceil_div(p.w.n, kColumns), groups = ceil_div(rows, kWarps * kRows);
  // Weights are read anew by each block: no more of them than run at once.
  const int most = 2 * processors() / columns;
  start(queue, kernel, dim3(columns, most < 1 ? 1 : groups < most ? groups : most), 32 * kWarps, shared, p, rows);
  launched("linear with few columns");
}

}  // namespace

bool has_few_columns(const Matrix& m) {
  constexpr int kMostShared = 96 << 10;  // of a block's four columns
  return m.kind == Kind::f32 && m.n <= kMostExperts && 4 * (m.k + kAround) * (int)sizeof(float) <= kMostShared;
}

void linear_few(const Product& p, int rows, const Queue& queue) {
  if (rows <= 4 * kWarps) start_few<1, 1>(p, rows, queue);
  else start_few<8, 4>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
