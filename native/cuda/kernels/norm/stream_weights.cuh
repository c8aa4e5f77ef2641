// The weights of residual streams, of a row's products.
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/norm/streams.h"

namespace as::cuda {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Sinkhorn and Knopp's iterations for four streams: a lane has a value, and each half of a warp the same matrix.
__device__ inline void balance_four(float* m, int iterations, float eps) {
  const int lane = threadIdx.x % 16;
  const auto sum_over = [](float x, int step) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
    return x + __shfl_xor_sync(0xffffffffu, x, 2 * step);
  };
  float x = m[lane], most = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  x = expf(x - most);
  x = x / sum_over(x, 1) + eps;
  for (int i = 0; i < iterations; i++) {
    if (i) x = __fdividef(x, sum_over(x, 1) + eps);
    x = __fdividef(x, sum_over(x, 4) + eps);
  }
  if (threadIdx.x % 32 < 16) m[lane] = x;
  __syncwarp();
}

// The same for any number, by a warp: a lane has some rows, then some columns, of a matrix in shared memory.
// Each sum is one chain in ascending order.
__device__ inline void balance(float* m, int n, int iterations, float eps) {
  const int lane = threadIdx.x % 32;
  const auto divide = [&](int first, int step, float sum) {
    for (int k = 0; k < n; k++) sum += m[first + k * step];
    for (int k = 0; k < n; k++) m[first + k * step] /= sum;
  };
  for (int j = lane; j < n; j += 32) {
    float *row = m + j * n, most = row[0], sum = 0;
    for (int k = 1; k < n; k++) most = fmaxf(most, row[k]);
    for (int k = 0; k < n; k++) sum += row[k] = expf(row[k] - most);
    for (int k = 0; k < n; k++) row[k] = row[k] / sum + eps;
  }
  __syncwarp();
  for (int i = 0; i < iterations; i++) {
    for (int j = lane; i && j < n; j += 32) divide(j * n, 1, eps);
    __syncwarp();
    for (int k = lane; k < n; k += 32) divide(k, n, eps);
    __syncwarp();
  }
}

// A product of a row, times its part's factor, plus its base.
__device__ inline float scaled_product(const StreamWeights& by, const float* row, int i) {
  return fmaf(row[i], by.factors[min(i / by.streams, 2)], by.base[i]);
}
__device__ inline float pre_weight(const StreamWeights& by, const float* row, int i) {
  return sigmoid(scaled_product(by, row, i)) + by.eps;
}
// A warp makes the weights post and mix of a row, in place. mix: room for a matrix in shared memory.
__device__ inline void weigh_others(const StreamWeights& by, float* row, float* mix) {
  const int lane = threadIdx.x % 32, n = by.streams;
  for (int i = n + lane; i < by.width; i += 32) {
    const float value = scaled_product(by, row, i);
    if (i < 2 * n) row[i] = 2 * sigmoid(value);
    else mix[i - 2 * n] = value;
  }
  if (by.width == n) return;
  __syncwarp();
  if (n == 4) balance_four(mix, by.iterations, by.eps);
  else balance(mix, n, by.iterations, by.eps);
  for (int i = lane; i < n * n; i += 32) row[2 * n + i] = mix[i];
}

}  // namespace as::cuda
