// The likeliest token of each row, in parts: blocks of threads share a row.
#include <cfloat>

#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kThreads = 512;

// Of equal logits the lower id is better.
__device__ void take_better(float& value, int& id, float other, int other_id) {
  if (other > value || (other == value && other_id < id)) value = other, id = other_id;
}

// kFour: logits are read four at a time, as rows are of whole fours.
template <bool kFour>
__global__ void __launch_bounds__(kThreads) best_kernel(const float* logits, int width, Best* best) {
  constexpr int kEach = kFour ? 4 : 1;
  after_previous();
  const float* x = logits + (size_t)blockIdx.y * width;
  const int64_t units = width / kEach;
  const int begin = (int)(units * blockIdx.x / kBestParts), end = (int)(units * (blockIdx.x + 1) / kBestParts);
  float value = -INFINITY;
  int id = INT_MAX, bad = 0;
#pragma unroll 4
  for (int i = begin + threadIdx.x; i < end; i += kThreads) {
    float v[kEach];
    if constexpr (kFour) {
      const float4 four = reinterpret_cast<const float4*>(x)[i];
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
      v[0] = x[i];
    }
#pragma unroll
    for (int j = 0; j < kEach; j++) {
      if (!(v[j] <= FLT_MAX)) bad++;
      else if (v[j] > value) value = v[j], id = i * kEach + j;
    }
  }
  __shared__ float values[kThreads / 32];
  __shared__ int ids[kThreads / 32], wrong[kThreads / 32];
  for (int step = 16; step; step /= 2) {
    take_better(value, id, __shfl_xor_sync(0xffffffffu, value, step), __shfl_xor_sync(0xffffffffu, id, step));
    bad += __shfl_xor_sync(0xffffffffu, bad, step);
  }
  if (threadIdx.x % 32 == 0)
    values[threadIdx.x / 32] = value, ids[threadIdx.x / 32] = id, wrong[threadIdx.x / 32] = bad;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < kThreads / 32; w++) take_better(value, id, values[w], ids[w]), bad += wrong[w];
  best[blockIdx.y * kBestParts + blockIdx.x] = {value, value > -INFINITY ? id : -1, bad};
}

}  // namespace

void best_tokens(const float* logits, int width, int rows, Best* best, const Queue& queue) {
  const auto kernel = width % 4 ? best_kernel<false> : best_kernel<true>;
  start(queue, kernel, dim3(kBestParts, rows), kThreads, 0, logits, width, best);
  launched("best_tokens");
}

}  // namespace cuda
}  // namespace as
