// Shared parts of the expert GEMMs.
#pragma once
#include <algorithm>

#include "cuda/kernels/moe/moe.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// wgmma, capability 9.0; tile_rows: 64 or 128.
void gemm_experts_prefill(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue);

// Most work items that there can be, with `columns` items for each tile of entries.
inline int max_items(const ExpertGemmArgs& p, int entries, int tile_rows, int columns) {
  const int experts = p.routing.end - p.routing.begin;
  return std::min(entries, entries / tile_rows + experts) * columns;
}

// Reads through the L2 cache: a kernel may read a list while the previous kernel still runs.
__device__ inline ExpertTile tile_at(const Routing& r, int i) {
  const int4 found = __ldcg(reinterpret_cast<const int4*>(r.tiles + i));
  return {found.x, found.y, found.z};
}

// Offset into the tiles of x of a chunk in the first block of a tile's row; -1: there is no such row.
__device__ inline int row_offset(const ExpertGemmArgs& e, const ExpertTile& tile, int slot, int chunk, int blocks) {
  if (slot >= tile.count) return -1;
  const int entry = tile.first + slot, row = e.gathers ? __ldcg(e.routing.row_of + entry) : entry;
  return row / kBlock * blocks * kBlockBytes + chunk_offset(row % kBlock, chunk);
}

// The bias of an expert, or null.
__device__ inline const float* bias_of(const ExpertGemmArgs& e, int expert) {
  const GemmArgs& p = e.gemm;
  return p.bias ? p.bias + (size_t)expert * (p.gated ? 2 * p.y.width : p.y.width) : nullptr;
}

// The weights of kTiles tiles of 16 columns and a block of K, as they are copied: tiles, then sets of scales. kBits:
// bits of a weight, 16 for floats. kFine: scales of quantized values change within 64 columns of K.
template <int kBits_, bool kFine_, int kTiles>
struct ColumnTiles {
  static constexpr int kBits = kBits_, kCount = kTiles, kColumns = kTiles * kTileRows;
  static constexpr bool kFine = kFine_;
  static constexpr int kTileBytes = kTileRows * kBlock * kBits / 8, kWeights = kTiles * kTileBytes;
  static constexpr int kSets = kBits == 16 ? 0 : kFine ? 4 : 1, kSetBytes = kColumns * 4;
  static constexpr int kBytes = kWeights + kSets * kSetBytes;
};

// Loads such weights as mma.sync's first operand. there: columns of K that exist from the block's first on.
template <typename S>
class Fragments {
 public:
  __device__ Fragments(const char* stage, int there) : stage_(stage), there_(there) {
    const int lane = threadIdx.x % 32;
    if constexpr (S::kBits != 16) {
#pragma unroll
      for (int m = 0; m < S::kCount; m++) {
#pragma unroll
        for (int i = 0; i < LaneQuants<kQuantBits>::kLoads; i++)
          quants_[m].loaded[i] = reinterpret_cast<const uint4*>(stage + m * S::kTileBytes)[i * 32 + lane];
        if constexpr (!S::kFine) set(m, 0);
      }
    }
  }
  __device__ void load(int m, int step, uint32_t (&a)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (S::kBits == 16) {
      load_cores(a, shared_address(stage_) + chunk_offset(m * kTileRows + lane % 16, 2 * step + lane / 16));
    } else {
      if constexpr (S::kFine) set(m, step);
      quants_[m].fragment(step, rows_[m], a);
      if (there_ < kBlock) cut_fragment(a, there_ - step * 16);
    }
  }

 private:
  static constexpr int kQuantBits = S::kBits == 16 ? 8 : S::kBits;
  __device__ void set(int m, int number) {
    const uint2 both = reinterpret_cast<const uint2*>(
        stage_ + S::kWeights + number * S::kSetBytes)[(m * kTileRows + threadIdx.x % 32 / 4 * 2) / 2];
    rows_[m][0].set(both.x), rows_[m][1].set(both.y);
  }

  const char* stage_;
  const int there_;
  LaneQuants<kQuantBits> quants_[S::kCount];
  Affine rows_[S::kCount][2];
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
