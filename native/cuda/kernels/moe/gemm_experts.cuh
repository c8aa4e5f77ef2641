// Shared parts of the expert GEMMs.
#pragma once
#include <algorithm>

#include "cuda/kernels/gemm/column_tiles.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// wgmma, capability 9.0; tile_rows: 64 or 128, of MXFP4 also 48, and 8, 16 and 32 by mma.sync.
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

// Offset into the tiles of x of a chunk in the first block of a tile's row; -1: there is no such row. kOne: the step
// has one row, of which no list says to which entries it belongs.
template <bool kOne = false>
__device__ inline int row_offset(const ExpertGemmArgs& e, const ExpertTile& tile, int slot, int chunk, int blocks) {
  if (slot >= tile.count) return -1;
  const int entry = tile.first + slot, row = !e.gathers ? entry : kOne ? 0 : __ldcg(e.routing.row_of + entry);
  return row / kBlock * blocks * kBlockBytes + chunk_offset(row % kBlock, chunk);
}

// The bias of an expert, or null.
__device__ inline const float* bias_of(const ExpertGemmArgs& e, int expert) {
  const GemmArgs& p = e.gemm;
  return p.bias ? p.bias + (size_t)expert * (p.gated ? 2 * p.y.width : p.y.width) : nullptr;
}

// Writes a warpgroup's sums of 64 columns, block number `block`, for a tile's entries. Number i of a thread belongs to
// entry i / 4 * 8 + lane % 4 * 2 + i % 2; gate and up columns are interleaved.
template <int kValues>
__device__ __forceinline__ void write_sums(const ExpertGemmArgs& e, const ExpertTile& tile, int block,
                                           const float (&d)[kValues]) {
  const GemmArgs& p = e.gemm;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, first = lane % 4 * 2, width = p.y.width;
  const float* bias = bias_of(e, tile.expert);
  const auto each_entry = [&](auto write) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (const int slot = first + i / 4 * 8 + j; slot < tile.count) write(tile.first + slot, d[i + j], d[i + 2 + j]);
  };
  if (p.gated) {
    const int column = block * (kBlock / 2) + warp * 8 + lane / 4;
    const bool there = column < width;
    const float gate_bias = bias && there ? bias[column] : 0, up_bias = bias && there ? bias[width + column] : 0;
    if (there)
      each_entry([&](int entry, float gate, float up) {
        if (bias) gate = __fadd_rn(gate, gate_bias), up = __fadd_rn(up, up_bias);
        put(p.y, entry, column, gated_by(e.gating, gate, up));
      });
  } else {
    const int column = block * kBlock + warp * 16 + lane / 4;
    float added[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (bias && column + 8 * h < width) added[h] = bias[column + 8 * h];
    each_entry([&](int entry, float low, float high) {
      if (column < width) put(p.y, entry, column, bias ? __fadd_rn(low, added[0]) : low);
      if (column + 8 < width) put(p.y, entry, column + 8, bias ? __fadd_rn(high, added[1]) : high);
    });
  }
}

// Bytes of an expert's matrix.
inline size_t bytes_of_expert(const Matrix& w) {
  return w.kind == Kind::dtype16 ? tiles_bytes(w.n, w.k) : quantized_bytes(w.quants, w.n, w.k);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
