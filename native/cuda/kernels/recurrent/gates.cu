// Norms of heads and gates, in place.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

// A warp for each head. kEach: a lane's features, which it reads at once; 0: heads are larger than that.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(float* x, const float* gate, GatedNorm norm, int heads, int width) {
  after_previous();
  const int head = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (head >= heads) return;
  const size_t begin = (size_t)blockIdx.y * width + head * norm.head_dim;
  x += begin, gate += begin;
  const float* weight = norm.weight + (norm.gate_first ? head * norm.head_dim : 0);
  const auto gating = [&](float g) { return norm.sigmoid ? sigmoid(g) : __fmul_rn(g, sigmoid(g)); };
  float sum = 0;
  if constexpr (kEach > 0) {
    float values[kEach], gates[kEach], weights[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int c = i * 32 + lane;
      const bool there = c < norm.head_dim;
      values[i] = there ? x[c] : 0, gates[i] = there ? gate[c] : 0, weights[i] = there ? weight[c] : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      gates[i] = gating(gates[i]);
      if (norm.gate_first) values[i] = __fmul_rn(values[i], gates[i]);
      if (i * 32 + lane < norm.head_dim) sum = fmaf(values[i], values[i], sum);
    }
    const float factor = __fdiv_rn(1.0f, sqrtf(warp_sum(sum) / norm.head_dim + norm.eps));
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float value = __fmul_rn(__fmul_rn(values[i], factor), weights[i]);
      if (i * 32 + lane < norm.head_dim) x[i * 32 + lane] = norm.gate_first ? value : __fmul_rn(value, gates[i]);
    }
  } else {
    const auto activated = [&](int c) { return gating(gate[c]); };
    if (norm.gate_first)
      for (int c = lane; c < norm.head_dim; c += 32) x[c] = __fmul_rn(x[c], activated(c));
    for (int c = lane; c < norm.head_dim; c += 32) sum = fmaf(x[c], x[c], sum);
    const float factor = __fdiv_rn(1.0f, sqrtf(warp_sum(sum) / norm.head_dim + norm.eps));
    for (int c = lane; c < norm.head_dim; c += 32) {
      const float value = __fmul_rn(__fmul_rn(x[c], factor), weight[c]);
      x[c] = norm.gate_first ? value : __fmul_rn(value, activated(c));
    }
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
  const auto kernel = norm.head_dim <= 128    ? gated_rms_norm_kernel<4>
                      : norm.head_dim <= 512  ? gated_rms_norm_kernel<16>
                      : norm.head_dim <= 1024 ? gated_rms_norm_kernel<32>
                                              : gated_rms_norm_kernel<0>;
  start(queue, kernel, dim3(ceil_div(heads, kThreads / 32), rows), kThreads, 0, x, gate, norm, heads, width);
}

void relu_square(float* x, size_t count, const Queue& queue) {
  start(queue, relu_square_kernel, dim3(ceil_div(count, kThreads)), kThreads, 0, x, count);
}

void sigmoid_gate(float* x, const float* gate, size_t count, const Queue& queue) {
  start(queue, sigmoid_gate_kernel, dim3(ceil_div(count, kThreads)), kThreads, 0, x, gate, count);
}

}  // namespace as::cuda
