// What kernels for products of experts share.
#pragma once
#include <algorithm>

#include "cuda/experts.h"
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {

// By wgmma, for chips of capability 9.0; tile_rows: 64 or 128.
void linear_experts_wide(const ExpertProduct& p, int entries, int tile_rows, const Queue& queue);

// How many items there may be, of so many for each tile of entries.
inline int most_items(const ExpertProduct& p, int entries, int tile_rows, int columns) {
  const int experts = p.routing.end - p.routing.begin;
  return std::min(entries, entries / tile_rows + experts) * columns;
}

// By way of the second-level cache: kernels may read a list while the one before them still runs.
__device__ inline ExpertTile tile_at(const Routing& r, int i) {
  const int4 found = __ldcg(reinterpret_cast<const int4*>(r.tiles + i));
  return {found.x, found.y, found.z};
}

// Where a piece of the first block of a tile's row is in x, which is in tiles; -1: there is no such row.
__device__ inline int row_offset(const ExpertProduct& e, const ExpertTile& tile, int slot, int piece, int blocks) {
  if (slot >= tile.count) return -1;
  const int entry = tile.first + slot, row = e.gathers ? __ldcg(e.routing.row_of + entry) : entry;
  return row / kBlock * blocks * kBlockBytes + piece_offset(row % kBlock, piece);
}

// Null: none.
__device__ inline const float* bias_of(const ExpertProduct& e, int expert) {
  const Product& p = e.product;
  return p.bias ? p.bias + (size_t)expert * (p.gated ? 2 * p.y.width : p.y.width) : nullptr;
}

}  // namespace cuda
}  // namespace as
