// Shared parts of GEMMs by mma.sync. A CTA computes several columns (rows of the weights) by several rows of
// activations. Each warp computes split-K parts (tiles.h) by itself. After each round, in which each warp computes one
// part, all warps add the parts in ascending order.
#pragma once
#include <algorithm>

#include "cuda/kernels/gemm/epilogue.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kMaxWarps = 8;
constexpr int kRowTile = 8;

// The blocks of K that a warp computes, for all columns of its CTA, and the group of scales of each block; a group has
// `group_blocks` blocks.
struct GroupWalk {
  int tile, k_part, group_blocks, block, end, group, group_end;

  __device__ void begin_part(const SplitK& k) {
    block = k_part * k.length, end = min(block + k.length, k.blocks);
    group = block / group_blocks, group_end = (group + 1) * group_blocks;
  }
  __device__ void next(const SplitK& k, int warp, int warps) {
    if (++block == group_end) group++, group_end += group_blocks;
    if (block < end) return;
    if ((k_part += warps) >= k.count) k_part = warp, tile += gridDim.x;
    begin_part(k);
  }
};

// Prefetches a warp's first stages by fetch(walk, stage). Weights, before the previous kernel has written the rows:
template <int kStages, typename Walk, typename Fetch>
__device__ __forceinline__ void fetch_first_weights(Walk at, const SplitK& k, int warp, int warps, const Fetch& fetch) {
  let_next_begin();
#pragma unroll
  for (int i = 0; i < kStages - 1; i++, at.next(k, warp, warps)) fetch(at, i);
  await_previous();
}
// Then rows; each stage's rows and weights form one group of copies.
template <int kStages, typename Walk, typename Fetch>
__device__ __forceinline__ void fetch_first_rows(Walk& at, const SplitK& k, int warp, int warps, const Fetch& fetch) {
#pragma unroll
  for (int i = 0; i < kStages - 1; i++, at.next(k, warp, warps)) {
    fetch(at, i);
    commit_copies();
  }
}

// Stores a warp's sums, in mma.sync's order of tiles of 16 columns and 8 rows, to sums[row][column].
template <int kColumnTiles, int kTiles>
__device__ void put_part(const float (&d)[kColumnTiles][kTiles][4], float* sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kColumnTiles; m++)
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[(t * kRowTile + 2 * (lane % 4) + i % 2) * kColumnTiles * kTileRows + m * kTileRows + lane / 4 +
             i / 2 * 8] = d[m][t][i];
}

// Adds a round's split-K parts, [warp][row][column], to the totals of earlier rounds. last(i, total) gives the value to
// store for a complete total.
template <int kSums, typename Last>
__device__ void add_parts(const float* sums, float* totals, const SplitK& k, int round, const Last& last) {
  const int warps = blockDim.x / 32, k_parts = min(warps, k.count - round * warps);
  const bool is_last = (round + 1) * warps >= k.count;
  for (int i = threadIdx.x; i < kSums; i += blockDim.x) {
    float total = round ? totals[i] : sums[i];
    for (int w = round ? 0 : 1; w < k_parts; w++) total = __fadd_rn(total, sums[w * kSums + i]);
    totals[i] = is_last ? last(i, total) : total;
  }
}

// Gates the totals, which alternate between eight gate and eight up columns, and stores tile number `tile` of columns.
template <int kColumns, int kSums>
__device__ void put_gated(const GemmArgs& p, int rows, int first_row, int tile, const float* totals) {
  for (int i = threadIdx.x; i < kSums / 2; i += blockDim.x) {
    const int row = i / (kColumns / 2), c = i % (kColumns / 2), column = tile * (kColumns / 2) + c;
    const float* gate = totals + row * kColumns + c / 8 * kTileRows + c % 8;
    if (first_row + row < rows && column < p.y.width) finish_gated(p, first_row + row, column, gate[0], gate[8]);
  }
}

// Launch configuration of such a kernel: tiles of columns, and CTAs for them, for each group of rows.
struct SplitKGrid {
  int tiles, warps;
  dim3 blocks;
  size_t shared;
};
// S: a CTA's shape (kColumns, kRows, shared()). max_warps: limit of warps of a CTA.
template <typename S, typename Kernel>
SplitKGrid grid_of(Kernel kernel, const Matrix& w, const SplitK& k, int rows, int max_warps) {
  const int rounds = ceil_div(k.count, max_warps), warps = ceil_div(k.count, rounds);
  const int tiles = ceil_div(w.n, S::kColumns), groups = ceil_div(rows, S::kRows);
  const size_t shared = S::shared(warps);
  allow_shared(kernel, shared);
  int merged = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&merged, kernel, 32 * warps, shared);
  const int most = std::max(1, sm_count() * std::max(merged, 1) / groups);
  // Every CTA takes the same number of turns, if there are several.
  const int turns = ceil_div(tiles, most);
  return {tiles, warps, dim3(ceil_div(tiles, turns), groups), shared};
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
