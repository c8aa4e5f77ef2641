// Norms of heads, and gates. x and the result may be the same memory.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 256, kEight = 8;

__device__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }

// A warp for each head. kEach: a lane's features, which it reads at once; 0: heads are larger than that.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(float* x, const float* gate, GatedNorm norm, int heads, Rows out) {
  after_previous();
  const int head = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
  if (head >= heads) return;
  const int column = head * norm.head_dim;
  const size_t begin = (size_t)row * out.width + column;
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
      if (i * 32 + lane < norm.head_dim)
        put(out, row, column + i * 32 + lane, norm.gate_first ? value : __fmul_rn(value, gates[i]));
    }
  } else {
    const auto activated = [&](int c) { return gating(gate[c]); };
    if (norm.gate_first)
      for (int c = lane; c < norm.head_dim; c += 32) x[c] = __fmul_rn(x[c], activated(c));
    for (int c = lane; c < norm.head_dim; c += 32) sum = fmaf(x[c], x[c], sum);
    const float factor = __fdiv_rn(1.0f, sqrtf(warp_sum(sum) / norm.head_dim + norm.eps));
    for (int c = lane; c < norm.head_dim; c += 32) {
      const float value = __fmul_rn(__fmul_rn(x[c], factor), weight[c]);
      put(out, row, column + c, norm.gate_first ? value : __fmul_rn(value, activated(c)));
    }
  }
}

// A thread has eight columns of a row.
__global__ void __launch_bounds__(kThreads) relu_square_kernel(const float* x, Rows out) {
  after_previous();
  const int row = blockIdx.y, column = kEight * (blockIdx.x * kThreads + threadIdx.x);
  if (column >= out.width) return;
  float values[kEight];
  read_eight(x + (size_t)row * out.width, column, out.width, values);
#pragma unroll
  for (int j = 0; j < kEight; j++) {
    const float positive = values[j] < 0 ? 0.0f : values[j];  // NaN stays
    values[j] = __fmul_rn(positive, positive);
  }
  put_eight(out, row, column, out.width, values);
}

__global__ void __launch_bounds__(kThreads) sigmoid_gate_kernel(const float* x, const float* gate, Rows out) {
  after_previous();
  const int row = blockIdx.y, column = kEight * (blockIdx.x * kThreads + threadIdx.x);
  if (column >= out.width) return;
  float values[kEight], gates[kEight];
  read_eight(x + (size_t)row * out.width, column, out.width, values);
  read_eight(gate + (size_t)row * out.width, column, out.width, gates);
#pragma unroll
  for (int j = 0; j < kEight; j++) values[j] = __fmul_rn(values[j], sigmoid(gates[j]));
  put_eight(out, row, column, out.width, values);
}

dim3 grid_of(int width, int rows) { return dim3(ceil_div(width, kEight * kThreads), rows); }

}  // namespace

void gated_rms_norm(float* x, const float* gate, const GatedNorm& norm, const Rows& out, int rows, const Queue& queue) {
  const int heads = out.width / norm.head_dim;
  const auto kernel = norm.head_dim <= 128    ? gated_rms_norm_kernel<4>
                      : norm.head_dim <= 512  ? gated_rms_norm_kernel<16>
                      : norm.head_dim <= 1024 ? gated_rms_norm_kernel<32>
                                              : gated_rms_norm_kernel<0>;
  start(queue, kernel, dim3(ceil_div(heads, kThreads / 32), rows), kThreads, 0, x, gate, norm, heads, out);
}

void relu_square(const float* x, const Rows& out, int rows, const Queue& queue) {
  start(queue, relu_square_kernel, grid_of(out.width, rows), kThreads, 0, x, out);
}

void sigmoid_gate(const float* x, const float* gate, const Rows& out, int rows, const Queue& queue) {
  start(queue, sigmoid_gate_kernel, grid_of(out.width, rows), kThreads, 0, x, gate, out);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
