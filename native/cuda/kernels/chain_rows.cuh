// What a chain of ops does to rows between products, by the threads that multiply.
#pragma once
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {

// As rms_norm() does it, to the bit, whose threads these are two by two (or four by four). barrier(): of all of them.
// What another processor has written in this launch is not read by way of the first-level cache.
template <int kThreads, typename Barrier>
__device__ inline void norm_row(const float* x, const Norm& norm, int row, const Rows& out, Barrier barrier) {
  constexpr int kNormThreads = 512, kEach = kNormThreads / kThreads, kEights = 2;
  __shared__ float squares[kNormThreads / 32];
  static_assert(kNormThreads % kThreads == 0);
  const int width = out.width, thread = threadIdx.x;
  const float* in = x + (size_t)row * width;
  const auto at = [&](int i, int j) { return (i * kNormThreads + j * kThreads + thread) * 8; };
  const auto read = [&](int column, float(&values)[8]) {
    if (width % 4 == 0 && column + 8 <= width) {
      const float4* from = reinterpret_cast<const float4*>(in + column);
      const float4 low = __ldcg(from), high = __ldcg(from + 1);
      values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
      values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) values[j] = column + j < width ? __ldcg(in + column + j) : 0.0f;
    }
  };
  float kept[kEights][kEach][8], weights[kEights][kEach][8];
#pragma unroll
  for (int i = 0; i < kEights; i++)
#pragma unroll
    for (int j = 0; j < kEach; j++) read(at(i, j), kept[i][j]), read_eight(norm.weight, at(i, j), width, weights[i][j]);
  constexpr int kAll = kEights * kNormThreads * 8;
#pragma unroll
  for (int j = 0; j < kEach; j++) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kEights; i++)
#pragma unroll
      for (int v = 0; v < 8; v++) sum = fmaf(kept[i][j][v], kept[i][j][v], sum);
    for (int i = kAll + j * kThreads + thread; i < width; i += kNormThreads) {
      const float value = __ldcg(in + i);
      sum = fmaf(value, value, sum);
    }
    sum = warp_sum(sum);
    if (thread % 32 == 0) squares[(j * kThreads + thread) / 32] = sum;
  }
  barrier();
  float total = 0;
  for (int w = 0; w < kNormThreads / 32; w++) total += squares[w];
  const float factor = 1.0f / sqrtf(total / width + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kEights; i++)
#pragma unroll
    for (int j = 0; j < kEach; j++) {
#pragma unroll
      for (int v = 0; v < 8; v++) kept[i][j][v] = kept[i][j][v] * factor * (weights[i][j][v] + one);
      put_eight(out, row, at(i, j), width, kept[i][j]);
    }
  for (int i = kAll + thread; i < width; i += kThreads)
    put(out, row, i, __ldcg(in + i) * factor * (norm.weight[i] + one));
  barrier();  // before the next row's sums
}

}  // namespace cuda
}  // namespace as
