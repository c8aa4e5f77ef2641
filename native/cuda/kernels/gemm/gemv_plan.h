// How GEMMs of one row (GEMV), and of a few 8-bit rows, divide their work and their shared memory. Kernels are launched
// by these plans, and the choice among kernels (cuda/kernel_choice.h) asks them whether a kernel can run.
#pragma once
#include <algorithm>

#include "cuda/kernels/common/chip.h"
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

constexpr int kFewByteRows = 2;       // 8-bit rows of small_m: loading more costs more than clusters save
constexpr int kMaxStreamedRows = 64;  // 8-bit rows of stream_k: more are computed by prefill
constexpr int kMaxFused = 256;        // 16-bit rows: for more, quantized weights are widened to 16 bits once
constexpr int kLeastWidened = 128;    // fewer are not widened on any chip

// The plan of clusters with 64 columns each, one CTA for each split-K part (gemm/gemv.cu).
struct GemvPlan {
  static constexpr int kStageBytes = 16 << 10, kMaxStages = 12;
  static constexpr int kRowTile = 8;                         // rows of small_m's operand
  static constexpr int kGroupBlocks = kFloatGroup / kBlock;  // blocks of K of a group of e4m3
  AS_BOTH static constexpr int groups_of(int blocks) { return (blocks + kGroupBlocks - 1) / kGroupBlocks; }
  SplitK k;
  int stages = 0;  // stages of weights in a CTA's shared memory; 0: there is no room
  size_t shared = 0;

  GemvPlan(const Matrix& w, int rows, int sms) : k(w.k, w.max_split_k) {
    constexpr size_t kAll = 226 << 10, kFixed = 2 << 10;  // shared memory of an SM; of a CTA, except stages and rows
    constexpr int kMaxAtOnce = 3;                         // CTAs on an SM
    const int block_bytes = w.kind == Kind::dtype16 ? kBlockBytes : kBlockValues, row_bytes = block_bytes / kBlock;
    // Clusters run on ten of eleven SMs at once. All have room, since those that begin late would double the time.
    const int ctas = blocks_of(w.n) * k.count, clustered = k.count == 1 ? sms : sms * 10 / 11;
    const int at_once =
        (ctas + sms - 1) / sms > kMaxAtOnce ? kMaxAtOnce + 1 : std::min((ctas + clustered - 1) / clustered, kMaxAtOnce);
    const int stage_blocks = kStageBytes / block_bytes;
    const size_t scales = w.has_float_groups() ? groups_of(k.length) * (kScaleWords + 1) * sizeof(float) : 0;
    const size_t row = (size_t)rows * k.length * row_bytes + kBehindRow + scales,
                 fixed = kFixed + rows * kMaxSplitK * kBlock * sizeof(float);
    stages = at_once > kMaxAtOnce ? 0 : std::min((k.length + stage_blocks - 1) / stage_blocks, kMaxStages);
    while (stages > 0 && kAll / at_once < stages * kStageBytes + row + fixed) stages--;
    if (stages < 3 && stages * stage_blocks < k.length) stages = 0;
    shared = stages * kStageBytes + row;
  }
};

// The plan of quantized weights with a 16-bit row: CTAs have equal numbers of pairs of columns, with all split-K parts
// of these (gemm/gemv_quantized.cu).
struct QuantizedGemvPlan {
  static constexpr int kMaxWarps = 20, kSchedulers = 4;                 // of a CTA; of an SM
  static constexpr int kTilePairs = kTileRows / 2, kUnit = kTilePairs;  // pairs of columns of a tile; chains of a warp
  static constexpr int kSharedBlocks = 32;  // fewest blocks of K for which two warps share a unit
  // Pipeline stages of a warp. More bytes in flight than needed slow the SM's copies down and delay the row's copy.
  static constexpr int kShallow = 2, kDeep = 3;
  static constexpr int kNormed = 3, kMaxNormed = 512;  // groups of eight columns to normalize: of a thread; in all
  int pairs, merged, shared_units, warps, stages = 0;  // stages: 0 if the row does not fit shared memory

  // Bytes of the sums of all warps' chains, 64 bytes a warp, rounded up to a multiple of 128.
  AS_BOTH static constexpr int sums_bytes(int warps) { return (warps + 1) / 2 * 2 * kTileRows * 4; }
  static size_t shared_bytes(int bits, bool fine, int stages, int warps, int k_blocks) {
    const int blocks = 16 / bits, sets = fine ? 4 : 1, stage = blocks * (quant_bytes(bits) / 4 + sets * kTileRows * 4);
    return (size_t)warps * stages * stage + sums_bytes(warps) + (size_t)k_blocks * kRowBytes;
  }

  QuantizedGemvPlan(const Matrix& w, int sms, int max_shared) {
    const auto ceil_div = [](int n, int by) { return (n + by - 1) / by; };
    const SplitK k(w.k, w.max_split_k);
    pairs = ceil_div(w.n, kTileRows) * kTilePairs;
    const auto even = [](int x) { return x + x % 2; };  // a pair has 64 of a line's 128 bytes
    const int most = kMaxWarps * kUnit / k.count / 2 * 2, own = ceil_div(pairs, sms);
    merged = even(ceil_div(own, ceil_div(own, most)));
    const int units = ceil_div(merged * k.count, kUnit), more = units % kSchedulers;
    // Where schedulers would have unequal numbers of warps, two warps share a unit.
    shared_units = k.count == 1 && k.blocks >= kSharedBlocks && units > more && more <= kSchedulers / 2 &&
                           units + more <= kMaxWarps
                       ? more
                       : 0;
    warps = units + shared_units;
    const bool deep = w.quants.bits == 8 || ceil_div(pairs, merged) > sms;  // several turns
    for (int depth : {deep ? kDeep : kShallow, kShallow})
      if (!stages &&
          shared_bytes(w.quants.bits, w.quants.fine(), depth, warps, k.count * k.length) <= (size_t)max_shared)
        stages = depth;
  }
  // Whether the kernel can normalize a row of this many columns itself.
  bool norms(int columns) const {
    const int eights = blocks_of(columns) * 8;
    return stages && eights <= kMaxNormed && eights <= kNormed * 32 * warps;
  }
};

}  // namespace as::cuda
