// Epilogues of GEMMs: bias, addition, gating.
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// Adds bias to kCount sums of a thread, adds them to y if p.adds, and stores them. All reads are issued before the
// first write, so that they overlap. where(i): row and column of sum i. rows, width: limits of rows and columns.
struct Place {
  int row, column;
};
template <int kCount, bool kPushes = false, typename Where>
__device__ inline void finish(const GemmArgs& p, int rows, int width, const float* sums, Where where) {
  float before[kCount], bias[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const Place at = where(i);
    const bool there = at.row < rows && at.column < width;
    before[i] = there && p.adds ? p.y.values[(size_t)at.row * p.y.width + at.column] : 0.0f;
    bias[i] = there && p.bias ? p.bias[at.column] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const Place at = where(i);
    if (at.row >= rows || at.column >= width) continue;
    float sum = sums[i];
    if (p.bias) sum = __fadd_rn(sum, bias[i]);
    if (p.adds) sum = __fadd_rn(before[i], sum);
    put<kPushes>(p.y, at.row, at.column, sum);
  }
}

// The same for four adjacent columns, the first a multiple of four, in two steps: read_added() prefetches bias and y;
// finish_four() adds and stores.
struct Added {
  float4 bias, before;
};
__device__ inline Added read_added(const GemmArgs& p, int row, int column) {
  Added added;
  if (p.bias) added.bias = read_four(p.bias, column, p.w.n);
  if (p.adds) added.before = read_four(p.y.values + (size_t)row * p.y.width, column, p.w.n);
  return added;
}

template <bool kPushes = false>
__device__ inline void finish_four(const GemmArgs& p, int row, int column, float4 sums, const Added& added) {
  if (p.bias) sums = sum_of(sums, added.bias);
  if (p.adds) sums = sum_of(added.before, sums);
  put_four<kPushes>(p.y, row, column, p.w.n, sums);
}

// The gated result of a gate and an up value, with bias. column: column of the result.
__device__ inline float gated(const GemmArgs& p, int column, float gate, float up) {
  if (p.bias) gate = __fadd_rn(gate, p.bias[column]), up = __fadd_rn(up, p.bias[p.y.width + column]);
  return silu_times(gate, up);
}
__device__ inline void finish_gated(const GemmArgs& p, int row, int column, float gate, float up) {
  put(p.y, row, column, gated(p, column, gate, up));
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
