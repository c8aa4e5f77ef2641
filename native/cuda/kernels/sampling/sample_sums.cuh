// Logits of a row and sums of their chunks, in the order of native/sampling.
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/sampling/sample.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

using namespace sampling;

#include "sampling/weights.h"

constexpr unsigned kAll = 0xffffffffu;

__device__ inline bool allows(const uint32_t* mask, int id) { return (mask[id / 32] >> (id % 32)) & 1u; }

// A row of logits; those that the mask excludes are -infinity.
struct Logits {
  const float* values;
  const uint32_t* mask;  // null: none

  __device__ float operator()(int id) const { return mask && !allows(mask, id) ? -INFINITY : values[id]; }
};

__device__ inline Logits processed_of(const SampleTask& task, const RowSample& sample) {
  return {task.logits + (size_t)sample.row * task.width,
          sample.mask < 0 ? nullptr : task.masks + (size_t)sample.mask * task.mask_words};
}

__device__ inline float greater(float a, float b) { return b > a ? b : a; }

// Half a warp sums a chunk of 256; each thread is a lane of LogitKernels. weighs: whether the sum is needed.
template <typename Values>
__device__ void sum_chunk(const Values& x, int width, float scale, int c, bool weighs, float& top, double& sum,
                          float& group) {
  const int lane = threadIdx.x % kLanes;
  float values[kChunk / kLanes];
  float most = -INFINITY;
#pragma unroll
  for (int k = 0; k < kChunk / kLanes; k++) {
    const int id = c * kChunk + k * kLanes + lane;
    values[k] = id < width ? x(id) : -INFINITY;
  }
#pragma unroll
  for (int k = 0; k < kChunk / kLanes; k++) most = greater(most, values[k]);
  most = greater(most, __shfl_xor_sync(kAll, most, 8));
  most = greater(most, __shfl_xor_sync(kAll, most, 4));
  group = most;  // over lanes equal modulo 4
  most = greater(most, __shfl_xor_sync(kAll, most, 2));
  most = greater(most, __shfl_xor_sync(kAll, most, 1));
  top = most;
  sum = 0.0;
  if (!weighs) return;
  float own = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunk / kLanes; k++) own += exp_nonpositive((values[k] - top) * scale);
  for (int j = 0; j < kLanes; j++) sum += __shfl_sync(kAll, own, j, kLanes);
  if (top == -INFINITY) sum = 0.0;
}

// A thread sums a chunk of a small vocabulary.
template <typename Values>
__device__ void sum_small_chunk(const Values& x, int begin, int end, float scale, float& top, double& sum) {
  top = -INFINITY, sum = 0.0;
  for (int i = begin; i < end; i++) top = greater(top, x(i));
  for (int i = begin; i < end && top > -INFINITY; i++) sum += exp_nonpositive((x(i) - top) * scale);
}

struct RowSums {
  const float* maxima;
  const double* sums;
  const float* groups;
  int chunks, group_count;
};

__device__ inline RowSums row_sums(const SampleTask& task, const ChunkSums& of, int sample) {
  const int groups = groups_of(task.chunk);
  const size_t first = (size_t)sample * task.chunks;
  return {of.maxima + first, of.sums + first, of.groups + first * groups, task.chunks, task.chunks * groups};
}

}  // namespace
}  // namespace AS_DTYPE16
}  // namespace as::cuda
