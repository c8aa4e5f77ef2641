// 16-bit GEMMs of many rows by mma.sync, on any chip. Persistent CTAs compute tiles of 128 columns (rows of the
// weights) and up to 256 rows of activations, one after the other. Copies to shared memory run ahead into the next
// tile, so that they overlap a tile's end.
//
// Eight warps have 64 columns and kTiles x 8 rows each: every value that a warp loads from shared memory is used in
// many products. Loads of a step's operands are issued among the products of the step before.
#include <algorithm>
#include <array>
#include <utility>

#include "cuda/kernels/common/exchange.cuh"
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"
#include "cuda/kernels/gemm/mma_prefill_plan.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 256, kAcross = 2, kDown = 4;  // warps of a CTA, by columns and by rows
constexpr int kColumnTiles = 4;                        // tiles of 16 columns of a warp
constexpr int kWarpColumns = kColumnTiles * kTileRows, kColumns = kAcross * kWarpColumns;
constexpr int kBlockChunks = kBlockBytes / 16;
constexpr int kWeights = kColumns * kRowBytes;  // bytes of a stage, which has 64 of K
constexpr int kBand = 8;  // tiles of rows that share a column of tiles before the next column, in the L2 cache

// kTiles: tiles of 8 rows of a warp, an even number. kWhole: K is one part. Otherwise sums of the parts take as many
// registers again.
template <int kTiles_, bool kWhole_, int kStages_>
struct Shape {
  static constexpr int kTiles = kTiles_, kStages = kStages_;
  static constexpr bool kWhole = kWhole_;
  static constexpr int kRows = kDown * kTiles * 8;
  static constexpr int kStageBytes = kWeights + kRows * kRowBytes, kShared = kStages * kStageBytes;
};

struct TileAt {
  int row, column;
};
template <typename S>
__device__ __forceinline__ TileAt tile_at(int tile, int down, int across) {
  const int first = tile / (kBand * across) * kBand, there = min(kBand, down - first), within = tile - first * across;
  return {(first + within % there) * S::kRows, within / there * kColumns};
}

// Stores gated values of a warp's 32 columns of the result. Eight of each tile are computed by lanes with two rows
// each.
template <typename S>
__device__ __forceinline__ void write_gated(const GemmArgs& p, int rows, int first_row, int first_column,
                                            const float (&sums)[kColumnTiles][S::kTiles][4]) {
  const int lane = threadIdx.x % 32, width = p.y.width, blocks = blocks_of(width);
  const int column = first_column + lane % 4 * 8;  // the first of those that this lane stores
#pragma unroll
  for (int t = 0; t < S::kTiles; t++) {
    uint32_t words[kColumnTiles];
#pragma unroll
    for (int m = 0; m < kColumnTiles; m++) {
      const int own = first_column + m * 8 + lane / 4;
      float values[2] = {};
      if (own < width)
#pragma unroll
        for (int j = 0; j < 2; j++) values[j] = gated(p, own, sums[m][t][j], sums[m][t][2 + j]);
      words[m] = transposed(to_dtype16x2(values[0], values[1]));
    }
    exchange(words);
    const int row = first_row + t * 8 + lane / 4;
    if (row < rows && column < width)  // columns from `width` on are padding, which is zero
      *reinterpret_cast<uint4*>(p.y.tiles + tile_offset(row, column, blocks)) =
          make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_mma_prefill_kernel(const __grid_constant__ GemmArgs p, int rows, int down, int across, SplitK k) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kTiles = S::kTiles, kStages = S::kStages;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, tiles = down * across;
  const int warp_column = warp % kAcross * kWarpColumns, warp_row = warp / kAcross * kTiles * 8;
  const uint32_t ring = shared_address(shared);

  // The next copies: a tile, a block of K, and where a thread's first chunks are, counted in chunks. Blocks beyond the
  // last ones are replaced by those: nothing that they give is stored.
  struct {
    int tile, block, weights_left, rows_left;  // blocks of the tile's columns and rows after the first
    unsigned weights, x;
  } ahead{(int)blockIdx.x, 0, 0, 0, 0, 0};
  const unsigned stride = k.blocks * kBlockChunks;  // from a row of blocks to the next
  const auto begin_tile = [&] {
    if (ahead.tile >= tiles) return;
    const TileAt at = tile_at<S>(ahead.tile, down, across);
    const int column = at.column / kBlock, row = at.row / kBlock;
    ahead.weights_left = blocks_of(p.w.n) - 1 - column, ahead.rows_left = blocks_of(rows) - 1 - row;
    ahead.weights = column * stride + thread, ahead.x = row * stride + thread;
  };
  const auto fetch = [&](int stage) {
    if (ahead.tile < tiles) {
      const uint32_t to = ring + stage * S::kStageBytes + thread * 16;
#pragma unroll
      for (int i = 0; i < kWeights / 16 / kThreads; i++)
        copy_16(to + i * kThreads * 16, reinterpret_cast<const uint4*>(p.w.tiles) + ahead.weights +
                                            min(i / 2, ahead.weights_left) * stride + i % 2 * kThreads);
#pragma unroll
      for (int i = 0; i < kTiles; i++)
        copy_16(to + kWeights + i * kThreads * 16, reinterpret_cast<const uint4*>(p.x.tiles) + ahead.x +
                                                       min(i / 2, ahead.rows_left) * stride + i % 2 * kThreads);
      ahead.weights += kBlockChunks, ahead.x += kBlockChunks;
      if (++ahead.block == k.blocks) ahead.block = 0, ahead.tile += gridDim.x, begin_tile();
    }
    commit_copies();
  };

  // A lane's offsets in a stage; bits 5 and 6 of a step are flipped.
  const uint32_t own_weights = chunk_offset(warp_column + lane % 16, lane / 16),
                 own_rows = kWeights + chunk_offset(warp_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  uint32_t a[kColumnTiles][4], y[2][kTiles / 2][4];
  const auto load_weights = [&](uint32_t stage, int step, int m) {
    load_cores(a[m], stage + (own_weights ^ step * 32) + m * kTileRows * kRowBytes);
  };
  const auto load_rows = [&](uint32_t stage, int step) {
#pragma unroll
    for (int t = 0; t < kTiles / 2; t++)
      load_cores(y[step % 2][t], stage + (own_rows ^ step * 32) + t * 16 * kRowBytes);
  };

  after_previous();
  begin_tile();
#pragma unroll
  for (int i = 0; i < kStages; i++) fetch(i);
  wait_copies<kStages - 1>();
  __syncthreads();
  int stage = 0;
  uint32_t at = ring;
  load_rows(at, 0);
#pragma unroll
  for (int m = 0; m < kColumnTiles; m++) load_weights(at, 0, m);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float d[kColumnTiles][kTiles][4], total[S::kWhole ? 1 : kColumnTiles][kTiles][4];
    if constexpr (!S::kWhole)
#pragma unroll
      for (int i = 0; i < kColumnTiles * kTiles * 4; i++)
        (&total[0][0][0])[i] = -0.0f;  // adding x to -0 gives x, even if x is -0
    for (int b = 0; b < k.blocks;) {
#pragma unroll
      for (int i = 0; i < kColumnTiles * kTiles * 4; i++) (&d[0][0][0])[i] = 0;
      const int end = S::kWhole ? k.blocks : min(b + k.length, k.blocks);
#pragma unroll 1
      for (; b < end; b++) {
#pragma unroll
        for (int step = 0; step < 4; step++) {
          if (step == 3) {  // all warps have loaded this stage's operands
            wait_copies<kStages - 2>();
            __syncthreads();
            at = stage + 1 == kStages ? ring : at + S::kStageBytes;
          }
          const int next = (step + 1) % 4;
          load_rows(at, next);
          if (step == 3) fetch(stage), stage = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
          for (int m = 0; m < kColumnTiles; m++) {
#pragma unroll
            for (int t = 0; t < kTiles; t++)
              multiply_add(d[m][t], a[m], y[step % 2][t / 2][t % 2 * 2], y[step % 2][t / 2][t % 2 * 2 + 1]);
            load_weights(at, next, m);
          }
        }
      }
      if constexpr (!S::kWhole)
#pragma unroll
        for (int i = 0; i < kColumnTiles * kTiles * 4; i++)
          (&total[0][0][0])[i] = __fadd_rn((&total[0][0][0])[i], (&d[0][0][0])[i]);
    }
    const TileAt here = tile_at<S>(tile, down, across);
    const int first_row = here.row + warp_row, first_column = here.column + warp_column;
    const auto end_with = [&](const float(&sums)[kColumnTiles][kTiles][4]) {
      if (p.gated) return write_gated<S>(p, rows, first_row, first_column / 2, sums);
      // Number i of a thread belongs to column lane / 4 + i % 4 / 2 * 8 of a tile.
#pragma unroll
      for (int m = 0; m < kColumnTiles; m++)
#pragma unroll
        for (int t = 0; t < kTiles; t += kTiles / 2)
          finish<kTiles * 2>(p, rows, p.w.n, sums[m][t], [&](int i) {
            return Place{first_row + (t + i / 4) * 8 + lane % 4 * 2 + i % 2,
                         first_column + m * kTileRows + lane / 4 + i % 4 / 2 * 8};
          });
    };
    if constexpr (S::kWhole) end_with(d);
    else end_with(total);
  }
}

using Start = void (*)(const GemmArgs&, int rows, const SplitK&, const Queue&);

template <typename S>
void start_shape(const GemmArgs& p, int rows, const SplitK& k, const Queue& queue) {
  const auto kernel = gemm_mma_prefill_kernel<S>;
  const int down = ceil_div(rows, S::kRows), across = ceil_div(p.w.n, kColumns);
  start(queue, kernel, std::min(down * across, sm_count()), kThreads, S::kShared, p, rows, down, across, k);
}
template <int... kNumbers>
constexpr std::array<Start, kMmaPrefillShapes> starts_of(std::integer_sequence<int, kNumbers...>) {
  return {start_shape<
      Shape<kMmaPrefill[kNumbers].rows / (kDown * 8), kMmaPrefill[kNumbers].whole, kMmaPrefill[kNumbers].stages>>...};
}
constexpr auto kStarts = starts_of(std::make_integer_sequence<int, kMmaPrefillShapes>());
static_assert(MmaPrefillShape::kColumns == kColumns);

}  // namespace

void gemm_mma_prefill(const GemmArgs& p, int rows, const Queue& queue, int wanted) {
  const MmaPrefillPlan plan(queue.costs ? *queue.costs : ChipCosts(), max_shared(), sm_count(), p.w, rows, p.gated,
                            wanted);
  if (plan.shape >= 0) kStarts[plan.shape](p, rows, SplitK(p.w.k, p.w.max_split_k), queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
