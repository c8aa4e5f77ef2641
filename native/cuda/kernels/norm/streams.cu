// Residual streams: their weights, of which a warp computes a row's, and sums over streams, of which a thread computes
// some columns.
#include "cuda/kernels/norm/streams.h"

#include "cuda/kernels/norm/stream_weights.cuh"
#include "cuda/kernels/norm/thread_columns.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = kThreadColumns;
constexpr int kMixThreads = 64, kMixed = kMixThreads * kEach;  // columns of a CTA that mixes streams

__global__ void __launch_bounds__(32) stream_weights_kernel(float* x, StreamWeights by) {
  extern __shared__ float mix[];
  after_previous();
  float* row = x + (size_t)blockIdx.x * by.width;
  for (int i = threadIdx.x; i < by.streams; i += 32) row[i] = pre_weight(by, row, i);
  weigh_others(by, row, mix);
}

template <bool kWhole>
__global__ void __launch_bounds__(kThreads)
    merge_streams_kernel(const float* x, int streams, const float* weights, int weights_width, Rows y) {
  after_previous();
  const int row = blockIdx.y, width = y.width, column = (blockIdx.x * kThreads + threadIdx.x) * kEach;
  if (column >= width) return;
  const float *own = x + (size_t)row * streams * width,
              *pre = weights ? weights + (size_t)row * weights_width : nullptr;
  float sums[kEach] = {};
#pragma unroll 4
  for (int i = 0; i < streams; i++) {
    float values[kEach];
    read_columns<kWhole>(own + (size_t)i * width, column, width, values);
#pragma unroll
    for (int j = 0; j < kEach; j++) sums[j] = fmaf(pre ? pre[i] : 1.0f / streams, values[j], sums[j]);
  }
  write_columns<kWhole>(y.values + (size_t)row * width, column, width, sums);
}

// The streams' columns wait in shared memory, where a thread reads only what it wrote itself.
template <bool kWhole>
__global__ void __launch_bounds__(kMixThreads)
    mix_streams_kernel(float* x, int streams, const float* y, int width, const float* weights) {
  extern __shared__ __align__(16) float kept[];
  after_previous();
  const int row = blockIdx.y, place = threadIdx.x * kEach, column = blockIdx.x * kMixed + place;
  if (column >= width) return;
  float* own = x + (size_t)row * streams * width;
  const float *post = weights + (size_t)row * streams * (2 + streams) + streams, *mix = post + streams;
  float added[kEach], values[kEach];
  read_columns<kWhole>(y + (size_t)row * width, column, width, added);
#pragma unroll 4
  for (int j = 0; j < streams; j++) {
    read_columns<kWhole>(own + (size_t)j * width, column, width, values);
    write_columns<true>(kept + j * kMixed, place, kMixed, values);
  }
  for (int k = 0; k < streams; k++) {
    float sums[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) sums[i] = post[k] * added[i];
#pragma unroll 4
    for (int j = 0; j < streams; j++) {
      const float by = mix[j * streams + k];
      read_columns<true>(kept + j * kMixed, place, kMixed, values);
#pragma unroll
      for (int i = 0; i < kEach; i++) sums[i] = fmaf(by, values[i], sums[i]);
    }
    write_columns<kWhole>(own + (size_t)k * width, column, width, sums);
  }
}

}  // namespace

void stream_weights(float* x, const StreamWeights& by, int rows, const Queue& queue) {
  start(queue, stream_weights_kernel, rows, 32, (size_t)by.streams * by.streams * sizeof(float), x, by);
}

void merge_streams(const float* x, int streams, const float* weights, int weights_width, int rows, const Rows& y,
                   const Queue& queue) {
  const auto kernel = y.width % kEach ? merge_streams_kernel<false> : merge_streams_kernel<true>;
  start(queue, kernel, dim3(ceil_div(y.width, kThreads * kEach), rows), kThreads, 0, x, streams, weights, weights_width,
        y);
}

void mix_streams(float* x, int streams, const float* y, int width, const float* weights, int rows, const Queue& queue) {
  const auto kernel = width % kEach ? mix_streams_kernel<false> : mix_streams_kernel<true>;
  start(queue, kernel, dim3(ceil_div(width, kMixed), rows), kMixThreads, (size_t)streams * kMixed * sizeof(float), x,
        streams, y, width, weights);
}

}  // namespace as::cuda
