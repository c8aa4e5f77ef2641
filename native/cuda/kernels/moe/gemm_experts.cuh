// Shared parts of the expert GEMMs.
#pragma once
#include <algorithm>

#include "cuda/kernels/moe/moe.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// wgmma, capability 9.0; tile_rows: 64 or 128, of MXFP4 also 8, 16 and 32, then by mma.sync.
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

// Scales of weights: none for floats; of quantized values, those that change within 64 columns of K or only between
// blocks; those of MXFP4, which lie in its tiles.
enum class Scales { none, blocks, fine, mx };

// Weights of kBits bits.
template <int kBits_, Scales kScales_>
struct WeightType {
  static constexpr int kBits = kBits_;
  static constexpr Scales kScales = kScales_;
};

// Calls start() with the type of the weights. kAll: not only 16-bit ones; kHasMx: also MXFP4.
template <bool kHasMx, bool kAll = kAllFormats, typename Start>
void by_type(const Matrix& w, Start start) {
  if constexpr (kAll) {
    const bool fine = w.quants.groups > 1 && w.quants.group < kBlock;
    if constexpr (kHasMx)
      if (w.kind == Kind::mxfp4) return start(WeightType<4, Scales::mx>());
    if (w.quants.bits == 4) return fine ? start(WeightType<4, Scales::fine>()) : start(WeightType<4, Scales::blocks>());
    if (w.quants.bits == 8) return fine ? start(WeightType<8, Scales::fine>()) : start(WeightType<8, Scales::blocks>());
  }
  start(WeightType<16, Scales::none>());
}

// Bytes of an expert's matrix.
inline size_t bytes_of_expert(const Matrix& w) {
  return w.kind == Kind::dtype16 ? tiles_bytes(w.n, w.k) : quantized_bytes(w.quants, w.n, w.k);
}

// The weights of kTiles tiles of 16 columns and a block of K, as they are copied: tiles, then sets of scales.
template <typename Type, int kTiles>
struct ColumnTiles : Type {
  static constexpr int kCount = kTiles, kColumns = kTiles * kTileRows;
  static constexpr Scales kScales = Type::kScales;
  static constexpr bool kFine = kScales == Scales::fine, kMx = kScales == Scales::mx;
  static constexpr int kTileBytes = kMx ? kMxTileBytes : kTileRows * kBlock * Type::kBits / 8;
  static constexpr int kBlockBytes = kBlock / kTileRows * kTileBytes;  // bytes of 64 columns
  static constexpr int kWeights = kTiles * kTileBytes;
  static constexpr int kSets = kFine ? 4 : kScales == Scales::blocks ? 1 : 0, kSetBytes = kColumns * 4;
  static constexpr int kBytes = kWeights + kSets * kSetBytes;
};

// Copies kBytes bytes by a warp.
template <int kBytes>
__device__ __forceinline__ void copy_by_warp(uint32_t to, const char* from) {
  const int at = threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < kBytes; i += 512)
    if (i + 512 <= kBytes || i + at < kBytes) copy_16(to + i + at, from + i + at);
}

// Loads such weights as mma.sync's first operand. there: columns of K that exist from the block's first on.
template <typename S>
class Fragments {
 public:
  __device__ Fragments(const char* stage, int there) : stage_(stage), there_(there) {
    const int lane = threadIdx.x % 32;
    if constexpr (S::kMx) {
#pragma unroll
      for (int m = 0; m < S::kCount; m++) mx_[m].load(stage + m * S::kTileBytes);
    } else if constexpr (S::kBits != 16) {
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
    } else if constexpr (S::kMx) {
      mx_[m].fragment(step, a);
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
  LaneQuants<kQuantBits> quants_[S::kMx ? 1 : S::kCount];
  Affine rows_[S::kMx ? 1 : S::kCount][2];
  MxQuants mx_[S::kMx ? S::kCount : 1];
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
