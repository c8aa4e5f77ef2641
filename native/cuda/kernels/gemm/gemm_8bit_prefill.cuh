// Shapes of tiles of 8-bit prefill GEMMs (gemm_8bit_prefill.cu), the copies of their operands, and their products.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/epilogue_8bit.cuh"
#include "cuda/kernels/gemm/epilogue_rows.cuh"
#include "cuda/kernels/gemm/tile_scheduler.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kMaxShared = 226 << 10;
constexpr int kGroups = 2, kRows = kGroups * kBlock, kThreads = 128 * (1 + kGroups);  // kGroups warpgroups multiply
constexpr int kStep = 2;                                                              // blocks of K in a stage
// Rows of a band of tiles. CTAs compute the tiles of one band at about the same time, so its rows stay in the L2 cache.
constexpr int kBandRows = 2048;
// Stride of rows of sums in shared memory: stores to two adjacent columns of each of eight rows have no bank conflicts.
AS_BOTH constexpr int sums_stride(int columns) { return columns + 8; }

// Integers, and floats with a scale for each row or for each group, which is a step of K then; float_blocks: and all
// rows of a block have the same scales (has_block_scales()), so that fewer products of scales are to be computed.
enum class Form { integers, floats, float_groups, float_blocks };

// A tile has kColumns columns. A cluster has kDown tiles of rows by kAcross tiles of columns; with Sums::beside it has
// one CTA for each split-K part of each tile.
template <Form kForm_, int kColumns_, Sums kSums_, int kDown_, int kAcross_>
struct Shape {
  static constexpr Form kForm = kForm_;
  static constexpr bool kFloats = kForm != Form::integers, kScaled = kForm > Form::floats;
  using Sum = std::conditional_t<kFloats, float, int>;
  static constexpr int kColumns = kColumns_, kDown = kDown_, kAcross = kAcross_;
  static constexpr Sums kSums = kSums_;
  static constexpr bool kBeside = kSums == Sums::beside;
  static constexpr int kSharers = kDown * kAcross;
  static constexpr int kTileRows = kRows, kBand = kBandRows / (kDown * kRows), kWorkers = kGroups * 128;
  // A stage has the rows of a step, its columns, and for groups the columns' scales.
  static constexpr int kRowBytes = kStep * kRows * kByteRow, kScalesAt = kRowBytes + kStep * kColumns * kByteRow;
  static constexpr int kStageBytes = kScalesAt + (kScaled ? (kColumns * 4 + 1023) / 1024 * 1024 : 0);
  // Words that the epilogue of a warpgroup's tile reads besides sums: scales and biases of its columns, scales of its
  // rows, and for integers the sums of these rows. Each warpgroup has two such buffers, because some of its warps may
  // still read the one of the previous tile.
  static constexpr int kRowSums = kFloats ? 0 : kSums == Sums::chained ? kMaxSplitK : 1;
  static constexpr int kEndWords = kFloats && kBeside ? 0 : 2 * kColumns + (1 + kRowSums) * kBlock;
  static constexpr int kEndBytes = kGroups * 2 * kEndWords * 4;
  // Threads that tell of each warpgroup that a stage is empty: with groups, each warp reads scales in its own time.
  static constexpr int kTellers = kScaled ? 4 : 1;
  // Registers of a thread for sums: those of products, and with groups those of the split-K part.
  static constexpr int kSumRegisters = kColumns / 2 * (kScaled ? 2 : 1);
  // kTotals: a thread's sums over split-K parts. It keeps kKept of them in registers and the others in shared memory.
  static constexpr int kTotals = kSums == Sums::chained ? kColumns / 2 : 0;
  static constexpr int kKept = kSumRegisters + kTotals <= 192 ? kTotals : 192 - kSumRegisters;
  static constexpr int kTotalsBytes = kGroups * 128 * (kTotals - kKept) * 4;
  static constexpr int kStages = (kMaxShared - kEndBytes - kTotalsBytes) / kStageBytes;
  static constexpr int kStagesBytes = kStages * kStageBytes, kShared = kStagesBytes + kEndBytes + kTotalsBytes;
  // One warpgroup is this many steps ahead of the other: one writes results while the other multiplies.
  static constexpr int kAhead = kStages > 3 ? 2 : 1;
  // Whether threads that copy give registers to those that multiply. Then the latter alone add parts beside one
  // another.
  static constexpr bool kShifts = !kBeside || kSumRegisters > 128;
  static constexpr int kAdders = kShifts ? kWorkers : kThreads;
  // Nanoseconds of the epilogue of a tile; for chained sums in clusters of adjacent columns also those of their first
  // copies.
  static constexpr int kEnd = kBeside    ? (kScaled ? 6400 : 5000)
                              : !kTotals ? 2000
                                         : 28 * kColumns + (kKept < kTotals ? 2400 : 0) + (kAcross > kDown ? 4000 : 0);
  static int unit_of(const SplitK& k) { return kBeside ? k.blocks : k.length; }
  // Each CTA of a cluster copies whole blocks of rows and whole groups of eight columns.
  static_assert(kGroups % kAcross == 0 && kColumns % (8 * kDown) == 0 && kColumns % 16 == 0);
  static_assert(!kScaled || (kColumns % kBlock == 0 && kStep * kBlock == kFloatGroup));
  static_assert(!kBeside || kRows * sums_stride(kColumns) * 4 <= kStagesBytes);
  // With groups a warpgroup waits for its next stage before it wakes the other one.
  static_assert(kAhead + (kScaled && !kBeside) < kStages);
  static_assert(kBand > 0 && kWorkers * kTotals <= (int)kScratchFloats);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kCopiers = 4;  // threads that copy
constexpr int kPlaces = 16;

constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

// The part of the cluster's shared operands that a CTA copies: blocks of rows, and columns. Columns need one copy for
// each block of 64 and each block of K of a step.
template <typename S>
struct Own {
  static constexpr int kRows = kGroups / S::kAcross, kColumns = S::kColumns / S::kDown;
  static constexpr int kParts = (kBlock - gcd(kColumns, kBlock) + kColumns - 1) / kBlock + 1;
  static constexpr int kColumnCopies = kStep * kParts;
  static constexpr int kScaleCopies = S::kScaled ? (S::kColumns / kBlock + S::kDown - 1) / S::kDown : 0;
  static constexpr int kCopies = kRows + kColumnCopies + kScaleCopies;
};

// A copy that a thread issues in each step: some rows of one block, for one block of K or for the whole step.
struct Copy {
  const char* from = nullptr;
  uint32_t to = 0;
  int bytes = 0;  // per block of K
  int first = 0;  // block of K within the step
  int advance = kStep * kByteBlock;
  bool of_rows = false;
};

// Copy number n of a CTA. first: first block of K.
template <typename S>
__device__ Copy copy_of(const GemmArgs& p, int rows, const TilePart& at, int blocks, int first, int down, int across,
                        int n) {
  Copy copy;
  if (n < Own<S>::kRows) {
    const int group = across * Own<S>::kRows + n, block = at.row / kBlock + group;
    copy.of_rows = true;
    if (block >= blocks_of(rows)) return copy;
    copy.from = reinterpret_cast<const char*>(p.bytes.values) + ((size_t)block * blocks + first) * kByteBlock;
    copy.to = group * kStep * kByteBlock, copy.bytes = kByteBlock;
    return copy;
  }
  n -= Own<S>::kRows;
  if (n >= Own<S>::kColumnCopies) {
    const int own = (n - Own<S>::kColumnCopies) * S::kDown + down, block = at.column / kBlock + own;
    if (own >= S::kColumns / kBlock || block >= blocks_of(p.w.n)) return copy;
    copy.from = reinterpret_cast<const char*>(p.w.quants.scales +
                                              ((size_t)block * p.w.quants.groups + first / kStep) * kScaleWords);
    copy.to = S::kScalesAt + own * kScaleWords * 4, copy.bytes = copy.advance = kScaleWords * 4;
    return copy;
  }
  copy.first = n % kStep;
  int part = n / kStep, begin = at.column + down * Own<S>::kColumns;
  const int end = min(begin + Own<S>::kColumns, blocks_of(p.w.n) * kBlock);
  while (part > 0 && begin < end) begin = (begin / kBlock + 1) * kBlock, part--;
  if (begin >= end) return copy;
  const int next = min(end, (begin / kBlock + 1) * kBlock);
  copy.from = reinterpret_cast<const char*>(p.w.quants.words) +
              ((size_t)(begin / kBlock) * blocks + first + copy.first) * kByteBlock + begin % kBlock * kByteRow;
  copy.to = S::kRowBytes + (copy.first * S::kColumns + begin - at.column) * kByteRow;
  copy.bytes = (next - begin) * kByteRow;
  return copy;
}

// Tells the compiler that the previous sums need no registers any more. The first multiply does not read these zeros,
// but the compiler expects a value.
template <typename Sum, int kValues>
__device__ void forget(Sum (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) d[i] = 0;
}

template <int kColumns>
__device__ void multiply(float (&d)[kColumns / 2], uint64_t own, uint64_t theirs, int adds) {
  constexpr int kAtOnce = kColumns > 256 ? kColumns / 2 : kColumns;
#pragma unroll
  for (int i = 0; i < kColumns / kAtOnce; i++)
    Float8Tile<kAtOnce>::multiply(reinterpret_cast<float(&)[kAtOnce / 2]>(d[i * kAtOnce / 2]), own,
                                  further(theirs, i * kAtOnce * kByteRow), adds);
}
// The scales of a step, a group: those of the tile's columns, at `of_columns` in shared memory, and of the thread's two
// rows. add() adds the step's sums d times both. kBlocks: of 16 columns the first eight have one scale, and so have the
// others; then the products of scales are computed before.
template <bool kBlocks, int kColumns>
class GroupScales {
 public:
  __device__ GroupScales(uint32_t of_columns, const float (&of_rows)[2]) {
#pragma unroll
    for (int block = 0; block < kColumns / kBlock; block++) {
      const uint2 two = load_8(of_columns + block * kBlock * 4);
#pragma unroll
      for (int h = 0; h < 2; h++)
        products_[block][0][h] = __fmul_rn(__uint_as_float(two.x), of_rows[h]),
        products_[block][1][h] = __fmul_rn(__uint_as_float(two.y), of_rows[h]);
    }
  }
  __device__ void add(const float (&d)[kColumns / 2], float (&sums)[kColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++)
      sums[i] = __fmaf_rn(d[i], products_[i / (kBlock / 2)][i % 8 / 4][i % 4 / 2], sums[i]);
  }

 private:
  float products_[kColumns / kBlock][2][2];
};
template <int kColumns>
class GroupScales<false, kColumns> {
 public:
  __device__ GroupScales(uint32_t of_columns, const float (&of_rows)[2]) : of_columns_(of_columns), of_rows_(of_rows) {}
  __device__ void add(const float (&d)[kColumns / 2], float (&sums)[kColumns / 2]) const {
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) {
      uint32_t scales[4];
      read_scales(of_columns_, c, scales);
#pragma unroll
      for (int j = 0; j < 8; j++)
        add_group(sums[c / 2 + j], __uint_as_float(scales[j / 4 * 2 + j % 2]), of_rows_[j % 4 / 2], d[c / 2 + j]);
    }
  }

 private:
  const uint32_t of_columns_;
  const float (&of_rows_)[2];
};
template <bool kScaled, typename Scaled, typename Sums>
__device__ const auto& scaled_or(const Scaled& scaled, const Sums& d) {
  if constexpr (kScaled) return scaled;
  else return d;
}

template <int kColumns>
__device__ void multiply(int (&d)[kColumns / 2], uint64_t own, uint64_t theirs, int adds) {
  IntegerTile<kColumns>::multiply(d, own, theirs, adds);
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
