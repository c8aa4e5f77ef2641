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

// The sum of the squares of 128 values, of which a lane has four adjacent ones. Its bits are those of the kernel above,
// which adds values that are 32 apart, then lanes: so lanes first exchange values until each has those of one sum.
__device__ float sum_of_squares(const float4& x) {
  const bool odd = threadIdx.x & 8, upper = threadIdx.x & 16;
  const float a = __shfl_xor_sync(~0u, odd ? x.x : x.y, 8), b = __shfl_xor_sync(~0u, odd ? x.z : x.w, 8);
  const float low[2] = {odd ? a : x.x, odd ? x.y : a}, high[2] = {odd ? b : x.z, odd ? x.w : b};
  const float c = __shfl_xor_sync(~0u, upper ? low[0] : high[0], 16),
              d = __shfl_xor_sync(~0u, upper ? low[1] : high[1], 16);
  const float own[4] = {upper ? c : low[0], upper ? d : low[1], upper ? high[0] : c, upper ? high[1] : d};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum = fmaf(own[i], own[i], sum);
#pragma unroll
  for (int i = 0; i < 5; i++) sum += __shfl_xor_sync(~0u, sum, 1 << (i + 3) % 5);
  return sum;
}

// The same for heads of at most 128 features. All memory is aligned to four values.
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_fours_kernel(const float* x, const float* gate, GatedNorm norm, int heads, Rows out) {
  after_previous();
  const int head = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, row = blockIdx.y, c = threadIdx.x % 32 * 4,
            column = head * norm.head_dim + c;
  if (head >= heads) return;
  const bool there = c < norm.head_dim;
  const auto load = [&](const float* from) {
    return there ? *reinterpret_cast<const float4*>(from) : make_float4(0, 0, 0, 0);
  };
  const size_t at = (size_t)row * out.width + column;
  float4 values = load(x + at), gates = load(gate + at);
  const float4 weights = load(norm.weight + (norm.gate_first ? column : c));
  const auto gating = [&](float g) { return norm.sigmoid ? sigmoid(g) : __fmul_rn(g, sigmoid(g)); };
  gates = make_float4(gating(gates.x), gating(gates.y), gating(gates.z), gating(gates.w));
  const auto product = [](const float4& a, const float4& b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
  };
  if (norm.gate_first) values = product(values, gates);
  const float factor = __fdiv_rn(1.0f, sqrtf(sum_of_squares(values) / norm.head_dim + norm.eps));
  values = product(product(values, make_float4(factor, factor, factor, factor)), weights);
  if (!norm.gate_first) values = product(values, gates);
  if (!there) return;
  if (out.tiles)
    *reinterpret_cast<uint2*>(out.tiles + tile_offset(row, column, blocks_of(out.width))) =
        make_uint2(to_dtype16x2(values.x, values.y), to_dtype16x2(values.z, values.w));
  if (out.values) *reinterpret_cast<float4*>(out.values + at) = values;
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
  const dim3 grid(ceil_div(heads, kThreads / 32), rows);
  const auto aligned = [](const float* p) { return (uintptr_t)p % 16 == 0; };
  if (norm.head_dim <= 128 && norm.head_dim % 4 == 0 && aligned(x) && aligned(gate) && aligned(norm.weight) &&
      aligned(out.values))
    return start(queue, gated_rms_norm_fours_kernel, grid, kThreads, 0, x, gate, norm, heads, out);
  const auto kernel = norm.head_dim <= 128    ? gated_rms_norm_kernel<4>
                      : norm.head_dim <= 512  ? gated_rms_norm_kernel<16>
                      : norm.head_dim <= 1024 ? gated_rms_norm_kernel<32>
                                              : gated_rms_norm_kernel<0>;
  start(queue, kernel, grid, kThreads, 0, x, gate, norm, heads, out);
}

void relu_square(const float* x, const Rows& out, int rows, const Queue& queue) {
  start(queue, relu_square_kernel, grid_of(out.width, rows), kThreads, 0, x, out);
}

void sigmoid_gate(const float* x, const float* gate, const Rows& out, int rows, const Queue& queue) {
  start(queue, sigmoid_gate_kernel, grid_of(out.width, rows), kThreads, 0, x, gate, out);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
