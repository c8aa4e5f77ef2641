// Weights of any format that mma.sync multiplies with 16-bit activations, as they lie in shared memory.
#pragma once
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// Calls start() with the type of any weights. kAll: not only 16-bit ones; kHasMx: also MXFP4.
template <bool kHasMx, bool kAll = kAllFormats, typename Start>
void by_type(const Matrix& w, Start start) {
  if constexpr (kAll && kHasMx)
    if (w.kind == Kind::mxfp4) return start(WeightType<4, Scales::mx>());
  if constexpr (kAll)
    if (w.quants.bits) return by_integers(w.quants, start);
  start(WeightType<16, Scales::none>());
}

// The weights of kTiles tiles of 16 columns and a block of K, as they are copied: tiles, then sets of scales.
template <typename Type, int kTiles>
struct ColumnTiles : Type {
  static constexpr int kCount = kTiles, kColumns = kTiles * kTileRows;
  static constexpr Scales kScales = Type::kScales;
  static constexpr bool kFine = Type::kFine, kMx = kScales == Scales::mx;
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

// Loads such weights as mma.sync's first operand. there: columns of K that exist from the block's first on. sets: of
// fine scales of a block, 2 or 4.
template <typename S>
class Fragments {
 public:
  __device__ Fragments(const char* stage, int there, int sets = 4) : stage_(stage), there_(there), sets_(sets) {
    const int lane = threadIdx.x % 32;
    if constexpr (S::kMx) {
#pragma unroll
      for (int m = 0; m < S::kCount; m++) mx_[m].load(stage + m * S::kTileBytes);
    } else if constexpr (S::kBits != 16) {
#pragma unroll
      for (int m = 0; m < S::kCount; m++) {
#pragma unroll
        for (int i = 0; i < LaneQuants<kQuantBits, S::kCodes>::kLoads; i++)
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
      if constexpr (S::kFine) set(m, step * sets_ / 4);
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
  const int there_, sets_;
  LaneQuants<kQuantBits, S::kCodes> quants_[S::kMx ? 1 : S::kCount];
  Affine rows_[S::kMx ? 1 : S::kCount][2];
  MxQuants mx_[S::kMx ? S::kCount : 1];
};

// d += a block of these weights and kTiles tiles of 8 rows in shared memory.
template <typename S, int kTiles>
__device__ __forceinline__ void multiply_block(Fragments<S>& weights, uint32_t rows, float (&d)[S::kCount][kTiles][4]) {
  const int lane = threadIdx.x % 32;
  uint32_t y[kTiles][4];
#pragma unroll
  for (int step = 0; step < 4; step++) {
    uint32_t a[S::kCount][4];
#pragma unroll
    for (int m = 0; m < S::kCount; m++) weights.load(m, step, a[m]);
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      if (step % 2 == 0) load_cores(y[t], rows + t * 8 * kRowBytes + chunk_offset(lane % 8, 2 * step + lane / 8));
#pragma unroll
      for (int m = 0; m < S::kCount; m++) multiply_add(d[m][t], a[m], y[t][step % 2 * 2], y[t][step % 2 * 2 + 1]);
    }
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
