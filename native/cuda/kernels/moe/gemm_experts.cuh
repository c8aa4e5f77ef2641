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

// The biases of a thread's two columns of a warpgroup's block: `column` and the eighth after it.
struct TwoBiases {
  bool there;
  float values[2] = {};

  __device__ TwoBiases(const float* bias, int column, int width) : there(bias) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (bias && column + 8 * h < width) values[h] = bias[column + 8 * h];
  }
  __device__ float add(float sum, int h) const { return there ? __fadd_rn(sum, values[h]) : sum; }
};

// Writes a thread's sums of two columns to 16-bit tiles. Each value is one of a pair of entries; threads of adjacent
// columns exchange one of the two, so that each stores two columns of one entry.
template <int kValues>
__device__ __forceinline__ void write_pairs(const Rows& y, const ExpertTile& tile, int column, const TwoBiases& biases,
                                            const float (&d)[kValues]) {
  const int lane = threadIdx.x % 32, odd = lane / 4 % 2, first = lane % 4 * 2 + odd, blocks = blocks_of(y.width);
#pragma unroll
  for (int i = 0; i < kValues; i += 4)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float low = biases.add(d[i + 2 * h], h), high = biases.add(d[i + 2 * h + 1], h);
      const float other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
      const int slot = first + i / 4 * 8, at = column - odd + 8 * h;
      if (slot < tile.count && at < y.width)
        *reinterpret_cast<uint32_t*>(y.tiles + tile_offset(tile.first + slot, at, blocks)) =
            odd ? to_dtype16x2(other, high) : to_dtype16x2(low, other);
    }
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
    const TwoBiases biases(bias, column, width);
    if (p.y.tiles) return write_pairs(p.y, tile, column, biases, d);
    each_entry([&](int entry, float low, float high) {
      if (column < width) put(p.y, entry, column, biases.add(low, 0));
      if (column + 8 < width) put(p.y, entry, column + 8, biases.add(high, 1));
    });
  }
}

// The same for 16-bit entries and many of them, on Hopper: the sums cross the warpgroup's shared memory, kStagedRows
// entries at a time, so that whole rows of a block are stored. staging: kStagedBytes of it.
constexpr int kStagedRows = 32, kStagedBytes = kStagedRows * kRowBytes;
template <int kValues>
__device__ __forceinline__ void write_staged(const ExpertGemmArgs& e, const ExpertTile& tile, int block,
                                             const float (&d)[kValues], char* staging) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(2 * kValues % kStagedRows == 0);
  const Rows& y = e.gemm.y;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, blocks = blocks_of(y.width);
  if (block >= blocks) return;
  const TwoBiases biases(bias_of(e, tile.expert), block * kBlock + warp * 16 + lane / 4, y.width);
  const auto sync_warpgroup = [] { asm volatile("bar.sync %0, 128;" ::"r"((int)threadIdx.x / 128) : "memory"); };
  // Of four matrices of 8 entries by 8 columns, a lane has the address of one's entry.
  const int matrix = lane / 8, entry = lane % 8 + matrix / 2 * 8;
  const uint32_t to = shared_address(staging) + chunk_offset(entry, warp * 2 + matrix % 2);
#pragma unroll
  for (int begin = 0; begin < 2 * kValues; begin += kStagedRows) {
    if (begin >= tile.count) return;
    sync_warpgroup();  // all have read what was there before
#pragma unroll
    for (int i = begin / 2; i < (begin + kStagedRows) / 2; i += 8) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        pairs[j] = to_dtype16x2(biases.add(d[i + 2 * j], j % 2), biases.add(d[i + 2 * j + 1], j % 2));
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + (2 * i - begin) *
                                                                                                           kRowBytes),
                   "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                   : "memory");
    }
    sync_warpgroup();
#pragma unroll
    for (int slot = thread / 8; slot < kStagedRows; slot += 16)
      if (begin + slot < tile.count)
        *reinterpret_cast<uint4*>(y.tiles +
                                  tile_offset(tile.first + begin + slot, block * kBlock + thread % 8 * 8, blocks)) =
            *reinterpret_cast<const uint4*>(staging + chunk_offset(slot, thread % 8));
  }
#endif
}

// Bytes of an expert's matrix.
inline size_t bytes_of_expert(const Matrix& w) {
  return w.kind == Kind::dtype16 ? tiles_bytes(w.n, w.k) : quantized_bytes(w.quants, w.n, w.k);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
