// Choice of a row's experts from its logits, by a warp or a CTA.
#pragma once
#include <climits>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// A value with its index. A greater value comes first; of equal values, the one with the lower index.
struct Candidate {
  float value;
  int index;  // -1: none

  __device__ void consider(float other, int at) {
    if (at >= 0 && (index < 0 || other > value || (other == value && at < index))) value = other, index = at;
  }
};
// The best candidate of a warp, the same in all lanes.
__device__ inline Candidate best_of_warp(Candidate best) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, step);
    const int index = __shfl_xor_sync(0xffffffffu, best.index, step);
    best.consider(value, index);
  }
  return best;
}

// Excludes all groups but those with the best experts, or the highest sums of the two best. A lane has a group.
__device__ inline void keep_groups(const Router& router, float* choice) {
  const int lane = threadIdx.x % 32, size = router.experts / router.groups;
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size && lane < router.groups; i++) {
    const float c = choice[lane * size + i];
    if (c > first) second = first, first = c;
    else if (c > second) second = c;
  }
  const float score = size > 1 && !router.best_of_group ? first + second : first;
  bool kept = false;
  for (int i = 0; i < router.top_groups; i++) {
    const Candidate best = best_of_warp({score, lane < router.groups && !kept ? lane : -1});
    kept |= best.index == lane;
  }
  if (lane < router.groups && !kept)
    for (int i = 0; i < size; i++) choice[lane * size + i] = -INFINITY;
}

// Maps floats to integers of the same order; 0 is below all of them.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // turns -0 into 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Computes a row's scores and keys [experts], by a warp. The greatest key is chosen first, of equal ones the lowest
// expert; all keys are above 0.
__device__ inline void score_row(const float* logits, const Router& router, float* scores, uint32_t* keys) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % 32, experts = router.experts;
  // Softmax keeps the order of logits, and its sum cancels out of normalized weights.
  const bool plain = !router.sigmoid && !router.correction && router.top_groups == router.groups;
  float* choice = reinterpret_cast<float*>(keys);
  float most = -INFINITY, sum = 0;
  for (int begin = lane; begin < experts; begin += 32 * kAtOnce) {
    float logit[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)  // other CTAs of this kernel may have written them
      logit[i] = begin + 32 * i < experts ? __ldcg(logits + begin + 32 * i) : -INFINITY;
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
      if (begin + 32 * i < experts) choice[begin + 32 * i] = logit[i], most = fmaxf(most, logit[i]);
  }
  most = warp_max(most);
#pragma unroll 4
  for (int e = lane; e < experts; e += 32) {
    const float score = router.sigmoid ? 1.0f / (1.0f + expf(-choice[e])) : expf(choice[e] - most);
    scores[e] = score, sum += score;
  }
  sum = warp_sum(sum);
#pragma unroll 4
  for (int e = lane; e < experts; e += 32) {
    if (!router.sigmoid && !(plain && router.normalized)) scores[e] /= sum;
    float c = plain ? choice[e] : scores[e] + (router.correction ? router.correction[e] : 0.0f);
    if (!(c == c)) c = -INFINITY;  // the row's weights are NaN, too
    choice[e] = c;
  }
  __syncwarp();
  if (router.top_groups < router.groups) {
    keep_groups(router, choice);
    __syncwarp();
  }
  for (int e = lane; e < experts; e += 32) keys[e] = ordered(choice[e]);
}

// Sorts the best `top` experts, of which lane i has number i, in ascending order and computes their weights.
__device__ inline void weigh_chosen(int mine, const Router& router, int top, const float* scores, float* of_chosen,
                                    int* chosen, float* shares) {
  const int lane = threadIdx.x % 32;
  int place = 0;  // the expert's position in ascending order
#pragma unroll 4
  for (int i = 0; i < top; i++) place += __shfl_sync(0xffffffffu, mine, i) < mine;
  __syncwarp();
  const float score = lane < top ? scores[mine] : 0;
  if (lane < top) of_chosen[place] = score;
  __syncwarp();
  float total = 1;
  if (router.normalized) {
    total = 0;
#pragma unroll 4
    for (int i = 0; i < top; i++) total += of_chosen[i];
  }
  if (lane < top) {
    const float weight = score / total * router.scale;
    chosen[place] = mine, shares[place] = router.expert_scales ? weight * router.expert_scales[mine] : weight;
  }
  __syncwarp();
}

// A warp chooses a row's experts. there: false if the row gets none. scores, keys: [experts] in shared memory.
__device__ inline void route_row(const float* logits, const Router& router, int top, bool there, float* scores,
                                 uint32_t* keys, int* chosen, float* shares) {
  const int lane = threadIdx.x % 32, experts = router.experts;
  if (!there) {
    if (lane < top) chosen[lane] = -1, shares[lane] = 0;
    return;
  }
  score_row(logits, router, scores, keys);
  int mine = INT_MAX;  // in lane i: the expert chosen as number i
  for (int i = 0; i < top; i++) {
    uint32_t key = 0;
    int own = INT_MAX;
    for (int e = lane; e < experts; e += 32)
      if (keys[e] > key) key = keys[e], own = e;
    const uint32_t best_key = __reduce_max_sync(0xffffffffu, key);
    const int best = __reduce_min_sync(0xffffffffu, key == best_key ? own : INT_MAX);
    if (lane == i) mine = best;
    if (lane == best % 32) keys[best] = 0;  // taken
  }
  weigh_chosen(mine, router, top, scores, reinterpret_cast<float*>(keys), chosen, shares);
}

// The same by a CTA, faster: each pair of threads counts the experts that come before one expert. scratch: two numbers
// for each expert, and three more. The first warp writes the result.
__device__ inline void route_row_together(const float* logits, const Router& router, int top, bool there,
                                          float* scratch, int* chosen, float* shares) {
  __shared__ int best[kMaxTop];
  const int experts = router.experts, padded = (experts + 3) / 4 * 4, half = threadIdx.x % 2;
  uint32_t* keys = reinterpret_cast<uint32_t*>(scratch);
  float* scores = scratch + padded;
  if (there && threadIdx.x < 32) {
    if (experts + (int)threadIdx.x < padded) keys[experts + threadIdx.x] = 0;
    score_row(logits, router, scores, keys);
  }
  __syncthreads();
  for (int first = 0; there && first < experts; first += blockDim.x / 2) {
    const int own = first + threadIdx.x / 2;
    const uint32_t key = own < experts ? keys[own] : 0;
    int before = 0;
    for (int e = half * 4; e < padded; e += 8) {
      const uint4 four = *reinterpret_cast<const uint4*>(keys + e);
      before += four.x > key || (four.x == key && e < own);
      before += four.y > key || (four.y == key && e + 1 < own);
      before += four.z > key || (four.z == key && e + 2 < own);
      before += four.w > key || (four.w == key && e + 3 < own);
    }
    before += __shfl_xor_sync(0xffffffffu, before, 1);
    if (half == 0 && own < experts && before < top) best[before] = own;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  if (there) {
    const int lane = threadIdx.x;
    weigh_chosen(lane < top ? best[lane] : INT_MAX, router, top, scores, reinterpret_cast<float*>(keys), chosen,
                 shares);
  } else if (threadIdx.x < top) {
    chosen[threadIdx.x] = -1, shares[threadIdx.x] = 0;
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
