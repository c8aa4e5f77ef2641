// The positions with the largest scores: a CTA for each row finds the smallest selected score by its bits, 11 at a
// time, and then writes the positions in order.
#include "cuda/kernels/attention/indexer.h"
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace {

// kEach: adjacent scores of a thread; kAhead: scores that it reads before it counts them.
constexpr int kThreads = 1024, kBuckets = 1 << 11, kEach = 4, kAhead = 8;
constexpr unsigned kAll = 0xffffffffu;
static_assert(kBuckets == 2 * kThreads && kIndexTokens % kEach == 0);

// The order of floats as that of unsigned integers.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The sum of the values of earlier threads, and of all.
__device__ int sum_before(int x, int& all) {
  __shared__ int sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto up_to = [&](int value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, value, step);
      if (lane >= step) value += other;
    }
    return value;
  };
  const int own = up_to(x);
  __syncthreads();
  if (lane == 31) sums[warp] = own;
  __syncthreads();
  const int warps = up_to(sums[lane]);
  all = __shfl_sync(kAll, warps, 31);
  const int before = __shfl_sync(kAll, warps, warp ? warp - 1 : 0);
  return own - x + (warp ? before : 0);
}

__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ Indexer p, int first) {
  __shared__ int counts[kBuckets];
  __shared__ int found, more;
  after_previous();
  const int row = first + blockIdx.x, seen = p.positions[row] + 1, lane = threadIdx.x % 32;
  const int n = p.entries.rate ? seen / p.entries.rate : seen;
  float* out = p.selected + (size_t)row * p.width;
  if (n <= p.width) {
    for (int i = threadIdx.x; i < p.width; i += kThreads) out[i] = i < n ? (float)i : -1.0f;
    return;
  }
  const float* scores = p.scores + (size_t)blockIdx.x * p.stride;
  uint32_t bound = 0, known = 0;  // bits of the smallest selected score, and which of them are known
  int left = p.width;             // of the scores whose known bits are equal to these, so many are selected
  for (const int shift : {21, 10, 0}) {
    const uint32_t mask = shift ? kBuckets - 1 : kBuckets / 2 - 1;
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) counts[i] = 0;
    __syncthreads();
    // Scores are of similar size, so those of a warp share buckets: one thread counts for all with the same one.
    for (int begin = threadIdx.x - lane; begin < n; begin += kThreads * kAhead) {
      float read[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; j++) {
        const int at = begin + j * kThreads + lane;
        read[j] = at < n ? scores[at] : 0;
      }
#pragma unroll
      for (int j = 0; j < kAhead; j++) {
        if (begin + j * kThreads >= n) break;
        const uint32_t x = ordered(read[j]);
        const bool counted = begin + j * kThreads + lane < n && (x & known) == bound;
        const int bucket = counted ? (int)(x >> shift & mask) : -1;
        const unsigned same = __match_any_sync(kAll, bucket);
        if (counted && lane == __ffs(same) - 1) atomicAdd(&counts[bucket], __popc(same));
      }
    }
    __syncthreads();
    // From the largest bucket on, until as many are found as are left.
    const int high = kBuckets - 1 - 2 * (int)threadIdx.x, of_high = counts[high], of_low = counts[high - 1];
    int all;
    const int before = sum_before(of_high + of_low, all);
    if (before < left && before + of_high + of_low >= left) {
      const bool lower = before + of_high < left;
      found = high - lower, more = left - before - (lower ? of_high : 0);
    }
    __syncthreads();
    bound |= (uint32_t)found << shift, known |= mask << shift, left = more;
    __syncthreads();
  }
  int above = 0, equal = 0;  // larger scores, and equal ones, before this thread's
  for (int begin = 0; begin < n && above + min(equal, left) < p.width; begin += kThreads * kEach) {
    const int own = begin + threadIdx.x * kEach;
    uint32_t x[kEach] = {};
    if (own < n) {
      const float4 four = *reinterpret_cast<const float4*>(scores + own);
      x[0] = ordered(four.x), x[1] = ordered(four.y), x[2] = ordered(four.z), x[3] = ordered(four.w);
    }
    int count = 0;  // larger ones, and equal ones in the high half
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (own + i < n) count += (x[i] > bound) + ((int)(x[i] == bound) << 16);
    int all;
    const int before = sum_before(count, all);
    int larger = above + (before & 0xffff), same = equal + (before >> 16);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (own + i >= n) break;
      if (x[i] > bound || (x[i] == bound && same < left)) out[larger + min(same, left)] = (float)(own + i);
      larger += x[i] > bound, same += x[i] == bound;
    }
    above += all & 0xffff, equal += all >> 16;
  }
}

}  // namespace

void select_positions(const Indexer& p, int first, int rows, const Queue& queue) {
  start(queue, select_kernel, dim3(rows), kThreads, 0, p, first);
}

}  // namespace as::cuda
