// How a warp chooses the experts of a row from their logits.
#pragma once
#include <climits>

#include "cuda/experts.h"
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {

// An index of a value, ahead of others if the value is greater, or the index lower.
struct Candidate {
  float value;
  int index;  // -1: none

  __device__ void consider(float other, int at) {
    if (at >= 0 && (index < 0 || other > value || (other == value && at < index))) value = other, index = at;
  }
};
// The best of a warp's, the same in all lanes.
__device__ inline Candidate best_of_warp(Candidate best) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float value = __shfl_xor_sync(0xffffffffu, best.value, step);
    const int index = __shfl_xor_sync(0xffffffffu, best.index, step);
    best.consider(value, index);
  }
  return best;
}

// Leaves the choice to the groups whose two best experts are best. A lane has a group.
__device__ inline void keep_groups(const Router& router, float* choice) {
  const int lane = threadIdx.x % 32, size = router.experts / router.groups;
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size && lane < router.groups; i++) {
    const float c = choice[lane * size + i];
    if (c > first) second = first, first = c;
    else if (c > second) second = c;
  }
  const float score = size > 1 ? first + second : first;
  bool kept = false;
  for (int i = 0; i < router.top_groups; i++) {
    const Candidate best = best_of_warp({score, lane < router.groups && !kept ? lane : -1});
    kept |= best.index == lane;
  }
  if (lane < router.groups && !kept)
    for (int i = 0; i < size; i++) choice[lane * size + i] = -INFINITY;
}

// Numbers in the order of floats; 0 is below all of them.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // there is one zero
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A warp chooses a row's experts, in ascending order: chosen, and their weights: shares [top]. scores, choice:
// [experts] of shared memory.
__device__ inline void route_row(const float* logits, const Router& router, int top, bool there, float* scores,
                                 float* choice, int* chosen, float* shares) {
  const int lane = threadIdx.x % 32, experts = router.experts;
  if (!there) {
    if (lane < top) chosen[lane] = -1, shares[lane] = 0;
    return;
  }
  // The softmax keeps the order of logits, and its sum cancels out of normalized weights.
  const bool plain = !router.sigmoid && !router.correction && router.top_groups == router.groups;
  float most = -INFINITY, sum = 0;
  for (int e = lane; e < experts; e += 32) {
    const float logit = __ldcg(logits + e);  // of blocks of this kernel, perhaps
    choice[e] = logit, most = fmaxf(most, logit);
  }
  most = warp_max(most);
  for (int e = lane; e < experts; e += 32) {
    const float score = router.sigmoid ? 1.0f / (1.0f + expf(-choice[e])) : expf(choice[e] - most);
    scores[e] = score, sum += score;
  }
  sum = warp_sum(sum);
  for (int e = lane; e < experts; e += 32) {
    if (!router.sigmoid && !(plain && router.normalized)) scores[e] /= sum;
    float c = plain ? choice[e] : scores[e] + (router.correction ? router.correction[e] : 0.0f);
    if (!(c == c)) c = -INFINITY;  // the weights of such a row are no numbers either
    choice[e] = c;
  }
  __syncwarp();
  if (router.top_groups < router.groups) {
    keep_groups(router, choice);
    __syncwarp();
  }
  uint32_t* keys = reinterpret_cast<uint32_t*>(choice);
  for (int e = lane; e < experts; e += 32) keys[e] = ordered(choice[e]);
  int mine = INT_MAX;  // lane i: the expert that was chosen as number i
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
  int place = 0;  // of an expert, in ascending order
  for (int i = 0; i < top; i++) place += __shfl_sync(0xffffffffu, mine, i) < mine;
  __syncwarp();
  const float score = lane < top ? scores[mine] : 0;
  if (lane < top) choice[place] = score;
  __syncwarp();
  float total = 1;
  if (router.normalized) {
    total = 0;
    for (int i = 0; i < top; i++) total += choice[i];
  }
  if (lane < top) chosen[place] = mine, shares[place] = score / total * router.scale;
  __syncwarp();
}

}  // namespace cuda
}  // namespace as
