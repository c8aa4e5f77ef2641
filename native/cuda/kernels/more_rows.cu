// Ops on rows one by one that few families have: GELU's gates, soft caps, norms of all queries and of all keys.
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__device__ float gelu_tanh(float x) {
  constexpr float kRoot = 0.7978845608028654f;  // of 2 / pi
  return 0.5f * x * (1.0f + tanhf(kRoot * (x + 0.044715f * x * x * x)));
}

__global__ void gelu_tanh_mul_kernel(const float* in, Rows out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= out.width) return;
  const float gate = in[(size_t)row * 2 * out.width + i], up = in[(size_t)row * 2 * out.width + out.width + i];
  put(out, row, i, gelu_tanh(gate) * up);
}

__global__ void soft_cap_kernel(float* x, float cap, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

// A block's sum of squares, in all of its threads: over each warp's lanes, then over warps in ascending order.
__device__ float square_sum(const float* x, int count) {
  __shared__ float sums[kThreads / 32];
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum = fmaf(x[i], x[i], sum);
  sum = warp_sum(sum);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kThreads / 32; i++) total += sums[i];
  return total;
}

__global__ void qk_square_sums_kernel(const float* x, int width, QkColumns columns, float* sums) {
  after_previous();
  const float* row = x + (size_t)blockIdx.x * width;
  const float q = square_sum(row, columns.q_columns), k = square_sum(row + columns.k_offset, columns.k_columns);
  if (threadIdx.x == 0) sums[2 * blockIdx.x] = q, sums[2 * blockIdx.x + 1] = k;
}

__global__ void qk_norm_kernel(float* x, int width, QkNorm norm, const float* sums) {
  after_previous();
  float* row = x + (size_t)blockIdx.x * width;
  const float q = 1.0f / sqrtf(sums[2 * blockIdx.x] / norm.q_width + norm.eps),
              k = 1.0f / sqrtf(sums[2 * blockIdx.x + 1] / norm.k_width + norm.eps);
  for (int i = threadIdx.x; i < norm.q_columns + norm.k_columns; i += kThreads)
    row[i] *= i < norm.q_columns ? q * norm.q_weight[i] : k * norm.k_weight[i - norm.q_columns];
}

}  // namespace

void gelu_tanh_mul(const float* in, int rows, const Rows& out, const Queue& queue) {
  start(queue, gelu_tanh_mul_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, out);
  launched("gelu_tanh_mul");
}

void soft_cap(float* x, float cap, size_t count, const Queue& queue) {
  start(queue, soft_cap_kernel, ceil_div(count, kThreads), kThreads, 0, x, cap, count);
  launched("soft_cap");
}

void qk_square_sums(const float* x, int width, const QkColumns& columns, int rows, float* sums, const Queue& queue) {
  start(queue, qk_square_sums_kernel, rows, kThreads, 0, x, width, columns, sums);
  launched("qk_square_sums");
}

void qk_norm(float* x, int width, const QkNorm& norm, const float* sums, int rows, const Queue& queue) {
  start(queue, qk_norm_kernel, rows, kThreads, 0, x, width, norm, sums);
  launched("qk_norm");
}

}  // namespace cuda
}  // namespace as
