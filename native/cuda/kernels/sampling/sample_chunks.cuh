// Samples a token in proportion to weights: sums in order, and the choice of a chunk and of one of its tokens. All
// threads of a CTA call these functions, unless they say otherwise.
#pragma once
#include "cuda/kernels/sampling/sample_listed.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

// A thread adds weights in order, kAtOnce at a time: each sum waits for the previous one, but loads from shared memory
// and comparisons need not wait for sums.
constexpr int kAtOnce = 8;
template <typename Sum>
__device__ void next_sums(const float* weights, int from, int count, double& sum, const Sum& sum_of,
                          float (&w)[kAtOnce], double (&before)[kAtOnce]) {
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) w[j] = from + j < count ? weights[from + j] : 0.0f;
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) before[j] = sum, sum = sum_of(sum, w[j]);
}

// The sum of the first `count` weights.
__device__ __noinline__ double sum_in_order(const float* weights, int count) {
  double sum = 0.0, before[kAtOnce];
  float w[kAtOnce];
  for (int from = 0; from < count; from += kAtOnce)
    next_sums(weights, from, count, sum, [](double sum, float w) { return sum + w; }, w, before);
  return sum;
}

// The number of first weights whose sum reaches `need`: at least one, at most `count`.
__device__ int count_to(const float* weights, int count, double need, double& sum) {
  double before[kAtOnce];
  float w[kAtOnce];
  sum = 0.0;
  for (int from = 0; from < count; from += kAtOnce) {
    next_sums(weights, from, count, sum, [](double sum, float w) { return sum + w; }, w, before);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (from + j && from + j < count && !(before[j] < need)) return sum = before[j], from + j;
  }
  return count;
}

// The index in `weights` where the running sum exceeds uniform * sum. One thread calls it.
__device__ __noinline__ int inverse_cdf(const float* weights, int count, double sum, double uniform) {
  double left = uniform * sum, before[kAtOnce];
  float w[kAtOnce];
  int pick = 0;
  for (int from = 0; from < count; from += kAtOnce) {
    next_sums(weights, from, count, left, [](double left, float w) { return left - w; }, w, before);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (!(w[j] > 0.0f)) continue;
      pick = from + j;
      if (before[j] < w[j]) return pick;
    }
  }
  return pick;
}

struct BestChunk {
  double key;
  int chunk;  // INT_MAX: none has a weight
  float top;  // its greatest logit

  __device__ void take(const BestChunk& other) {
    if (other.chunk == INT_MAX || (chunk != INT_MAX && (other.key < key || (other.key == key && other.chunk > chunk))))
      return;
    *this = other;
  }
};

// Of chunks [begin, end), the one with the greatest log(weight) plus noise.
__device__ __noinline__ BestChunk best_chunk(Shared& s, const RowSample& sample, const RowSums& row, float top,
                                             int begin, int end) {
  BestChunk best{0.0, INT_MAX, -INFINITY};
  for (int c = begin + threadIdx.x; c < end; c += kThreads) {
    const double weight = row.sums[c] * exp_nonpositive((row.maxima[c] - top) * sample.scale);
    if (!(weight > 0.0)) continue;
    const Uniforms pair = chunk_uniforms_of(sample.random, c / 2);
    const double wait = -exact::log(c % 2 ? pair.second : pair.first);
    best.take({exact::log(row.sums[c] / wait) + (double)row.maxima[c] * sample.scale, c, row.maxima[c]});
  }
  const auto take_of_lanes = [&] {
#pragma unroll 1
    for (int step = 16; step; step /= 2) {
      const double key = __shfl_xor_sync(kAll, best.key, step);
      const int chunk = __shfl_xor_sync(kAll, best.chunk, step);
      best.take({key, chunk, __shfl_xor_sync(kAll, best.top, step)});
    }
  };
  take_of_lanes();
  if (threadIdx.x % 32 == 0)
    s.keys[threadIdx.x / 32] = best.key, s.ids[threadIdx.x / 32] = best.chunk, s.tops[threadIdx.x / 32] = best.top;
  __syncthreads();
  best = {s.keys[threadIdx.x % 32], s.ids[threadIdx.x % 32], s.tops[threadIdx.x % 32]};
  take_of_lanes();
  __syncthreads();
  return best;
}

// top: the greatest logit of the chunk.
template <typename Values>
__device__ __noinline__ int token_of_chunk(Shared& s, const SampleTask& task, const RowSample& sample, const Values& x,
                                           int chunk, float top) {
  const int begin = chunk * task.chunk, count = min(task.chunk, task.width - begin);
  if ((int)threadIdx.x < count) s.weights[threadIdx.x] = exp_nonpositive((x(begin + threadIdx.x) - top) * sample.scale);
  __syncthreads();
  if (threadIdx.x == 0) {
    const double sum = sum_in_order(s.weights, count);
    s.token = begin + inverse_cdf(s.weights, count, sum, uniforms_of(sample.random).second);
  }
  __syncthreads();
  return s.token;
}

}  // namespace
}  // namespace AS_DTYPE16
}  // namespace as::cuda
