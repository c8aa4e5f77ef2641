// Stream-K GEMMs of quantized weights by wgmma; gemm_stream_k.cu is the 16-bit counterpart.
//
// CTAs are persistent, and each computes an equal number of all steps of all tiles. A step is two blocks of K; a tile
// is several columns (rows of the weights) by several rows of activations. Four warps copy steps to shared memory as
// far ahead as there is room, across tiles. Warpgroups multiply 64 columns each with all rows: a warp dequantizes 16
// columns to the first operand in registers while the previous product runs. float8 weights are read from shared memory
// without conversion. Few rows are multiplied by mma.sync, which gives the same bits (except for float8) and takes
// fewer instructions than wgmma's descriptors and waits.
//
// A tile's sum over K consists of split-K parts (tiles.h). The last CTA to arrive adds them in ascending order. If one
// part for each CTA keeps nearly all SMs busy, each CTA computes one part: hand-overs would cost more than unequal
// work. If two CTAs share a part, one computes its beginning before all its other work and leaves the sums in global
// memory; the other continues from them as its last work, long after. CTAs wait only for CTAs of lower numbers, which
// have started before.
#pragma once
#include <algorithm>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/epilogue_columns.cuh"
#include "cuda/kernels/gemm/quant_fragments.cuh"
#include "cuda/kernels/gemm/quantize_chunks.cuh"
#include "cuda/kernels/gemm/stream_k_scheduler.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kGroupThreads = 128;

// Formats of weights (kBits bits) and activations. kRowBytes: bytes of a row of a block of activations. kParts:
// products of a block. kSets: sets of scales of a block. kSegments: within a split-K part, sums become floats and are
// added to a total. kWhole: that happens only at the part's end, where scales and row sums are read from global memory.
template <class Type>    // a WeightType
struct Rounded : Type {  // bfloat16 activations
  using Sum = float;
  static constexpr int kRowBytes = cuda::kRowBytes, kParts = 4, kSets = Type::kFine ? 4 : 1;
  static constexpr bool kSegments = false, kFloats = false, kWhole = false;
  static constexpr SumScales kScales = SumScales::none;
};
template <int kWeightBits, bool kOneGroup = false>
struct Integers {
  using Sum = int;
  static constexpr int kBits = kWeightBits, kRowBytes = kByteRow, kParts = 2, kSets = kOneGroup ? 0 : 1;
  static constexpr Codes kCodes = Codes::integers;
  static constexpr bool kFine = false, kSegments = true, kFloats = false, kWhole = kOneGroup;
  static constexpr SumScales kScales = SumScales::rows;
};
template <bool kGroups = false>  // kGroups: scales of 128 columns
struct Floats {
  using Sum = float;
  static constexpr int kBits = 8, kRowBytes = kByteRow, kParts = 2, kSets = kGroups;
  static constexpr Codes kCodes = Codes::integers;
  static constexpr bool kFine = false, kSegments = kGroups, kFloats = true, kWhole = false;
  static constexpr SumScales kScales = kGroups ? SumScales::none : SumScales::columns_and_rows;
};

// kRows: rows of activations. kGroups: warpgroups that multiply, 64 columns each. kOwn: there is one row, which the
// kernel normalizes and quantizes itself.
template <class Format_, int kRows_, int kGroups_, bool kOwn_ = false>
struct StreamKShape {
  using Format = Format_;
  static constexpr int kRows = kRows_, kGroups = kGroups_;
  static constexpr bool kOwn = kOwn_;
  static constexpr int kWorkers = kGroupThreads * kGroups, kThreads = kWorkers + kGroupThreads;
  // Registers of a thread: at launch, as many as fit for all threads; then of a thread that multiplies and of one that
  // copies. The latter two must not need more in all than at launch, or a warpgroup waits for registers forever.
  static constexpr int kLaunched = (65536 / 4 / 32 / ((kThreads / 32 + 3) / 4)) / 8 * 8;
  static constexpr int kRegisters = kGroups == 2 ? 224 : kGroups == 3 ? 152 : 104;
  static constexpr int kCopyRegisters = kGroups == 2 ? 56 : kGroups == 3 ? 56 : 64;
  static_assert(kGroups >= 2 && kGroups * kRegisters + kCopyRegisters <= (kGroups + 1) * kLaunched);
  static constexpr bool kHasSums = std::is_same_v<typename Format::Sum, int>;
  // Few rows are multiplied by mma.sync, which takes fewer instructions. Not e4m3: wgmma's sums have other bits.
  static constexpr bool kFew = kRows <= 32 && !Format::kFloats;
  // Bytes of a block: of rows, of their sums, of a warpgroup's quantized values, of a set of scales.
  static constexpr int kRowBytes = kOwn ? 0 : Format::kRowBytes, kRowsBytes = kRows * kRowBytes;
  // Of integers sums, of floats scales of the rows.
  static constexpr int kSumsBytes = Format::kSegments && !kOwn && !Format::kWhole ? kRows * 4 : 0;
  // wgmma reads float8 weights in rows of a swizzle that repeats every 512 bytes.
  static constexpr int aligned(int bytes) { return Format::kFloats ? (bytes + 511) / 512 * 512 : bytes; }
  static constexpr int kQuantsBytes = quant_bytes(Format::kBits), kSetBytes = kScaleWords * 4;
  static constexpr int kSumsAt = kStepBlocks * kRowsBytes, kGroupsAt = aligned(kSumsAt + kStepBlocks * kSumsBytes);
  static constexpr int kSetsAt = kStepBlocks * kQuantsBytes;
  static constexpr int kGroupBytes = kSetsAt + kStepBlocks * Format::kSets * kSetBytes;
  static constexpr int kStageBytes = (kGroupsAt + kGroups * kGroupBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = (216 << 10) / kStageBytes < 16 ? (216 << 10) / kStageBytes : 16;
  static constexpr int kOwnAt = kStages * kStageBytes, kShared = kOwnAt + (kOwn ? kNormedBytes + kBehindRow : 0);
  using Normed = NormedChunks<kWorkers, kNormedBytes / kChunkColumns / kWorkers>;
  static constexpr int kValues = kRows / 2;  // sums of a thread
  static constexpr size_t kSums = (size_t)kWorkers * kValues;
  static_assert(kStages >= 3 && kSums * (kHasSums ? 2 : 1) <= kScratchFloats && kGroups <= kScratchFlags);

  static int tiles(int n, int rows) { return (blocks_of(n) + kGroups - 1) / kGroups * ((rows + kRows - 1) / kRows); }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ inline void leave(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
// Not inlined: with a bounded loop inlined, ptxas spills up to 300 bytes of a thread's sums.
static __device__ __noinline__ void take(int* flag, int* given_up) {
  await_flag(flag, Waiter::gemm_quantized_stream_k, given_up);
  asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" ::"l"(flag) : "memory");
}
__device__ inline int arrive(int* count) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}
__device__ inline void group_barrier(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
}
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kCopyWarps = kGroupThreads / 32;
// The copies that a warp starts in each step: a warpgroup's quantized values, a warpgroup's scales, and some of the
// rows. Everything that needs a division is computed at the beginning of a part: a division in each step would take
// longer than copying the step's weights.
template <class S>
class StreamKCopies {
 public:
  using Format = typename S::Format;

  __device__ StreamKCopies(const GemmArgs& p, const StreamKScheduler& parts, int rows, const Steps& k,
                           const Divisor& row_tiles, int warp)
      : p_(p), parts_(parts), k_(k), row_tiles_(row_tiles), sets_(p.w.quants, k.blocks), rows_(rows), warp_(warp) {
    begin();
  }
  __device__ bool there() const { return there_; }
  __device__ void next() {
    if (++step_ == part_.end) return begin();
    quants_ += kStepBlocks * S::kQuantsBytes, x_ += kStepBlocks * kBlock * Format::kRowBytes;
    if constexpr (Format::kSets) {
      for (left_ -= kStepBlocks; left_ <= 0; left_ += sets_.blocks) set_ += sets_.each;
    }
  }
  __device__ void fetch_weights(uint32_t to, uint64_t* full) const {
    const int blocks = min(kStepBlocks, k_.blocks - step_ * kStepBlocks);
    int sets = 0;
    if constexpr (Format::kSets) sets = min(left_ == 1 && blocks > 1 ? 2 * sets_.each : sets_.each, sets_.count - set_);
    if (warp_ == 0)
      barrier_expect(full, blocks * (there_rows_ * S::kRowBytes + S::kSumsBytes + groups_ * S::kQuantsBytes) +
                               groups_ * sets * S::kSetBytes);
    const uint64_t policy = evicted_first();
    to += S::kGroupsAt;
    if (warp_ < groups_) copy_bulk(to + warp_ * S::kGroupBytes, quants_, blocks * S::kQuantsBytes, full, policy);
    if constexpr (Format::kSets)
      if (scaled() < groups_)
        copy_bulk(to + scaled() * S::kGroupBytes + S::kSetsAt, scales_ + (size_t)set_ * S::kSetBytes,
                  sets * S::kSetBytes, full, policy);
  }
  __device__ void fetch_rows(uint32_t to, uint64_t* full) const {
    const int block = step_ * kStepBlocks + warp_ % kStepBlocks, i = warp_ / kStepBlocks;
    if (block >= k_.blocks) return;
    if (own_rows_ > 0)
      copy_bulk(to + warp_ % kStepBlocks * S::kRowsBytes + i * kBlock * Format::kRowBytes, x_,
                own_rows_ * Format::kRowBytes, full);
    if (S::kSumsBytes && i == 1)
      copy_bulk(to + S::kSumsAt + warp_ % kStepBlocks * S::kSumsBytes,
                reinterpret_cast<const char*>(p_.bytes.sums + (size_t)block * (blocks_of(rows_) * kBlock) + row_),
                S::kSumsBytes, full);
  }

 private:
  // The warpgroup whose scales this warp copies: with two warpgroups, by a warp that copies no quantized values.
  __device__ int scaled() const { return kCopyWarps - 1 - warp_; }
  __device__ void begin() {
    there_ = parts_.next(part_);
    if (!there_) return;
    step_ = part_.begin;
    const int tile = row_tiles_(part_.tile), column_block = tile * S::kGroups;
    const int block = step_ * kStepBlocks, i = warp_ / kStepBlocks;
    row_ = (part_.tile - tile * row_tiles_.by()) * S::kRows, there_rows_ = min(S::kRows, rows_ - row_);
    own_rows_ = i * kBlock < S::kRows ? min(kBlock, there_rows_ - i * kBlock) : 0;
    groups_ = min(S::kGroups, blocks_of(p_.w.n) - column_block);
    const Quants& quants = p_.w.quants;
    quants_ = reinterpret_cast<const char*>(quants.words) +
              ((size_t)(column_block + warp_) * k_.blocks + block) * S::kQuantsBytes;
    scales_ =
        reinterpret_cast<const char*>(quants.scales) + (size_t)(column_block + scaled()) * quants.groups * S::kSetBytes;
    const char* x = Format::kParts == 4 ? reinterpret_cast<const char*>(p_.x.tiles)
                                        : reinterpret_cast<const char*>(p_.bytes.values);
    x_ = x + (((size_t)(row_ / kBlock + i) * k_.blocks + block + warp_ % kStepBlocks) * kBlock + row_ % kBlock) *
                 Format::kRowBytes;
    if constexpr (Format::kSets) {
      const int before = sets_.blocks == 1 ? block : block / sets_.blocks;
      set_ = before * sets_.each, left_ = (before + 1) * sets_.blocks - block;
    }
  }

  const GemmArgs& p_;
  StreamKScheduler parts_;
  StreamKUnit part_;
  const Steps& k_;
  const Divisor& row_tiles_;
  const ScaleSets sets_;
  const int rows_, warp_;
  const char *quants_, *scales_, *x_;
  int step_, row_, there_rows_, own_rows_, groups_, set_, left_;  // left_: blocks left of the set, from the step on
  bool there_;
};
#endif

template <typename Sum, int kValues>
__device__ inline void clear(Sum (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) d[i] = 0;
}

// Adds all split-K parts in ascending order. With few values, all loads are issued before the first addition.
template <int kValues, int kStride, size_t kPiece>
__device__ inline void add_parts(const float* from, int k_parts, float (&sums)[kValues]) {
  if constexpr (kValues <= 16) {
    constexpr int kTogether = 4;
#pragma unroll
    for (int first = 0; first < kValues; first += kTogether) {
      float all[kMaxQuantSplitK][kTogether];
#pragma unroll
      for (int k_part = 0; k_part < kMaxQuantSplitK; k_part++)
#pragma unroll
        for (int i = 0; i < kTogether; i++)
          if (k_part < k_parts) all[k_part][i] = __ldcg(from + k_part * kPiece + (first + i) * kStride);
#pragma unroll
      for (int i = 0; i < kTogether; i++) sums[first + i] = all[0][i];
#pragma unroll
      for (int k_part = 1; k_part < kMaxQuantSplitK; k_part++)
#pragma unroll
        for (int i = 0; i < kTogether; i++)
          if (k_part < k_parts) sums[first + i] = __fadd_rn(sums[first + i], all[k_part][i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; i++) sums[i] = __ldcg(from + i * kStride);
    for (int k_part = 1; k_part < k_parts; k_part++) {
      from += kPiece;
#pragma unroll
      for (int i = 0; i < kValues; i++) sums[i] = __fadd_rn(sums[i], __ldcg(from + i * kStride));
    }
  }
}

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

template <typename S>
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
  const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % 32;
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
    static_assert(kGroups <= kCopyWarps && kRows <= 2 * kBlock && kStepBlocks * 2 == kCopyWarps);
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
    typename Format::Sum d[kValues];
    float total[Format::kSegments ? kValues : 1];
    int segment_end = 0;  // last block of the current segment
    const ScaleSets sets(quants, k.blocks);
    const bool regular = sets.regular();
    const StepGemm<S> products(sets, sets.second(), group, warp, lane);
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
    // Loads block j of a stage as the product's first operand; `block`: its number in K.
    const auto load = [&](int stage, int j, int block, uint32_t(&a)[Format::kParts][4]) {
      if constexpr (Format::kFloats) return;  // wgmma reads them from shared memory
      if constexpr (Format::kSegments) {
        load_integers<kBits>(shared + quants_at(stage, j) + warp * (S::kQuantsBytes / 4), a);
      } else if constexpr (!Format::kFloats) {
        const uint32_t at = stages + stage * S::kStageBytes;
        if (j == 0 || regular) products.weights(at, j, a);
        else products.weights(at, j, sets.second(block - 1), a);
        if (const int there = p.w.k - block * kBlock; there < kBlock) {
#pragma unroll
          for (int i = 0; i < 4; i++) cut_fragment(a[i], there - i * 16);
        }
      }
    };
    // The rows of block j of a stage, or that block of the single row.
    const auto rows_at = [&](int stage, int j, int block) {
      return stages + (S::kOwn ? S::kOwnAt + block * kBlock : stage * S::kStageBytes + j * S::kRowsBytes);
    };
    const auto multiply = [&](int stage, int j, int block, bool adds, uint32_t(&a)[Format::kParts][4]) {
      const uint32_t x = rows_at(stage, j, block);
      begin_wgmma();
#pragma unroll
      for (int i = 0; i < Format::kParts; i++) {
        if constexpr (Format::kFloats)
          Float8Tile<kRows>::multiply(
              d, byte_descriptor(stages + quants_at(stage, j) + i * kStepBytes),
              S::kOwn ? row_descriptor(x + i * kStepBytes) : byte_descriptor(x + i * kStepBytes), i > 0 || adds);
        else if constexpr (Format::kSegments)
          ByteTile<kRows>::multiply(d, a[i], byte_descriptor(x + i * kStepBytes), i > 0 || adds);
        else RegisterTile<kRows>::multiply(d, a[i], descriptor(x + i * kStepBytes), i > 0 || adds);
      }
      commit_wgmma();
    };
    const auto multiply_few = [&](int stage, int j, int block, const uint32_t(&a)[Format::kParts][4]) {
      const uint32_t x = rows_at(stage, j, block);
      if constexpr (Format::kParts == 4) {
        products.multiply(x, a, d);
      } else {
#pragma unroll
        for (int t = 0; t < kRows / 8; t++) {
          auto& own = reinterpret_cast<typename Format::Sum(&)[4]>(d[4 * t]);
          uint32_t y[4];
          load_cores(y, S::kOwn ? x + lane / 8 * kChunkColumns
                                : x + t * 8 * Format::kRowBytes + byte_chunk(lane % 8, lane / 8));
          multiply_add(own, a[0], y[0], y[1]), multiply_add(own, a[1], y[2], y[3]);
        }
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
          if constexpr (Format::kFloats) add_group(total[i], __uint_as_float(of_weights), of_row, d[i]);
          else add_segment(total[i], of_weights, d[i], of_row);
        }
        return true;
      }
      return false;
    };
    // Where a thread leaves sums for another CTA; adjacent threads are adjacent in memory.
    const auto left_by = [&](int block) { return scratch.sums + block * kScratchFloats + threadIdx.x; };
    StreamKScheduler parts = all;
    for (StreamKUnit part; parts.next(part);) {
      const int tile = row_tiles(part.tile), column_block = tile * kGroups + group;
      const int row = (part.tile - tile * row_tiles.by()) * kRows;
      const bool own = column_block < column_blocks;  // otherwise the columns are beyond the last
      if constexpr (Format::kWhole) {
        const uint32_t* scales = quants.scales + (size_t)column_block * kScaleWords + warp * kTileRows + lane / 4 * 2;
        if (own) of_tile = *reinterpret_cast<const uint2*>(scales);
        first_row = row;
      }
      if (part.begin > part.first) {
        int* flag = scratch.flags + (blockIdx.x - 1) * kScratchFlags + group;
        if (own && thread == 0) take(flag, scratch.given_up);
        group_barrier(group);
        const float* from = left_by(blockIdx.x - 1);
#pragma unroll
        for (int i = 0; i < kValues; i++) {
          if constexpr (Format::kSegments) total[i] = __ldcg(from + i * S::kWorkers);
          if constexpr (!Format::kSegments) d[i] = __ldcg(from + i * S::kWorkers);
          else if constexpr (S::kHasSums) d[i] = __float_as_int(__ldcg(from + (kValues + i) * S::kWorkers));
        }
      } else if constexpr (Format::kSegments) {
#pragma unroll
        for (int i = 0; i < kValues; i++) total[i] = 0;
      }
      if constexpr (!S::kFew) settle(d);
      if constexpr (Format::kSegments) segment_end = segments.end(part.begin * kStepBlocks);
      // Whether products are added to existing sums.
      bool adds = part.begin > part.first;
      if constexpr (Format::kSegments)
        adds = adds && segments.begin(part.begin * kStepBlocks) < part.begin * kStepBlocks;
      if constexpr (S::kFew) {
        if (!adds) clear(d);
        for (int step = part.begin; step < part.end; step++, ring.next()) {
          const int first = step * kStepBlocks;
          barrier_wait(full_at + ring.stage * 8, ring.parity);
          if (step < whole_steps) {
            if constexpr (Format::kParts == 4) products.multiply(stages + ring.stage * S::kStageBytes, d);
          } else {
#pragma unroll
            for (int j = 0; j < kStepBlocks; j++) {
              if (first + j >= k.blocks) break;
              uint32_t a[Format::kParts][4];
              load(ring.stage, j, first + j, a);
              multiply_few(ring.stage, j, first + j, a);
              if (end_segment(ring.stage, j, first + j)) clear(d);
            }
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(empty_at + ring.stage * 8);
        }
      } else {
        uint32_t a[kStepBlocks][Format::kParts][4];  // one is dequantized while the other is multiplied
        barrier_wait(&full[ring.stage], ring.parity);
        load(ring.stage, 0, part.begin * kStepBlocks, a[0]);
        for (int step = part.begin; step < part.end; step++) {
          const int stage = ring.stage, block = step * kStepBlocks;
          const bool both = block + 1 < k.blocks;
          multiply(stage, 0, block, adds, a[0]);
          if (both) load(stage, 1, block + 1, a[1]);
          if (Format::kFloats && both) {  // both blocks of a step are in one segment
            adds = true;
          } else {
            wait_wgmma<0>();
            settle(d);
            adds = !end_segment(stage, 0, block);
          }
          if (both) multiply(stage, 1, block + 1, adds, a[1]);
          ring.next();
          if (step + 1 < part.end) {
            barrier_wait(&full[ring.stage], ring.parity);
            load(ring.stage, 0, block + kStepBlocks, a[0]);
          }
          wait_wgmma<0>();
          settle(d);
          if (both) adds = !end_segment(stage, 1, block + 1);
          __syncwarp();
          if (lane == 0) barrier_arrive(&empty[stage]);
        }
      }
      if (!own) continue;
      if (part.end < part.last) {
        float* to = left_by(blockIdx.x);
#pragma unroll
        for (int i = 0; i < kValues; i++) {
          if constexpr (Format::kSegments) __stcg(to + i * S::kWorkers, total[i]);
          if constexpr (!Format::kSegments) __stcg(to + i * S::kWorkers, d[i]);
          else if constexpr (S::kHasSums) __stcg(to + (kValues + i) * S::kWorkers, __int_as_float(d[i]));
        }
        group_barrier(group);
        if (thread == 0) leave(scratch.flags + blockIdx.x * kScratchFlags + group);
        continue;
      }
      float sums[kValues];
#pragma unroll
      for (int i = 0; i < kValues; i++) {
        if constexpr (Format::kSegments) sums[i] = total[i];
        else sums[i] = d[i];
      }
      if (k.k_parts > 1) {
        const int place = shares.of == StreamKSplit::tiles ? blockIdx.x : part.tile;
        float* to = scratch.k_parts + ((size_t)place * k.k_parts + part.k_part) * S::kSums + threadIdx.x;
#pragma unroll
        for (int i = 0; i < kValues; i++) __stcg(to + i * S::kWorkers, sums[i]);
        group_barrier(group);
        if (thread == 0) {
          int* count = scratch.arrivals + place * kGroups + group;
          arrived[group] = arrive(count);
          if (arrived[group] == k.k_parts - 1) *count = 0;
        }
        group_barrier(group);
        if (arrived[group] != k.k_parts - 1) continue;
        const float* from = scratch.k_parts + (size_t)place * k.k_parts * S::kSums + threadIdx.x;
        add_parts<kValues, S::kWorkers, S::kSums>(from, k.k_parts, sums);
      }
      epilogue_columns<Format::kScales>(p, rows, row, column_block, sums, S::kOwn ? &made.scale : p.bytes.scales);
    }
  }
#endif
}

template <typename S>
void start_stream_k_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  const SplitK k(p.w.k, p.w.max_split_k);
  const int tiles = S::tiles(p.w.n, rows), most = std::min(sm_count(), kScratchCtas);
  const size_t tile_sums = S::kSums * k.count;
  // Without scratch memory for the split-K parts of all tiles, CTAs compute whole tiles. Otherwise there are so few
  // CTAs that at most two share a split-K part.
  StreamKSplit of = StreamKSplit::steps;
  int blocks =
      (int)std::min<int64_t>(most, std::max<int64_t>(1, (int64_t)tiles * steps_of(k.blocks) / steps_of(k.length)));
  if (k.count > 1 && tiles * tile_sums > kScratchParts)
    of = StreamKSplit::tiles, blocks = std::min({most, tiles, (int)(kScratchParts / tile_sums)});
  else if (tiles * k.count <= most) of = StreamKSplit::k_parts;
  const StreamKPartition shares(of, tiles, k, blocks);
  start(queue, quantized_stream_k_kernel<S>, dim3(shares.blocks), S::kThreads, S::kShared, p, rows, Steps(k),
        Divisor((rows + S::kRows - 1) / S::kRows), Segments(p.w, k), queue.scratch, shares);
}

// The widest tiles of which there are enough: rows are read again for each tile.
template <class Format, int kRows, int kMaxGroups, bool kOwn = false>
void start_stream_k_rows(const GemmArgs& p, int rows, const Queue& queue) {
  using Wide = StreamKShape<Format, kRows, kMaxGroups, kOwn>;
  const int k_parts = Wide::tiles(p.w.n, rows) * SplitK(p.w.k, p.w.max_split_k).count;
  const bool alone = k_parts <= sm_count() && k_parts >= sm_count() * 2 / 3;
  if (alone || Wide::tiles(p.w.n, rows) >= sm_count()) start_stream_k_tiles<Wide>(p, rows, queue);
  else start_stream_k_tiles<StreamKShape<Format, kRows, 2, kOwn>>(p, rows, queue);
}

template <class Format>
void start_quantized_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 8) start_stream_k_rows<Format, 8, 4>(p, rows, queue);
  else if (rows <= 16) start_stream_k_rows<Format, 16, 4>(p, rows, queue);
  else if (rows <= 32) start_stream_k_rows<Format, 32, 4>(p, rows, queue);
  else if (rows <= 64) start_stream_k_rows<Format, 64, 3>(p, rows, queue);
  else start_stream_k_tiles<StreamKShape<Format, 128, 2>>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
