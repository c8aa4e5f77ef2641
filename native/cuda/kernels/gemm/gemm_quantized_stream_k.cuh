// Stream-K GEMMs of quantized weights by wgmma; gemm_stream_k.cu is the 16-bit counterpart.
//
// CTAs are persistent, and each computes an equal number of all steps of all tiles. A step is two blocks of K; a tile
// is several columns (rows of the weights) by several rows of activations. Four warps copy steps to shared memory as
// far ahead as there is room, across tiles. Warpgroups multiply 64 columns each, or twice 64, with all rows: a warp
// dequantizes 16 columns to the first operand in registers while the previous product runs. float8 weights are read
// from shared memory without conversion. Few rows of integers are multiplied by mma.sync, which gives the same bits and
// takes fewer instructions than wgmma's descriptors and waits.
//
// A tile's sum over K consists of split-K parts (tiles.h), which are added in ascending order. If one part for each CTA
// keeps nearly all SMs busy, each CTA computes one part: hand-overs would cost more than unequal work. Then all CTAs
// run at the same time. So those of a tile wait for each other, and each adds up the parts of some rows, eight at a
// time. Otherwise the last CTA to arrive adds up all. If two CTAs share a part, one computes its beginning before all
// its other work and leaves the sums in global memory; the other continues from them as its last work, long after.
// These wait only for CTAs of lower numbers, which have started before.
#pragma once
#include <algorithm>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/epilogue_columns.cuh"
#include "cuda/kernels/gemm/quant_fragments.cuh"
#include "cuda/kernels/gemm/quantize_chunks.cuh"
#include "cuda/kernels/gemm/stream_k_copies.cuh"
#include "cuda/kernels/gemm/stream_k_sums.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// Formats of weights (kBits bits) and activations. kDequantizes: weights become bfloat16 in registers. kRowBytes: bytes
// of a row of a block of activations. kParts: products of a block. kSets: sets of scales of a block. kSegments: within
// a split-K part, sums become floats and are added to a total. kWhole: that happens only at the part's end, where
// scales and row sums are read from global memory.
template <class Type>    // a WeightType
struct Rounded : Type {  // bfloat16 activations
  using Sum = float;
  static constexpr int kRowBytes = cuda::kRowBytes, kParts = 4, kSets = Type::kFine ? 4 : 1;
  static constexpr bool kDequantizes = true, kSegments = false, kFloats = false, kWhole = false;
  static constexpr SumScales kScales = SumScales::none;
};
template <int kWeightBits, bool kOneGroup = false>
struct Integers {
  using Sum = int;
  static constexpr int kBits = kWeightBits, kRowBytes = kByteRow, kParts = 2, kSets = kOneGroup ? 0 : 1;
  static constexpr Codes kCodes = Codes::integers;
  static constexpr bool kDequantizes = false, kFine = false, kSegments = true, kFloats = false, kWhole = kOneGroup;
  static constexpr SumScales kScales = SumScales::rows;
};
template <bool kGroups = false>  // kGroups: scales of 128 columns
struct Floats {
  using Sum = float;
  static constexpr int kBits = 8, kRowBytes = kByteRow, kParts = 2, kSets = kGroups;
  static constexpr Codes kCodes = Codes::integers;
  static constexpr bool kDequantizes = false, kFine = false, kSegments = kGroups, kFloats = true, kWhole = false;
  static constexpr SumScales kScales = kGroups ? SumScales::none : SumScales::columns_and_rows;
};

// kRows: rows of activations. kGroups: warpgroups that multiply, kColumnBlocks x 64 columns each. kOwn: there is one
// row, which the kernel normalizes and quantizes itself.
template <class Format_, int kRows_, int kGroups_, bool kOwn_ = false, int kColumnBlocks_ = 1>
struct StreamKShape {
  using Format = Format_;
  static constexpr int kRows = kRows_, kGroups = kGroups_, kColumnBlocks = kColumnBlocks_;
  static constexpr int kTileBlocks = kGroups * kColumnBlocks;  // blocks of 64 columns of a tile
  static constexpr bool kOwn = kOwn_;
  static constexpr int kWorkers = kGroupThreads * kGroups, kThreads = kWorkers + kGroupThreads;
  // Registers of a thread: at launch, as many as fit for all threads; then of a thread that multiplies and of one that
  // copies. The latter two must not need more in all than at launch, or a warpgroup waits for registers forever.
  static constexpr int kLaunched = (65536 / 4 / 32 / ((kThreads / 32 + 3) / 4)) / 8 * 8;
  static constexpr int kRegisters = kGroups == 2 ? 224 : kGroups == 3 ? 152 : 104;
  static constexpr int kCopyRegisters = kGroups == 2 ? 56 : kGroups == 3 ? 56 : 64;
  static_assert(kGroups >= 2 && kGroups * kRegisters + kCopyRegisters <= (kGroups + 1) * kLaunched);
  static constexpr bool kHasSums = std::is_same_v<typename Format::Sum, int>;
  static constexpr bool kDequantizes = Format::kDequantizes;
  // Few rows are multiplied by mma.sync, which takes fewer instructions. Where weights are dequantized, wgmma runs
  // beside that. Not e4m3: wgmma's sums have other bits.
  static constexpr bool kFew = kRows <= 32 && !kDequantizes && !Format::kFloats;
  static_assert(kColumnBlocks == 1 || kDequantizes);
  // Blocks of dequantized weights whose products a warpgroup has under way. Three warpgroups hide each other's waits.
  static constexpr int kUnderWay = kGroups == 2 ? 2 : 1;
  // Bytes of a block: of rows, of their sums, of 64 columns' quantized values, of a set of scales.
  static constexpr int kRowBytes = kOwn ? 0 : Format::kRowBytes, kRowsBytes = kRows * kRowBytes;
  // Of integers sums, of floats scales of the rows.
  static constexpr int kSumsBytes = Format::kSegments && !kOwn && !Format::kWhole ? kRows * 4 : 0;
  // wgmma reads float8 weights in rows of a swizzle that repeats every 512 bytes.
  static constexpr int aligned(int bytes) { return Format::kFloats ? (bytes + 511) / 512 * 512 : bytes; }
  static constexpr int kQuantsBytes = quant_bytes(Format::kBits), kSetBytes = kScaleWords * 4;
  static constexpr int kSumsAt = kStepBlocks * kRowsBytes, kGroupsAt = aligned(kSumsAt + kStepBlocks * kSumsBytes);
  static constexpr int kSetsAt = kStepBlocks * kQuantsBytes;
  static constexpr int kGroupBytes = kSetsAt + kStepBlocks * Format::kSets * kSetBytes;
  static constexpr int kStageBytes = (kGroupsAt + kTileBlocks * kGroupBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = (216 << 10) / kStageBytes < 16 ? (216 << 10) / kStageBytes : 16;
  static constexpr int kOwnAt = kStages * kStageBytes, kShared = kOwnAt + (kOwn ? kNormedBytes + kBehindRow : 0);
  using Normed = NormedChunks<kWorkers, kNormedBytes / kChunkColumns / kWorkers>;
  static constexpr int kValues = kRows / 2;  // sums of a thread and a block of columns
  static constexpr size_t kSums = (size_t)kWorkers * kColumnBlocks * kValues;
  static_assert(kStages >= 3 && kSums * (kHasSums ? 2 : 1) <= kScratchFloats && kGroups <= kScratchFlags);

  static int tiles(int n, int rows) { return ceil_div(blocks_of(n), kTileBlocks) * ceil_div(rows, kRows); }
};

// Data of the single row that products do not read: its scale and, at segments' last blocks, sums of integers or scales
// of floats.
template <class S>
struct OwnRow {
  float scale;
  std::conditional_t<S::kHasSums, int, float> sums[S::kOwn && S::Format::kSegments ? kNormedBytes / kBlock : 1];
  std::conditional_t<S::kOwn, typename S::Normed::Shared, int> norming;
};
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class S>
__device__ __forceinline__ void make_row(const GemmArgs& p, const Segments& segments, char* row, OwnRow<S>& own) {
  using Normed = typename S::Normed;
  const int k_parts = segments.blocks * (kBlock / kChunkColumns);
  Normed normed(p.norm, p.w.k);
  if (S::kHasSums)
    for (int i = threadIdx.x; i < segments.blocks; i += S::kWorkers) own.sums[i] = 0;
  await_previous();
  if constexpr (S::Format::kFloats && S::Format::kSegments) {
    normed.Normed::Base::make(p.unnormed, own.norming);
#pragma unroll
    for (int i = 0; i < Normed::kKept; i++) {
      const ByteScale<true> scale = scale_of_group(normed[i]);
      const int at = normed.place(i);
      if (at >= k_parts) continue;
      int none = 0;
      *reinterpret_cast<uint4*>(row + at * kChunkColumns) = scale.bytes(normed[i], none);
      own.sums[segments.end(at / (kBlock / kChunkColumns))] = scale.scale;
    }
    return row_is_there<S::kWorkers>();
  }
  const ByteScale<S::Format::kFloats> scale(normed.make(p.unnormed, own.norming));
  if (threadIdx.x == 0) own.scale = scale.scale;
#pragma unroll
  for (int i = 0; i < Normed::kKept; i++) {
    const int at = normed.place(i);
    if (at >= k_parts) continue;
    int sum = 0;
    *reinterpret_cast<uint4*>(row + at * kChunkColumns) = scale.bytes(normed[i], sum);
    if (S::kHasSums) atomicAdd(&own.sums[segments.end(at / (kBlock / kChunkColumns))], sum);
  }
  row_is_there<S::kWorkers>();
}
#endif

// kTogether: each CTA computes one split-K part (StreamKSplit::k_parts), and the CTAs of a tile add up its parts.
template <typename S, bool kTogether>
__global__ void __launch_bounds__(S::kThreads, 1)
    quantized_stream_k_kernel(const __grid_constant__ GemmArgs p, int rows, const __grid_constant__ Steps k,
                              const __grid_constant__ Divisor row_tiles, Segments segments, Scratch scratch,
                              const __grid_constant__ StreamKPartition shares) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Format = typename S::Format;
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kStages = S::kStages, kValues = S::kValues,
                kBits = Format::kBits;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ int arrived[kGroups];
  __shared__ OwnRow<S> made;
  const int column_blocks = blocks_of(p.w.n);
  const StreamKScheduler all(k, shares);
  const int group = warpgroup(), lane = threadIdx.x % 32;
  uint32_t stages = shared_address(shared), full_at = shared_address(full), empty_at = shared_address(empty);
  // Keeps these in registers: the compiler would compute them again in every step.
  asm volatile("" : "+r"(stages), "+r"(full_at), "+r"(empty_at));
  const Quants& quants = p.w.quants;
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4 * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  Pipeline<kStages> ring;
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kCopyRegisters));
    // One thread of each warp starts the copies of that warp.
    if (!elected()) return;
    static_assert(S::kTileBlocks <= kCopyWarps && kRows <= 2 * kBlock && kStepBlocks * 2 == kCopyWarps);
    StreamKCopies<S> ahead(p, all, rows, k, row_tiles, (threadIdx.x - S::kWorkers) / 32);
    StreamKCopies<S> behind = ahead;
    // Weights are prefetched before the previous kernel has written the rows.
    int begun = 0;
    for (; begun < kStages && ahead.there(); begun++, ahead.next())
      ahead.fetch_weights(stages + begun * S::kStageBytes, &full[begun]);
    if constexpr (!S::kOwn) {
      await_previous();
      for (int i = 0; i < begun; i++, behind.next()) behind.fetch_rows(stages + i * S::kStageBytes, &full[i]);
    }
    for (ring.parity = 1; ahead.there(); ahead.next(), ring.next()) {
      const uint32_t to = stages + ring.stage * S::kStageBytes;
      barrier_wait(&empty[ring.stage], ring.parity ^ 1);
      ahead.fetch_weights(to, &full[ring.stage]);
      if constexpr (!S::kOwn) ahead.fetch_rows(to, &full[ring.stage]);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    if constexpr (S::kOwn) make_row<S>(p, segments, shared + S::kOwnAt, made);
    else await_previous();
    const int thread = threadIdx.x % kGroupThreads, warp = thread / 32;
    typename Format::Sum d[S::kColumnBlocks][kValues];
    float total[Format::kSegments ? kValues : 1];
    int segment_end = 0;  // last block of the current segment
    const ScaleSets sets(quants, k.blocks);
    const bool regular = sets.regular();
    const StepGemm<S> products(sets, sets.second(), group * S::kColumnBlocks, warp, lane);
    // Steps of two whole blocks with regular sets of scales; all others are computed block by block.
    const int whole_steps = Format::kSegments || !regular ? 0 : p.w.k / (kStepBlocks * kBlock);
    // The first set of scales of block j of a stage; `block`: its number in K.
    const auto scales_at = [&](int stage, int j, int block) {
      return shared + stage * S::kStageBytes + S::kGroupsAt + group * S::kGroupBytes + S::kSetsAt +
             (j ? sets.second(block - 1) : 0) * S::kSetBytes + (warp * 8 + lane / 4) * 8;
    };
    const auto quants_at = [&](int stage, int j) {
      return stage * S::kStageBytes + S::kGroupsAt + group * S::kGroupBytes + j * S::kQuantsBytes;
    };
    // Loads block j of a stage as the product's first operand; `block`: its number in K. column_block: of the group's.
    const auto load = [&](int stage, int j, int block, int column_block, uint32_t(&a)[Format::kParts][4]) {
      if constexpr (S::kDequantizes) {
        const uint32_t at = stages + stage * S::kStageBytes + column_block * S::kGroupBytes;
        products.weights(at, j, j ? sets.second(block - 1) : 0, a);
        if (const int there = p.w.k - block * kBlock; there < kBlock) {
#pragma unroll
          for (int i = 0; i < 4; i++) cut_fragment(a[i], there - i * 16);
        }
      } else if constexpr (!Format::kFloats) {  // wgmma reads these from shared memory
        load_integers<kBits>(shared + quants_at(stage, j) + warp * (S::kQuantsBytes / 4), a);
      }
    };
    // The rows of block j of a stage, or that block of the single row.
    const auto rows_at = [&](int stage, int j, int block) {
      return stages + (S::kOwn ? S::kOwnAt + block * kBlock : stage * S::kStageBytes + j * S::kRowsBytes);
    };
    // Products of bytes.
    const auto multiply = [&](int stage, int j, int block, bool adds, uint32_t(&a)[Format::kParts][4]) {
      const uint32_t x = rows_at(stage, j, block);
      begin_wgmma();
#pragma unroll
      for (int i = 0; i < Format::kParts; i++) {
        if constexpr (Format::kFloats)
          Float8Tile<kRows>::multiply(
              d[0], byte_descriptor(stages + quants_at(stage, j) + i * kStepBytes),
              S::kOwn ? row_descriptor(x + i * kStepBytes) : byte_descriptor(x + i * kStepBytes), i > 0 || adds);
        else if constexpr (Format::kSegments)
          ByteTile<kRows>::multiply(d[0], a[i], byte_descriptor(x + i * kStepBytes), i > 0 || adds);
      }
      commit_wgmma();
    };
    const auto multiply_few = [&](int stage, int j, int block, const uint32_t(&a)[Format::kParts][4]) {
      const uint32_t x = rows_at(stage, j, block);
#pragma unroll
      for (int t = 0; t < kRows / 8; t++) {
        auto& own = reinterpret_cast<typename Format::Sum(&)[4]>(d[0][4 * t]);
        uint32_t y[4];
        load_cores(
            y, S::kOwn ? x + lane / 8 * kChunkColumns : x + t * 8 * Format::kRowBytes + byte_chunk(lane % 8, lane / 8));
        multiply_add(own, a[0], y[0], y[1]), multiply_add(own, a[1], y[2], y[3]);
      }
    };
    // For kWhole: the tile's scales, and the position of a block's row sums.
    uint2 of_tile = {};
    int first_row = 0;
    const auto sums_at = [&](int block) { return (size_t)block * (blocks_of(rows) * kBlock) + first_row; };
    // Adds the sums to the total if a segment ends with this block; returns whether it does.
    const auto end_segment = [&](int stage, int j, int block) {
      if constexpr (Format::kSegments) {
        if (block != segment_end) return false;
        segment_end = segments.end(block + 1);
        uint2 two = of_tile;
        if constexpr (!Format::kWhole) two = *reinterpret_cast<const uint2*>(scales_at(stage, j, block));
        const char* sums = shared + stage * S::kStageBytes + S::kSumsAt + j * S::kSumsBytes;
        if constexpr (Format::kWhole) sums = reinterpret_cast<const char*>(p.bytes.sums + sums_at(block));
        const float2* of_rows = reinterpret_cast<const float2*>(sums);
#pragma unroll
        for (int i = 0; i < kValues; i++) {
          const uint32_t of_weights = i % 4 / 2 ? two.y : two.x;
          float2 activations;
          if constexpr (S::kOwn) activations.x = activations.y = (float)made.sums[block];
          else activations = of_rows[i / 4 * 4 + lane % 4];
          const float of_row = i % 2 ? activations.y : activations.x;
          if constexpr (Format::kFloats) add_group(total[i], __uint_as_float(of_weights), of_row, d[0][i]);
          else add_segment(total[i], of_weights, d[0][i], of_row);
        }
        return true;
      }
      return false;
    };
    // Where a thread leaves sums for another CTA; adjacent threads are adjacent in memory.
    const auto left_by = [&](int block) { return scratch.sums + block * kScratchFloats + threadIdx.x; };
    StreamKScheduler parts = all;
    for (StreamKUnit part; parts.next(part);) {
      int row, column_block;
      const auto find_place = [&] {
        const int number = afresh(part.tile), tile = row_tiles(number);
        row = (number - tile * row_tiles.by()) * kRows;
        column_block = tile * S::kTileBlocks + group * S::kColumnBlocks;
        return column_block < column_blocks;  // otherwise the columns are beyond the last
      };
      const bool own = find_place();
      if constexpr (Format::kWhole) {
        const uint32_t* scales = quants.scales + (size_t)column_block * kScaleWords + warp * kTileRows + lane / 4 * 2;
        if (own) of_tile = *reinterpret_cast<const uint2*>(scales);
        first_row = row;
      }
      if (!kTogether && part.begin > part.first) {
        int* flag = scratch.flags + (blockIdx.x - 1) * kScratchFlags + group;
        if (own && thread == 0) take(flag, scratch.given_up);
        group_barrier(group);
        const float* from = left_by(blockIdx.x - 1);
#pragma unroll
        for (int c = 0; c < S::kColumnBlocks; c++)
#pragma unroll
          for (int i = 0; i < kValues; i++) {
            const float* at = from + (c * kValues + i) * S::kWorkers;
            if constexpr (Format::kSegments) total[i] = __ldcg(at);
            if constexpr (!Format::kSegments) d[c][i] = __ldcg(at);
            else if constexpr (S::kHasSums) d[c][i] = __float_as_int(__ldcg(at + kValues * S::kWorkers));
          }
      } else if constexpr (Format::kSegments) {
#pragma unroll
        for (int i = 0; i < kValues; i++) total[i] = 0;
      }
      if (S::kDequantizes && part.begin == part.first)
#pragma unroll
        for (int c = 0; c < S::kColumnBlocks; c++) clear(d[c]);
      if constexpr (!S::kFew)
#pragma unroll
        for (int c = 0; c < S::kColumnBlocks; c++) settle(d[c]);
      if constexpr (Format::kSegments) segment_end = segments.end(part.begin * kStepBlocks);
      // Whether products are added to existing sums.
      bool adds = part.begin > part.first;
      if constexpr (Format::kSegments)
        adds = adds && segments.begin(part.begin * kStepBlocks) < part.begin * kStepBlocks;
      if constexpr (S::kFew) {
        if (!adds) clear(d[0]);
        for (int step = part.begin; step < part.end; step++, ring.next()) {
          const int first = step * kStepBlocks;
          barrier_wait(full_at + ring.stage * 8, ring.parity);
#pragma unroll
          for (int j = 0; j < kStepBlocks; j++) {
            if (first + j >= k.blocks) break;
            uint32_t a[Format::kParts][4];
            load(ring.stage, j, first + j, 0, a);
            multiply_few(ring.stage, j, first + j, a);
            if (end_segment(ring.stage, j, first + j)) clear(d[0]);
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(empty_at + ring.stage * 8);
        }
      } else if constexpr (S::kDequantizes) {
        uint32_t a[S::kUnderWay][4][4];
        int step = part.begin, last = -1;  // last: the stage that earlier products still read
        // Descriptor of a stage's rows, computed once for a warp.
        const auto rows_of = [&](int stage) {
          return descriptor(stages + __shfl_sync(~0u, stage, 0) * S::kStageBytes);
        };
        const auto free_last = [&] {
          if (last >= 0 && lane == 0) barrier_arrive(empty_at + last * 8);
        };
        const int whole_end = min(part.end, whole_steps);
#pragma unroll 1
        for (; step < whole_end; step++, ring.next()) {
          barrier_wait(full_at + ring.stage * 8, ring.parity);
          const uint32_t stage = stages + ring.stage * S::kStageBytes;
          const uint64_t in_rows = rows_of(ring.stage);
#pragma unroll
          for (int i = 0; i < kStepBlocks * S::kColumnBlocks; i++)
            products.multiply(stage, in_rows, i / S::kColumnBlocks, i % S::kColumnBlocks, a[i % S::kUnderWay],
                              d[i % S::kColumnBlocks], [&] {
                                if (i == S::kUnderWay - 1) free_last();
                              });
          last = ring.stage;
        }
        wait_wgmma<0>();
#pragma unroll
        for (int c = 0; c < S::kColumnBlocks; c++) settle(d[c]);
        free_last();
        for (; step < part.end; step++, ring.next()) {
          barrier_wait(full_at + ring.stage * 8, ring.parity);
#pragma unroll 1
          for (int j = 0; j < min(kStepBlocks, k.blocks - step * kStepBlocks); j++)
#pragma unroll
            for (int c = 0; c < S::kColumnBlocks; c++) {
              load(ring.stage, j, step * kStepBlocks + j, c, a[0]);
              products.multiply(rows_of(ring.stage) + (j * S::kRowsBytes >> 4), a[0], d[c]);
              wait_wgmma<0>();
              settle(d[c]);
            }
          __syncwarp();
          if (lane == 0) barrier_arrive(empty_at + ring.stage * 8);
        }
      } else {
        uint32_t a[kStepBlocks][Format::kParts][4];  // one is loaded while the other is multiplied
        barrier_wait(&full[ring.stage], ring.parity);
        load(ring.stage, 0, part.begin * kStepBlocks, 0, a[0]);
        for (int step = part.begin; step < part.end; step++) {
          const int stage = ring.stage, block = step * kStepBlocks;
          const bool both = block + 1 < k.blocks;
          multiply(stage, 0, block, adds, a[0]);
          if (both) load(stage, 1, block + 1, 0, a[1]);
          if (Format::kFloats && both) {  // both blocks of a step are in one segment
            adds = true;
          } else {
            wait_wgmma<0>();
            settle(d[0]);
            adds = !end_segment(stage, 0, block);
          }
          if (both) multiply(stage, 1, block + 1, adds, a[1]);
          ring.next();
          if (step + 1 < part.end) {
            barrier_wait(&full[ring.stage], ring.parity);
            load(ring.stage, 0, block + kStepBlocks, 0, a[0]);
          }
          wait_wgmma<0>();
          settle(d[0]);
          if (both) adds = !end_segment(stage, 1, block + 1);
          __syncwarp();
          if (lane == 0) barrier_arrive(&empty[stage]);
        }
      }
      if (!find_place()) continue;  // again: registers do not hold it during products
      // A thread's sums in memory are kWorkers apart, those of a block of columns after those of the one before.
      const auto leave_sums = [&](float* to) {
#pragma unroll
        for (int c = 0; c < S::kColumnBlocks; c++)
#pragma unroll
          for (int i = 0; i < kValues; i++) {
            if constexpr (Format::kSegments) __stcg(to + i * S::kWorkers, total[i]);
            else __stcg(to + (c * kValues + i) * S::kWorkers, d[c][i]);
          }
      };
      if (!kTogether && part.end < part.last) {
        float* to = left_by(blockIdx.x);
        leave_sums(to);
        if constexpr (S::kHasSums)
#pragma unroll
          for (int i = 0; i < kValues; i++) __stcg(to + (kValues + i) * S::kWorkers, __int_as_float(d[0][i]));
        group_barrier(group);
        if (thread == 0) leave(scratch.flags + blockIdx.x * kScratchFlags + group);
        continue;
      }
      const auto sums_of_part = [&]() -> float(&)[kValues] {
        if constexpr (Format::kSegments) return total;
        else return d[0];
      };
      const float* of_rows = S::kOwn ? &made.scale : p.bytes.scales;
      float* parts_at = scratch.k_parts + threadIdx.x;
      if constexpr (kTogether) {
        parts_at += (size_t)part.tile * k.k_parts * S::kSums;
        leave_sums(parts_at + part.k_part * S::kSums);
        group_barrier(group);
        const int eights = (min(kRows, rows - row) + 7) / 8;
        int* count = scratch.arrivals + part.tile * kGroups + group;
        if (thread == 0) arrived[group] = arrive_and_wait(count, k.k_parts, eights, scratch.given_up);
        group_barrier(group);
        const int first = arrived[group];
        if (first >= eights) return;
        // The last CTA that has waited sets the count back, after its sums: that it is the last is known late.
        const int adding = min(k.k_parts, eights);
        int gone = 0;
        if (adding > 1 && thread == 0) gone = atomicAdd(count, kLeaving) / kLeaving;
#pragma unroll 1
        for (int eight = first; eight < eights; eight += k.k_parts)
#pragma unroll
          for (int c = 0; c < S::kColumnBlocks; c++) {
            float sums[4];
            add_parts<4, S::kWorkers, S::kSums>(parts_at + (c * kValues + 4 * eight) * S::kWorkers, k.k_parts, sums);
            epilogue_columns<Format::kScales>(p, rows, row + 8 * eight, column_block + c, sums, of_rows);
          }
        if (thread == 0 && gone == adding - 1) *count = 0;
        return;
      } else {
        static_assert(S::kColumnBlocks == 1);
        float(&sums)[kValues] = sums_of_part();
        if (k.k_parts > 1) {
          const int place = shares.of == StreamKSplit::tiles ? blockIdx.x : part.tile;
          parts_at += (size_t)place * k.k_parts * S::kSums;
          leave_sums(parts_at + part.k_part * S::kSums);
          group_barrier(group);
          if (thread == 0) {
            int* count = scratch.arrivals + place * kGroups + group;
            arrived[group] = arrive(count);
            if (arrived[group] == k.k_parts - 1) *count = 0;
          }
          group_barrier(group);
          if (arrived[group] != k.k_parts - 1) continue;
          add_parts<kValues, S::kWorkers, S::kSums>(parts_at, k.k_parts, sums);
        }
        epilogue_columns<Format::kScales>(p, rows, row, column_block, sums, of_rows);
      }
    }
  }
#endif
}

// Whether there is a CTA for each split-K part.
template <typename S>
bool fits_alone(const GemmArgs& p, int rows) {
  const int k_parts = SplitK(p.w.k, p.w.max_split_k).count;
  return k_parts > 1 && S::tiles(p.w.n, rows) * k_parts <= std::min(sm_count(), kScratchCtas);
}

template <typename S, bool kAlone>
void start_stream_k_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  const SplitK k(p.w.k, p.w.max_split_k);
  const int tiles = S::tiles(p.w.n, rows), most = std::min(sm_count(), kScratchCtas);
  const size_t tile_sums = S::kSums * k.count;
  static_assert(kScratchCtas * S::kSums <= kScratchParts);  // enough for kAlone
  // Without scratch memory for the split-K parts of all tiles, CTAs compute whole tiles. Otherwise there are so few
  // CTAs that at most two share a split-K part.
  StreamKSplit of = kAlone ? StreamKSplit::k_parts : StreamKSplit::steps;
  int blocks =
      (int)std::min<int64_t>(most, std::max<int64_t>(1, (int64_t)tiles * steps_of(k.blocks) / steps_of(k.length)));
  if (!kAlone && k.count > 1 && tiles * tile_sums > kScratchParts)
    of = StreamKSplit::tiles, blocks = std::min({most, tiles, (int)(kScratchParts / tile_sums)});
  const StreamKPartition shares(of, tiles, k, blocks);
  // The parts of eight rows are added up by one CTA in any case.
  constexpr bool kTogether = kAlone && S::kRows > 8;
  start(queue, quantized_stream_k_kernel<S, kTogether>, dim3(shares.blocks), S::kThreads, S::kShared, p, rows, Steps(k),
        Divisor((rows + S::kRows - 1) / S::kRows), Segments(p.w, k), queue.scratch, shares);
}
template <typename S>
void start_narrow(const GemmArgs& p, int rows, const Queue& queue) {
  fits_alone<S>(p, rows) ? start_stream_k_tiles<S, true>(p, rows, queue)
                         : start_stream_k_tiles<S, false>(p, rows, queue);
}

// The widest tiles of which there are enough: rows are read again for each tile. Alone: for CTAs of one split-K part.
template <class Alone, class Wide, class Narrow>
void start_widest(const GemmArgs& p, int rows, const Queue& queue) {
  const int sms = sm_count(), k_parts = SplitK(p.w.k, p.w.max_split_k).count;
  if (fits_alone<Alone>(p, rows) && Alone::tiles(p.w.n, rows) * k_parts >= sms * 2 / 3)
    start_stream_k_tiles<Alone, true>(p, rows, queue);
  else if (Wide::tiles(p.w.n, rows) >= sms) start_stream_k_tiles<Wide, false>(p, rows, queue);
  else start_narrow<Narrow>(p, rows, queue);
}
template <class Format, int kRows, int kMaxGroups, bool kOwn = false>
void start_stream_k_rows(const GemmArgs& p, int rows, const Queue& queue) {
  using Wide = StreamKShape<Format, kRows, kMaxGroups, kOwn>;
  start_widest<Wide, Wide, StreamKShape<Format, kRows, 2, kOwn>>(p, rows, queue);
}

template <class Format>
void start_quantized_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 8) return start_stream_k_rows<Format, 8, 4>(p, rows, queue);
  if (rows <= 16) return start_stream_k_rows<Format, 16, 4>(p, rows, queue);
  if (rows <= 32) return start_stream_k_rows<Format, 32, 4>(p, rows, queue);
  if constexpr (Format::kDequantizes) {
    // As measured: of one split-K part registers hold more sums than of several.
    if (rows <= 64)
      start_widest<StreamKShape<Format, 64, 4>, StreamKShape<Format, 64, 3>, StreamKShape<Format, 64, 2>>(p, rows,
                                                                                                          queue);
    else
      start_widest<StreamKShape<Format, 128, 2, false, 2>, StreamKShape<Format, 128, 3>, StreamKShape<Format, 128, 2>>(
          p, rows, queue);
  } else {
    if (rows <= 64) start_stream_k_rows<Format, 64, 3>(p, rows, queue);
    else start_narrow<StreamKShape<Format, 128, 2>>(p, rows, queue);
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
