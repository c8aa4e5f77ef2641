// GEMMs by mma.sync of few rows, and on chips without wgmma of any number. They are bound by the bandwidth of the
// weights, which may be 16-bit floats, quantized values that are rounded to bfloat16 in registers, or integers
// (gemm_integer.h).
//
// A CTA computes several columns (rows of the weights) by up to 64 rows of activations. Each warp computes split-K
// parts (tiles.h) by itself: it copies its part of both operands to shared memory, several stages ahead, which other
// warps do not read. After each round, in which each warp computes one part, all warps add the parts in ascending
// order.
#pragma once
#include <algorithm>

#include "cuda/kernels/gemm/column_tiles.cuh"
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/gemm_integer.h"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kMaxWarps = 8;
constexpr int kRowTile = 8;

// The blocks of K that a warp computes, for all columns of its CTA, and, if kHasGroups, the group of scales of each
// block.
template <bool kHasGroups>
struct WarpWalk {
  int tile, k_part, group_blocks, block, end, group, group_end;

  __device__ void begin_part(const SplitK& k) {
    block = k_part * k.length, end = min(block + k.length, k.blocks);
    if (kHasGroups) group = block / group_blocks, group_end = (group + 1) * group_blocks;
  }
  __device__ void next(const SplitK& k, int warp, int warps) {
    if (++block == group_end && kHasGroups) group++, group_end += group_blocks;
    if (block < end) return;
    if ((k_part += warps) >= k.count) k_part = warp, tile += gridDim.x;
    begin_part(k);
  }
};

// Type: of the weights. kTiles: tiles of 8 rows of activations; kColumnTiles: tiles of 16 columns. A stage has a block
// of K: weights, rows, and for integers the rows' sums.
template <typename Type, bool kIntegers_, int kTiles_, int kColumnTiles, int kStages_, int kMostShared>
struct MmaShape : ColumnTiles<Type, kColumnTiles> {
  using Weights = ColumnTiles<Type, kColumnTiles>;
  using Walk = WarpWalk<Type::kScales == Scales::blocks>;
  static constexpr bool kIntegers = kIntegers_, kFloats16 = Type::kBits == 16;
  static constexpr int kTiles = kTiles_, kRows = kRowTile * kTiles, kStages = kStages_;
  static constexpr int kRowBytes = kIntegers ? kByteRow : cuda::kRowBytes;
  static constexpr int kRowsAt = Weights::kBytes, kRowSumsAt = kRowsAt + kRows * kRowBytes;
  static constexpr int kStageBytes = kRowSumsAt + (kIntegers ? kRows * 4 : 0);
  static constexpr int kSums = Weights::kColumns * kRows;  // of a split-K part
  static constexpr size_t kWarpBytes = kSums * 4 + kStages * kStageBytes;

  static size_t shared(int warps) { return warps * kWarpBytes + kSums * 4; }
  static int max_warps() {
    return std::min<int>(kMaxWarps, (std::min(kMostShared, max_shared()) - kSums * 4) / kWarpBytes);
  }
};

// A warp's sums of a split-K part, in mma.sync's order of tiles of 16 columns and 8 rows.
template <typename S, bool kIntegers = S::kIntegers>
struct WarpSums {
  float sums[S::kCount][S::kTiles][4] = {};

  __device__ WarpSums(const Segments&, int) {}
  // Adds a block of K from a stage, whose rows are at this address. there: columns of K from its first on.
  __device__ __forceinline__ void add(const char* stage, uint32_t rows, const Segments&, int, int there, int sets) {
    Fragments<S> weights(stage, there, sets);
    multiply_block(weights, rows, sums);
  }
};
template <typename S>
struct WarpSums<S, true> {
  float sums[S::kCount][S::kTiles][4] = {};
  int d[S::kCount][S::kTiles][4] = {};  // of a segment
  int end;                              // its last block

  __device__ WarpSums(const Segments& segments, int begin) : end(segments.end(begin)) {}
  __device__ __forceinline__ void add(const char* stage, uint32_t rows, const Segments& segments, int block, int, int) {
    const int lane = threadIdx.x % 32;
    uint32_t y[S::kTiles][4];
#pragma unroll
    for (int t = 0; t < S::kTiles; t++)
      load_cores(y[t], rows + t * kRowTile * kByteRow + byte_chunk(lane % 8, lane / 8));
#pragma unroll
    for (int m = 0; m < S::kCount; m++) {
      uint32_t a[2][4];
      load_integers<S::kBits>(stage + m * S::kTileBytes, a);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int t = 0; t < S::kTiles; t++) multiply_add(d[m][t], a[half], y[t][half * 2], y[t][half * 2 + 1]);
    }
    if (block == end) {
      end = segments.end(end + 1);
#pragma unroll
      for (int m = 0; m < S::kCount; m++) {
        const uint2 two = reinterpret_cast<const uint2*>(stage + S::kWeights)[m * 8 + lane / 4];
        const uint32_t scales[2] = {two.x, two.y};
#pragma unroll
        for (int t = 0; t < S::kTiles; t++) {
          const float2 of_rows = reinterpret_cast<const float2*>(stage + S::kRowSumsAt)[t * 4 + lane % 4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            add_segment(sums[m][t][i], scales[i / 2], d[m][t][i], i % 2 ? of_rows.y : of_rows.x);
            d[m][t][i] = 0;
          }
        }
      }
    }
  }
};

// Stores a warp's sums to to[row][column].
template <int kColumnTiles, int kTiles>
__device__ void put_part(const float (&d)[kColumnTiles][kTiles][4], float* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kColumnTiles; m++)
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[(t * kRowTile + 2 * (lane % 4) + i % 2) * kColumnTiles * kTileRows + m * kTileRows + lane / 4 + i / 2 * 8] =
            d[m][t][i];
}

// Adds a round's split-K parts, [warp][row][column], to the totals of earlier rounds. last(i, total) gives the value to
// store for a complete total.
template <int kSums, typename Last>
__device__ void add_parts(const float* sums, float* totals, const SplitK& k, int round, const Last& last) {
  const int warps = blockDim.x / 32, k_parts = min(warps, k.count - round * warps);
  const bool is_last = (round + 1) * warps >= k.count;
  for (int i = threadIdx.x; i < kSums; i += blockDim.x) {
    float total = round ? totals[i] : sums[i];
    for (int w = round ? 0 : 1; w < k_parts; w++) total = __fadd_rn(total, sums[w * kSums + i]);
    totals[i] = is_last ? last(i, total) : total;
  }
}

// Gates the totals, which alternate between eight gate and eight up columns, and stores tile number `tile` of columns.
template <int kColumns, int kSums>
__device__ void put_gated(const GemmArgs& p, int rows, int first_row, int tile, const float* totals) {
  for (int i = threadIdx.x; i < kSums / 2; i += blockDim.x) {
    const int row = i / (kColumns / 2), c = i % (kColumns / 2), column = tile * (kColumns / 2) + c;
    const float* gate = totals + row * kColumns + c / 8 * kTileRows + c % 8;
    if (first_row + row < rows && column < p.y.width) finish_gated(p, first_row + row, column, gate[0], gate[8]);
  }
}

template <typename S>
__global__ void __launch_bounds__(32 * kMaxWarps)
    gemm_mma_kernel(const __grid_constant__ GemmArgs p, int rows, int tiles, SplitK k, Segments segments) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kStages = S::kStages, kBytes = S::kStageBytes, kSums = S::kSums, kColumns = S::kColumns;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* totals = reinterpret_cast<float*>(shared);  // of the previous rounds: [row][column]
  float* sums = totals + kSums;                      // of each warp's split-K part
  const char* const ring = reinterpret_cast<char*>(sums + warps * kSums) + warp * kStages * kBytes;
  const uint32_t ring_at = shared_address(ring);
  const int first_row = blockIdx.y * S::kRows, there = rows - first_row;  // sums of further rows are not used
  const int stride = blocks_of(rows) * kBlock;                            // of the rows' sums
  const Quants& quants = p.w.quants;
  const int sets = S::kFine ? kBlock / quants.group : 1;
  const char* const weights =
      S::kFloats16 ? reinterpret_cast<const char*>(p.w.tiles) : reinterpret_cast<const char*>(quants.words);
  const char* const x =
      (S::kIntegers ? reinterpret_cast<const char*>(p.bytes.values) : reinterpret_cast<const char*>(p.x.tiles)) +
      ((size_t)(first_row / kBlock) * k.blocks * kBlock + first_row % kBlock) * S::kRowBytes;

  using Walk = typename S::Walk;
  Walk ahead{(int)blockIdx.x, warp, segments.group_blocks};
  ahead.begin_part(k);
  const auto fetch_weights = [&](const Walk& at, int stage) {
    if (at.tile >= tiles) return;
    const int row_block = at.tile * S::kCount / 4, first = at.tile * S::kCount % 4;
    const uint32_t to = ring_at + stage * kBytes + lane * 16;
    const char* from =
        weights + ((size_t)row_block * k.blocks + at.block) * S::kBlockBytes + first * S::kTileBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < S::kWeights; i += 512) copy_16(to + i, from + i);
    constexpr int kCopies = S::kSetBytes / 16;  // of a set of scales
    const auto set_at = [&](int group) {
      return reinterpret_cast<const char*>(quants.scales) +
             (((size_t)row_block * quants.groups + group) * kScaleWords + first * kTileRows) * 4;
    };
    if constexpr (S::kFine) {
      for (int i = lane; i < sets * kCopies; i += 32)
        if (const int group = at.block * sets + i / kCopies; group < quants.groups)
          copy_16(ring_at + stage * kBytes + S::kWeights + i * 16, set_at(group) + i % kCopies * 16);
    } else if constexpr (S::kSets > 0) {
      if (lane < kCopies) copy_16(to + S::kWeights, set_at(at.group) + lane * 16);
    }
  };
  const auto fetch_rows = [&](const Walk& at, int stage) {
    if (at.tile >= tiles) return;
    constexpr int kTogether = 512 / S::kRowBytes;  // rows that the warp copies by one instruction
    const uint32_t to = ring_at + stage * kBytes + S::kRowsAt + lane * 16;
    const char* from = x + (size_t)at.block * kBlock * S::kRowBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < S::kRows; i += kTogether)
      copy_16(to + i * S::kRowBytes, from + i * S::kRowBytes, i + lane * kTogether / 32 < there);
    if (S::kIntegers && lane < S::kRows / 4)
      copy_16(to + S::kRows * S::kRowBytes,
              reinterpret_cast<const char*>(p.bytes.sums + (size_t)at.block * stride + first_row) + lane * 16);
  };
  const auto fetch = [&](int stage) {
    fetch_weights(ahead, stage), fetch_rows(ahead, stage);
    commit_copies();
    ahead.next(k, warp, warps);
  };
  // Prefetches a warp's first stages: weights before the previous kernel has written the rows, then rows. Each stage's
  // rows and weights form one group of copies.
  let_next_begin();
  Walk early = ahead;
#pragma unroll 1  // here and below: code is fetched anew at each launch, which takes longer than a loop
  for (int i = 0; i < kStages - 1; i++, early.next(k, warp, warps)) fetch_weights(early, i);
  await_previous();
  // Of floats, what the epilogue adds to this thread's first sum.
  const Place own{first_row + (int)threadIdx.x / kColumns, (int)(blockIdx.x * kColumns + threadIdx.x % kColumns)};
  const bool is_own = S::kFloats16 && threadIdx.x < kSums && own.row < rows && own.column < p.w.n && !p.gated;
  const float bias = is_own && p.bias ? p.bias[own.column] : 0;
  const float before = is_own && p.adds ? p.y.values[(size_t)own.row * p.y.width + own.column] : 0;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; i++, ahead.next(k, warp, warps)) {
    fetch_rows(ahead, i);
    commit_copies();
  }

  int stage = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int round = 0; round * warps < k.count; round++) {
      const int k_part = round * warps + warp;
      if (k_part < k.count) {
        const int begin = k_part * k.length, blocks = min(k.length, k.blocks - begin);
        WarpSums<S> part(segments, begin);
        for (int b = 0; b < blocks; b++) {
          wait_copies<kStages - 2>();
          __syncwarp();
          fetch(stage == 0 ? kStages - 1 : stage - 1);  // refills the stage of the previous iteration
          part.add(ring + stage * kBytes, ring_at + stage * kBytes + S::kRowsAt, segments, begin + b,
                   p.w.k - (begin + b) * kBlock, sets);
          stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        put_part(part.sums, sums + warp * kSums);
      }
      __syncthreads();
      add_parts<kSums>(sums, totals, k, round, [&](int i, float total) {
        const Place at{first_row + i / kColumns, tile * kColumns + i % kColumns};
        if (S::kIntegers && at.row < rows) total = __fmul_rn(total, p.bytes.scales[at.row]);
        if (p.gated) return total;
        if (S::kFloats16 && i == threadIdx.x && tile == blockIdx.x) {
          if (p.bias) total = __fadd_rn(total, bias);
          if (p.adds) total = __fadd_rn(before, total);
          if (is_own) put<true>(p.y, own.row, own.column, total);
        } else {
          finish<1, S::kFloats16>(p, rows, p.w.n, &total, [&](int) { return at; });
        }
        return total;
      });
      __syncthreads();
      if (p.gated && (round + 1) * warps >= k.count) put_gated<kColumns, kSums>(p, rows, first_row, tile, totals);
    }
  }
}

// most_warps: limit of warps of a CTA.
template <typename S>
void start_gemm_mma(const GemmArgs& p, int rows, const Queue& queue, int most_warps = S::max_warps()) {
  const auto kernel = gemm_mma_kernel<S>;
  const SplitK k(p.w.k, p.w.max_split_k);
  const int rounds = ceil_div(k.count, most_warps), warps = ceil_div(k.count, rounds);
  const int tiles = ceil_div(p.w.n, S::kColumns), groups = ceil_div(rows, S::kRows);
  const size_t shared = S::shared(warps);
  allow_shared(kernel, shared);
  int merged = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&merged, kernel, 32 * warps, shared);
  const int most = std::max(1, sm_count() * std::max(merged, 1) / groups);
  // Every CTA takes the same number of turns, if there are several.
  const int turns = ceil_div(tiles, most);
  start(queue, kernel, dim3(ceil_div(tiles, turns), groups), 32 * warps, shared, p, rows, tiles, k, Segments(p.w, k));
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
