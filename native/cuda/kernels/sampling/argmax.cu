// The most likely token of each row: several CTAs share a row.
#include <cfloat>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/sampling/argmax.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 256, kTogether = 5;  // loads of a thread in flight

// Between equal logits, the lower id wins.
__device__ void take_better(float& value, int& id, float other, int other_id) {
  if (other > value || (other == value && other_id < id)) value = other, id = other_id;
}

// kFour: logits are read four at a time; the width must be a multiple of four.
template <bool kFour>
__global__ void __launch_bounds__(kThreads) argmax_kernel(const float* logits, int width, Argmax* best) {
  constexpr int kEach = kFour ? 4 : 1;
  after_previous();
  const float* x = logits + (size_t)blockIdx.y * width;
  const int64_t units = width / kEach;
  const int begin = (int)(units * blockIdx.x / kArgmaxParts), end = (int)(units * (blockIdx.x + 1) / kArgmaxParts);
  float value = -INFINITY;
  int id = INT_MAX, bad = 0;
#pragma unroll 1
  for (int first = begin + threadIdx.x; first < end; first += kTogether * kThreads) {
    float v[kTogether][kEach];
#pragma unroll
    for (int k = 0; k < kTogether; k++) {
      const int i = first + k * kThreads;
      if constexpr (kFour) {
        const float4 four =
            i < end ? reinterpret_cast<const float4*>(x)[i] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
      } else {
        v[k][0] = i < end ? x[i] : -INFINITY;
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; k++)
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        if (!(v[k][j] <= FLT_MAX)) bad++;
        else if (v[k][j] > value) value = v[k][j], id = (first + k * kThreads) * kEach + j;
      }
  }
  constexpr int kWarps = kThreads / 32;
  __shared__ float values[kWarps];
  __shared__ int ids[kWarps], wrong[kWarps];
  const auto take_lanes = [&](int lanes) {
    for (int step = lanes / 2; step; step /= 2) {
      take_better(value, id, __shfl_xor_sync(0xffffffffu, value, step), __shfl_xor_sync(0xffffffffu, id, step));
      bad += __shfl_xor_sync(0xffffffffu, bad, step);
    }
  };
  take_lanes(32);
  if (threadIdx.x % 32 == 0)
    values[threadIdx.x / 32] = value, ids[threadIdx.x / 32] = id, wrong[threadIdx.x / 32] = bad;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int warp = threadIdx.x % kWarps;
  value = values[warp], id = ids[warp], bad = wrong[warp];
  take_lanes(kWarps);
  if (threadIdx.x) return;
  best[blockIdx.y * kArgmaxParts + blockIdx.x] = {value, value > -INFINITY ? id : -1, bad};
}

}  // namespace

void argmax(const float* logits, int width, int rows, Argmax* best, const Queue& queue) {
  const auto kernel = width % 4 ? argmax_kernel<false> : argmax_kernel<true>;
  start(queue, kernel, dim3(kArgmaxParts, rows), kThreads, 0, logits, width, best);
}

}  // namespace as::cuda
