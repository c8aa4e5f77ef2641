// Norms of heads and gates, in place.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

// A warp for each head.
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(float* x, const float* gate, GatedNorm norm, int heads, int width) {
  after_previous();
  const int head = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (head >= heads) return;
  const size_t begin = (size_t)blockIdx.y * width + head * norm.head_dim;
  x += begin, gate += begin;
  const float* weight = norm.weight + (norm.gate_first ? head * norm.head_dim : 0);
  const auto activated = [&](int c) {
    const float g = gate[c];
    return norm.sigmoid ? sigmoid(g) : __fmul_rn(g, sigmoid(g));
  };
  if (norm.gate_first)
    for (int c = lane; c < norm.head_dim; c += 32) x[c] = __fmul_rn(x[c], activated(c));
  float sum = 0;
  for (int c = lane; c < norm.head_dim; c += 32) sum = fmaf(x[c], x[c], sum);
  const float factor = __fdiv_rn(1.0f, sqrtf(warp_sum(sum) / norm.head_dim + norm.eps));
  for (int c = lane; c < norm.head_dim; c += 32) {
    const float value = __fmul_rn(__fmul_rn(x[c], factor), weight[c]);
    x[c] = norm.gate_first ? value : __fmul_rn(value, activated(c));
  }
}

__global__ void __launch_bounds__(kThreads) relu_square_kernel(float* x, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const float positive = x[i] < 0 ? 0.0f : x[i];  // NaN stays
  x[i] = __fmul_rn(positive, positive);
}

__global__ void __launch_bounds__(kThreads) sigmoid_gate_kernel(float* x, const float* gate, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < count) x[i] = __fmul_rn(x[i], sigmoid(gate[i]));
}

}  // namespace

void gated_rms_norm(float* x, const float* gate, const GatedNorm& norm, int rows, int width, const Queue& queue) {
  const int heads = width / norm.head_dim;
  start(queue, gated_rms_norm_kernel, dim3(ceil_div(heads, kThreads / 32), rows), kThreads, 0, x, gate, norm, heads,
        width);
}

void relu_square(float* x, size_t count, const Queue& queue) {
  start(queue, relu_square_kernel, dim3(ceil_div(count, kThreads)), kThreads, 0, x, count);
}

void sigmoid_gate(float* x, const float* gate, size_t count, const Queue& queue) {
  start(queue, sigmoid_gate_kernel, dim3(ceil_div(count, kThreads)), kThreads, 0, x, gate, count);
}

}  // namespace as::cuda
