// Choice of a row's experts from its logits, by a warp.
#pragma once
#include <climits>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/moe/moe.h"
#include "cuda/kernels/sampling/argmax.cuh"

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

// An expert's score. most: the greatest logit, for a softmax that is not divided by its sum.
__device__ inline float score_of(Scores scores, float logit, float most) {
  if (scores == Scores::sigmoid) return 1.0f / (1.0f + expf(-logit));
  if (scores == Scores::softmax) return expf(logit - most);
  return sqrtf(fmaxf(logit, 0.0f) + log1pf(expf(-fabsf(logit))));
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
  const bool softmax = router.scores == Scores::softmax;
  const bool plain = softmax && !router.correction && router.top_groups == router.groups;
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
    const float score = score_of(router.scores, choice[e], most);
    scores[e] = score, sum += score;
  }
  sum = warp_sum(sum);
#pragma unroll 4
  for (int e = lane; e < experts; e += 32) {
    if (softmax && !(plain && router.normalized)) scores[e] /= sum;
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

// Sorts the best `top` experts, of which lane i has number i, in ascending order, with their scores.
__device__ inline void sort_chosen(int mine, float score, int top, int* chosen, float* of_chosen) {
  const int lane = threadIdx.x % 32;
  int place = 0;
#pragma unroll 4
  for (int i = 0; i < top; i++) place += __shfl_sync(0xffffffffu, mine, i) < mine;
  if (lane < top) chosen[place] = mine, of_chosen[place] = score;
  __syncwarp();
}

// The weight of number `lane` of a row's sorted experts, from the scores of all.
__device__ inline float weight_of_chosen(const Router& router, int top, const int* chosen, const float* of_chosen) {
  const int lane = threadIdx.x % 32;
  float total = 1;
  if (router.normalized) {
    total = 0;
#pragma unroll 4
    for (int i = 0; i < top; i++) total += of_chosen[i];
  }
  if (lane >= top) return 0;
  const float weight = of_chosen[lane] / total * router.scale;
  return router.expert_scales ? weight * router.expert_scales[chosen[lane]] : weight;
}

// A warp chooses a row's experts and finds their scores. scores, keys: [experts] in shared memory.
__device__ inline void choose_in_memory(const float* logits, const Router& router, int top, float* scores,
                                        uint32_t* keys, int* chosen, float* of_chosen) {
  const int lane = threadIdx.x % 32, experts = router.experts;
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
  __syncwarp();  // of_chosen may be in place of the keys
  sort_chosen(mine, lane < top ? scores[mine] : 0, top, chosen, of_chosen);
}

// The same for routers without groups, faster: a lane has the logits of experts lane + 32 i in registers. kPlain: the
// weights are a softmax over the chosen logits, so the others need no exponential. (Code is fetched anew at each
// launch, which takes as long as it is.)
template <int kEach, bool kPlain>
__device__ void choose_in_registers(const float* logits, const Router& router, int top, int* chosen, float* of_chosen) {
  const int lane = threadIdx.x % 32, experts = router.experts;
  float score[kEach], most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; i++)  // other CTAs of this kernel may have written them
    score[i] = lane + 32 * i < experts ? __ldcg(logits + lane + 32 * i) : -INFINITY;
#pragma unroll
  for (int i = 0; i < kEach; i++) most = fmaxf(most, score[i]);
  most = warp_max(most);
  uint32_t key[kEach];
  if constexpr (kPlain) {
#pragma unroll
    for (int i = 0; i < kEach; i++) key[i] = lane + 32 * i < experts ? ordered(fmaxf(score[i], -INFINITY)) : 0;
  } else {
    const bool softmax = router.scores == Scores::softmax, plain = softmax && !router.correction;
    float logit[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      logit[i] = score[i];
      score[i] = score_of(router.scores, logit[i], most);
      if (lane + 32 * i < experts) sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int e = lane + 32 * i;
      if (softmax) score[i] /= sum;
      const float c = plain ? logit[i] : score[i] + (router.correction && e < experts ? router.correction[e] : 0.0f);
      key[i] = e < experts ? ordered(c == c ? c : -INFINITY) : 0;
    }
  }
  int mine = INT_MAX;  // in lane i: the expert chosen as number i, with its score
  float its = 0;
#pragma unroll 1
  for (int n = 0; n < top; n++) {
    uint32_t greatest = 0;
    int own = INT_MAX;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (key[i] > greatest) greatest = key[i], own = lane + 32 * i;
    const uint32_t best_key = __reduce_max_sync(0xffffffffu, greatest);
    const int best = __reduce_min_sync(0xffffffffu, greatest == best_key ? own : INT_MAX);
    float found = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i == best) key[i] = 0, found = score[i];  // taken
    found = __shfl_sync(0xffffffffu, found, best % 32);
    if (lane == n) mine = best, its = found;
  }
  sort_chosen(mine, kPlain ? expf(its - most) : its, top, chosen, of_chosen);
}

// The same for the experts of the row's token.
__device__ inline void choose_by_token(const float* logits, const Router& router, int top, int row, int* chosen,
                                       float* of_chosen) {
  const TokenExperts& table = router.by_token;
  const int lane = threadIdx.x % 32;
  int token = table.rows.tokens[table.chosen ? table.chosen[row] : row];
  if (token < 0) token = sampled_token(table.rows.sampled + (size_t)~token * kArgmaxParts);
  token = min(max(token, 0), table.tokens - 1);
  const int mine = lane < top ? (int)table.experts[(size_t)token * top + lane] : INT_MAX;
  sort_chosen(mine, lane < top ? score_of(router.scores, __ldcg(logits + mine), 0) : 0, top, chosen, of_chosen);
}

// A warp chooses a row's experts and finds their scores. there: false if the row gets none. scratch: two numbers for
// each expert, in shared memory.
__device__ inline void choose_row(const float* logits, const Router& router, int top, int row, bool there,
                                  float* scratch, int* chosen, float* of_chosen) {
  const int lane = threadIdx.x % 32, experts = router.experts;
  if (!there) {
    if (lane < top) chosen[lane] = -1;
  } else if (router.by_token.experts) {
    choose_by_token(logits, router, top, row, chosen, of_chosen);
  } else if (router.top_groups < router.groups || experts > 512) {
    choose_in_memory(logits, router, top, scratch, reinterpret_cast<uint32_t*>(scratch + experts), chosen, of_chosen);
  } else if (router.scores == Scores::softmax && !router.correction && router.normalized) {
    if (experts <= 32) choose_in_registers<1, true>(logits, router, top, chosen, of_chosen);
    else if (experts <= 128) choose_in_registers<4, true>(logits, router, top, chosen, of_chosen);
    else if (experts <= 256) choose_in_registers<8, true>(logits, router, top, chosen, of_chosen);
    else choose_in_registers<16, true>(logits, router, top, chosen, of_chosen);
  } else if (experts <= 256) {
    choose_in_registers<8, false>(logits, router, top, chosen, of_chosen);
  } else {
    choose_in_registers<16, false>(logits, router, top, chosen, of_chosen);
  }
}

// The same with the experts' weights.
__device__ inline void route_row(const float* logits, const Router& router, int top, int row, bool there,
                                 float* scratch, int* chosen, float* shares) {
  float* const of_chosen = scratch + router.experts;
  choose_row(logits, router, top, row, there, scratch, chosen, of_chosen);
  const float weight = there ? weight_of_chosen(router, top, chosen, of_chosen) : 0;
  if (const int lane = threadIdx.x % 32; lane < top) shares[lane] = weight;
  __syncwarp();
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
