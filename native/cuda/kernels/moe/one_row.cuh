// What the kernels of an expert layer for a step of one row share.
#pragma once
#include "cuda/kernels/moe/gemm_experts.cuh"
#include "cuda/kernels/moe/routing.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// The row's experts that this rank has, in ascending order; and all of them with their scores.
struct Chosen {
  int count;
  int experts[kMaxTop];
  float shares[kMaxTop];
  int all[kMaxTop];
  float scores[kMaxTop];
};

// Whether the step's row is not padding. It was written before the step's first kernel, so no kernel awaits it.
__device__ inline bool is_there(const ChosenRow& row) { return !row.where || __ldcg(row.where) >= 0; }

// Chooses the row's experts, for a CTA, by its first warp: it is faster alone, with all logits in registers, than all
// warps together. scratch: as for choose_row().
__device__ inline void choose(const ChosenRow& row, bool there, const Routing& r, float* scratch, Chosen& chosen) {
  if (threadIdx.x < 32) {
    choose_row(row.logits, row.router, r.top, 0, there, scratch, chosen.all, chosen.scores);
    __syncwarp();
    const int lane = threadIdx.x, expert = lane < r.top ? chosen.all[lane] - r.begin : -1;
    const bool own = expert >= 0 && expert < r.end - r.begin;
    const uint32_t owned = __ballot_sync(0xffffffffu, own);
    if (own) chosen.experts[__popc(owned & ((1u << lane) - 1))] = expert;
    if (lane == 0) chosen.count = __popc(owned);
  }
  __syncthreads();
}
// Computes the weights of chosen experts, by the CTA's first warp. What needs none of them need not wait for this.
__device__ inline void weigh(const ChosenRow& row, const Routing& r, Chosen& chosen) {
  if (chosen.count == 0) return;
  const float weight = weight_of_chosen(row.router, r.top, chosen.all, chosen.scores);
  const int lane = threadIdx.x, expert = lane < r.top ? chosen.all[lane] - r.begin : -1;
  const bool own = expert >= 0 && expert < r.end - r.begin;
  const uint32_t owned = __ballot_sync(0xffffffffu, own);
  if (own) chosen.shares[__popc(owned & ((1u << lane) - 1))] = weight;
  __syncwarp();
}

// 16 columns of the weights of one of the chosen experts.
struct Item {
  int entry, tile;
};

// Lists the chosen experts as route() does, so that readers of the routing find them. By the first warp of one CTA.
__device__ inline void list_chosen(const Routing& r, const Chosen& chosen) {
  const int i = threadIdx.x;
  if (i < chosen.count) r.tiles[i] = {chosen.experts[i], i, 1};
  if (i == 0) *r.tile_count = chosen.count;
  if (i < r.top) r.entry_of[i] = i < chosen.count ? i : -1, r.shares[i] = i < chosen.count ? chosen.shares[i] : 0;
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
