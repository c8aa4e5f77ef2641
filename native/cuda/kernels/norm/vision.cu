// Ops of vision towers with results in float32 or 16 bits. float32 only: vision_f32.cu.
#include "cuda/kernels/norm/vision.h"

#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 256;

// Kernels that write rows have a thread for eight columns, padding of tiles included.
int eights_of(const Rows& out) { return out.tiles ? blocks_of(out.width) * 8 : ceil_div(out.width, 8); }
dim3 grid_of(const Rows& out, int rows) { return dim3(ceil_div(eights_of(out), kThreads), rows); }

// As put_eight(), also of columns behind the last one: padding of tiles becomes zero.
__device__ void put_columns(const Rows& out, int row, int column, const float (&values)[8]) {
  if (column < out.width) return put_eight(out, row, column, out.width, values);
  const int blocks = blocks_of(out.width);
  if (out.tiles && column < blocks * kBlock)
    *reinterpret_cast<uint4*>(out.tiles + tile_offset(row, column, blocks)) = make_uint4(0, 0, 0, 0);
}

__global__ void __launch_bounds__(kThreads) copy_given_kernel(GivenRows given, bool own, bool only, Rows out) {
  after_previous();
  const int row = blockIdx.y, column = (blockIdx.x * kThreads + threadIdx.x) * 8, number = given.numbers[row];
  if (number < 0 && only) return;
  float values[8] = {};
  if (number >= 0 && own && column < out.width)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (column + i < out.width) values[i] = given.rows[(size_t)number * given.width + column + i];
  put_columns(out, row, column, values);
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const float* in, int width, int count, Merge how, Rows out) {
  after_previous();
  const int row = blockIdx.y, first = (blockIdx.x * kThreads + threadIdx.x) * 8;
  const float* from = in + (size_t)row * count * width;
  float values[8] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int column = first + i;
    if (column >= out.width) break;
    if (how == Merge::mean) {
      double sum = 0;
      for (int r = 0; r < count; r++) sum += from[(size_t)r * width + column];
      values[i] = (float)(sum / count);
    } else {
      const int r = how == Merge::concat ? column / width : column % count;
      values[i] = from[(size_t)r * width + (how == Merge::concat ? column % width : column / count)];
    }
  }
  put_columns(out, row, first, values);
}

// kEights: groups of eight values that a thread keeps in registers; further ones are read again.
template <int kEights>
__global__ void __launch_bounds__(kThreads) layer_norm_kernel(const float* x, LayerNorm norm, Rows out) {
  after_previous();
  const int row = blockIdx.x, width = out.width;
  const float* in = x + (size_t)row * width;
  constexpr int kAll = kEights * kThreads * 8;
  const auto at = [](int i) { return (i * kThreads + (int)threadIdx.x) * 8; };
  float kept[kEights][8], sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < kEights; i++) {
    read_eight(in, at(i), width, kept[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += kept[i][j];
  }
  for (int i = kAll + threadIdx.x; i < width; i += kThreads) sum += in[i];
  const float mean = block_sum<kThreads>(sum, kThreads) / width;
#pragma unroll
  for (int i = 0; i < kEights; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      kept[i][j] -= mean;
      if (at(i) + j < width) squares = fmaf(kept[i][j], kept[i][j], squares);
    }
  for (int i = kAll + threadIdx.x; i < width; i += kThreads) squares = fmaf(in[i] - mean, in[i] - mean, squares);
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, kThreads) / width + norm.eps);
#pragma unroll
  for (int i = 0; i < kEights; i++) {
    if (at(i) >= width) break;
    float weights[8], biases[8];
    read_eight(norm.weight, at(i), width, weights), read_eight(norm.bias, at(i), width, biases);
#pragma unroll
    for (int j = 0; j < 8; j++) kept[i][j] = fmaf(kept[i][j] * factor, weights[j], biases[j]);
    put_eight(out, row, at(i), width, kept[i]);
  }
  for (int i = kAll + threadIdx.x; i < width; i += kThreads)
    put(out, row, i, fmaf((in[i] - mean) * factor, norm.weight[i], norm.bias[i]));
}

template <Activation kFunction>
__device__ float activated(float x) {
  if constexpr (kFunction == Activation::gelu) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  if constexpr (kFunction == Activation::gelu_tanh)  // the square root of 2 / pi
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  if constexpr (kFunction == Activation::silu) return x / (1.0f + expf(-x));
  if constexpr (kFunction == Activation::tanh) return tanhf(x);
  if constexpr (kFunction == Activation::relu) return x < 0 ? 0.0f : x;  // NaN stays
  return x / (1.0f + expf(-1.702f * x));
}

__global__ void __launch_bounds__(kThreads) gelu_mul_kernel(const float* in, Rows out) {
  after_previous();
  const int row = blockIdx.y, column = (blockIdx.x * kThreads + threadIdx.x) * 8, width = out.width;
  float gates[8] = {}, ups[8];
  if (column < width) {
    const float* from = in + (size_t)row * 2 * width;
    read_eight(from, column, width, gates), read_eight(from + width, column, width, ups);
#pragma unroll
    for (int i = 0; i < 8; i++) gates[i] = activated<Activation::gelu>(gates[i]) * ups[i];
  }
  put_columns(out, row, column, gates);
}

template <Activation kFunction>
__global__ void __launch_bounds__(kThreads) activate_kernel(const float* x, Rows out) {
  after_previous();
  const int row = blockIdx.y, column = (blockIdx.x * kThreads + threadIdx.x) * 8;
  float values[8] = {};
  if (column < out.width) {
    read_eight(x + (size_t)row * out.width, column, out.width, values);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = activated<kFunction>(values[i]);
  }
  put_columns(out, row, column, values);
}

}  // namespace

void copy_given(const GivenRows& given, bool own, bool only, int rows, const Rows& out, const Queue& queue) {
  start(queue, copy_given_kernel, grid_of(out, rows), kThreads, 0, given, own, only, out);
}

void merge_rows(const float* in, int width, int count, Merge how, int rows, const Rows& out, const Queue& queue) {
  start(queue, merge_kernel, grid_of(out, rows), kThreads, 0, in, width, count, how, out);
}

void layer_norm(const float* x, const LayerNorm& norm, int rows, const Rows& out, const Queue& queue) {
  const auto kernel = out.width <= 8 * kThreads ? layer_norm_kernel<1> : layer_norm_kernel<3>;
  start(queue, kernel, rows, kThreads, 0, x, norm, out);
}

void activate(const float* x, Activation function, int rows, const Rows& out, const Queue& queue) {
  const auto kernel = function == Activation::gelu        ? activate_kernel<Activation::gelu>
                      : function == Activation::gelu_tanh ? activate_kernel<Activation::gelu_tanh>
                      : function == Activation::silu      ? activate_kernel<Activation::silu>
                      : function == Activation::tanh      ? activate_kernel<Activation::tanh>
                      : function == Activation::relu      ? activate_kernel<Activation::relu>
                                                          : activate_kernel<Activation::quick_gelu>;
  start(queue, kernel, grid_of(out, rows), kThreads, 0, x, out);
}

void gelu_mul(const float* in, int rows, const Rows& out, const Queue& queue) {
  start(queue, gelu_mul_kernel, grid_of(out, rows), kThreads, 0, in, out);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
