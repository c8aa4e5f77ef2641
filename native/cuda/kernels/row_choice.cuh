// How the experts of a single row are chosen by warps that wait for that: first which ones they are, as their weights
// can be on their way then, and later how much each counts.
#pragma once
#include "cuda/kernels/routing.cuh"

namespace as {
namespace cuda {

// The experts that a row goes to, of those that this rank has, in ascending order.
struct Chosen {
  int count;
  int experts[kMostTop];
  float shares[kMostTop];
};

constexpr int kQuickExperts = 128;
// Whether choose_quickly() takes logits of such a router.
AS_BOTH inline bool has_quick_choice(const Router& router) {
  return !router.sigmoid && !router.correction && router.top_groups == router.groups && router.experts <= kQuickExperts;
}

// A warp makes the list without shares; false: there are equal logits, and it has not. Of four experts a lane, the
// least of the chosen ones' logits is found, the greatest of all coming first.
__device__ inline bool choose_quickly(const ChosenRow& row, const Routing& r, Chosen& chosen) {
  constexpr int kEach = kQuickExperts / 32;
  const int lane = threadIdx.x % 32, experts = row.router.experts;
  uint32_t keys[kEach], left[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const float logit = i * 32 + lane < experts ? __ldcg(row.logits + i * 32 + lane) : -INFINITY;
    keys[i] = i * 32 + lane >= experts ? 0 : ordered(logit == logit ? logit : -INFINITY);
    left[i] = keys[i];
  }
  const bool there = !row.where || __ldcg(row.where) >= 0;
#pragma unroll
  for (int i = 1; i < kEach; i++)  // descending
#pragma unroll
    for (int j = i; j > 0; j--) {
      const uint32_t high = max(left[j], left[j - 1]);
      left[j] = min(left[j], left[j - 1]), left[j - 1] = high;
    }
  uint32_t least = 0;
#pragma unroll 8
  for (int i = 0; i < r.top; i++) {
    least = __reduce_max_sync(0xffffffffu, left[0]);
    const bool taken = left[0] == least;
#pragma unroll
    for (int j = 1; j < kEach; j++) left[j - 1] = taken ? left[j] : left[j - 1];
    left[kEach - 1] = taken ? 0 : left[kEach - 1];
  }
  int all = 0, count = 0, places[kEach];
  bool own[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int expert = i * 32 + lane;
    const bool is_chosen = keys[i] >= least && there;
    own[i] = is_chosen && expert >= r.begin && expert < r.end;
    all += __popc(__ballot_sync(0xffffffffu, is_chosen));
    const uint32_t owned = __ballot_sync(0xffffffffu, own[i]);
    places[i] = count + __popc(owned & ((1u << lane) - 1)), count += __popc(owned);
  }
  if (all != (there ? r.top : 0)) return false;
#pragma unroll
  for (int i = 0; i < kEach; i++)
    if (own[i]) chosen.experts[places[i]] = i * 32 + lane - r.begin;
  if (lane == 0) chosen.count = count;
  __syncwarp();
  return true;
}

// A warp makes the whole list. scores, keys: [experts] of shared memory.
__device__ inline void choose_alone(const ChosenRow& row, const Routing& r, float* scores, uint32_t* keys,
                                    Chosen& chosen) {
  __shared__ int all[kMostTop];
  __shared__ float shares[kMostTop];
  const int lane = threadIdx.x % 32;
  route_row(row.logits, row.router, r.top, !row.where || __ldcg(row.where) >= 0, scores, keys, all, shares);
  __syncwarp();
  const int expert = lane < r.top ? all[lane] - r.begin : -1;
  const bool own = expert >= 0 && expert < r.end - r.begin;
  const uint32_t owned = __ballot_sync(0xffffffffu, own);
  const int place = __popc(owned & ((1u << lane) - 1));
  if (own) chosen.experts[place] = expert, chosen.shares[place] = shares[lane];
  if (lane == 0) chosen.count = __popc(owned);
  __syncwarp();
}

}  // namespace cuda
}  // namespace as
