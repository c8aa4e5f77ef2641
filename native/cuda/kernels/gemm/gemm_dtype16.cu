// 16-bit GEMMs by mma.sync: for few rows, and on chips without wgmma for any number of rows. GEMMs of few rows are
// bound by the bandwidth of the weights.
//
// A CTA computes 16 columns and up to 64 rows of activations. Each warp copies its part of both operands to shared
// memory, several stages ahead; other warps do not read it.
#include <algorithm>

#include "cuda/kernels/gemm/gemm_wgmma.h"
#include "cuda/kernels/gemm/warp_split_k.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kStageWeights = kTileRows * kBlock * 2;  // bytes of a stage, which has 64 of K
constexpr int kStageRows = kRowTile * kBlock * 2;
constexpr int kSharedBytes = 112 << 10;  // limit: two CTAs fit an SM of Hopper or the A100

// kTiles: tiles of 8 rows. kDeep: number of stages where few CTAs each prefetch much; 0: the default.
template <int kTiles, int kDeep = 0>
struct Shape {
  static constexpr int kStages = kDeep ? kDeep : kTiles <= 1 ? 5 : kTiles <= 2 ? 4 : kTiles <= 4 ? 3 : 2;
  static constexpr int kStageBytes = kStageWeights + kTiles * kStageRows;
  static constexpr int kColumns = kTileRows, kRows = kRowTile * kTiles, kSums = kColumns * kRows;  // kSums: of a part
  static constexpr size_t kWarpBytes = kSums * 4 + kStages * kStageBytes;

  static size_t shared(int warps) { return warps * kWarpBytes + kSums * 4; }
  static int max_warps() {
    return std::min<int>(kMaxWarps, (std::min(kSharedBytes, max_shared()) - kSums * 4) / kWarpBytes);
  }
};

// Walks over the blocks of K that a warp computes, for all tiles of columns of its CTA.
struct Walk {
  int tile, k_part, block, end;  // tile of 16 columns; split-K part; block of K; end of the split-K part

  __device__ void begin_part(const SplitK& k) { block = k_part * k.length, end = min(block + k.length, k.blocks); }
  __device__ void next(const SplitK& k, int warp, int warps) {
    if (++block < end) return;
    if ((k_part += warps) >= k.count) k_part = warp, tile += gridDim.x;
    begin_part(k);
  }
};

template <typename S, int kTiles>
__global__ void __launch_bounds__(32 * kMaxWarps) gemm_kernel(GemmArgs p, int rows, int tiles, SplitK k) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kStages = S::kStages, kBytes = S::kStageBytes, kSums = S::kSums, kColumns = S::kColumns;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* totals = reinterpret_cast<float*>(shared);  // of the previous rounds: [row][column]
  float* sums = totals + kSums;                      // of each warp's split-K part
  const uint32_t ring = shared_address(sums + warps * kSums) + warp * kStages * kBytes;
  const int first_row = blockIdx.y * kTiles * kRowTile, there = rows - first_row;  // sums of further rows are not used
  const char* weights = reinterpret_cast<const char*>(p.w.tiles);
  const char* x = reinterpret_cast<const char*>(p.x.tiles) + (size_t)(first_row / kBlock) * k.blocks * kBlockBytes +
                  first_row % kBlock / kRowTile * kStageRows;

  Walk ahead{(int)blockIdx.x, warp, 0, 0};
  ahead.begin_part(k);
  const auto fetch_weights = [&](const Walk& at, int stage) {
    if (at.tile >= tiles) return;
    const uint32_t to = ring + stage * kBytes;
    const char* from =
        weights + ((size_t)(at.tile / 4) * k.blocks + at.block) * kBlockBytes + at.tile % 4 * kStageWeights;
#pragma unroll
    for (int i = 0; i < kStageWeights / 512; i++) copy_16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
  };
  const auto fetch_rows = [&](const Walk& at, int stage) {
    if (at.tile >= tiles) return;
    const uint32_t to = ring + stage * kBytes + kStageWeights;
    const char* from = x + (size_t)at.block * kBlockBytes;
#pragma unroll
    for (int i = 0; i < kTiles * kStageRows / 512; i++)
      if (i * 4 + lane / 8 < there) copy_16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
  };
  const auto fetch = [&](int stage) {
    fetch_weights(ahead, stage), fetch_rows(ahead, stage);
    commit_copies();
    ahead.next(k, warp, warps);
  };
  fetch_first_weights<kStages>(ahead, k, warp, warps, fetch_weights);
  // Prefetches what the epilogue adds to this thread's first sum.
  const Place own{first_row + (int)threadIdx.x / kColumns, (int)(blockIdx.x * kColumns + threadIdx.x % kColumns)};
  const bool is_own = threadIdx.x < kSums && own.row < rows && own.column < p.w.n && !p.gated;
  const float bias = is_own && p.bias ? p.bias[own.column] : 0;
  const float before = is_own && p.adds ? p.y.values[(size_t)own.row * p.y.width + own.column] : 0;
  fetch_first_rows<kStages>(ahead, k, warp, warps, fetch_rows);

  int stage = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int round = 0; round * warps < k.count; round++) {
      const int k_part = round * warps + warp;
      if (k_part < k.count) {
        float d[1][kTiles][4] = {};
        const int blocks = min(k.length, k.blocks - k_part * k.length);
        for (int b = 0; b < blocks; b++) {
          wait_copies<kStages - 2>();
          __syncwarp();
          fetch(stage == 0 ? kStages - 1 : stage - 1);  // refills the stage of the previous iteration
          const uint32_t at = ring + stage * kBytes;
          uint32_t y[kTiles][4];
#pragma unroll
          for (int step = 0; step < 4; step++) {
            uint32_t a[4];
            load_cores(a, at + chunk_offset(lane % 16, 2 * step + lane / 16));
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
              if (step % 2 == 0)
                load_cores(y[t], at + kStageWeights + t * kStageRows + chunk_offset(lane % 8, 2 * step + lane / 8));
              multiply_add(d[0][t], a, y[t][step % 2 * 2], y[t][step % 2 * 2 + 1]);
            }
          }
          stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        put_part(d, sums + warp * kSums);
      }
      __syncthreads();
      add_parts<kSums>(sums, totals, k, round, [&](int i, float total) {
        if (p.gated) return total;
        if (i == threadIdx.x && tile == blockIdx.x) {
          if (p.bias) total = __fadd_rn(total, bias);
          if (p.adds) total = __fadd_rn(before, total);
          if (is_own) put<true>(p.y, own.row, own.column, total);
        } else {
          const Place at{first_row + i / kColumns, tile * kColumns + i % kColumns};
          finish<1, true>(p, rows, p.w.n, &total, [&](int) { return at; });
        }
        return total;
      });
      __syncthreads();
      if (p.gated && (round + 1) * warps >= k.count) put_gated<kColumns, kSums>(p, rows, first_row, tile, totals);
    }
  }
}

template <int kTiles, int kDeep = 0>
void start_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  using S = Shape<kTiles, kDeep>;
  const auto kernel = gemm_kernel<S, kTiles>;
  const SplitK k(p.w.k, p.w.max_split_k);
  const SplitKGrid grid = grid_of<S>(kernel, p.w, k, rows, kDeep ? kMaxSplitK : S::max_warps());
  start(queue, kernel, grid.blocks, 32 * grid.warps, grid.shared, p, rows, grid.tiles, k);
  launched("gemm_dtype16");
}

// Up to eight rows. If no SM has more than two CTAs, a deeper pipeline prefetches more weights before the rows are
// ready.
void start_few(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr int kDeep = 8;
  const bool few = ceil_div(p.w.n, kTileRows) <= 2 * sm_count();
  if (queue.capability == 90 && few && SplitK(p.w.k, p.w.max_split_k).length >= kDeep)
    return start_tiles<1, kDeep>(p, rows, queue);
  start_tiles<1>(p, rows, queue);
}

}  // namespace

void gemm_dtype16(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::gemv) return gemv(p, queue);
  if (algo == GemmAlgo::split_k) return gemm_split_k(p, rows, queue);
  if (algo == GemmAlgo::stream_k) return gemm_stream_k(p, rows, queue);
  if (algo == GemmAlgo::prefill) return gemm_prefill(p, rows, queue);
  if (algo == GemmAlgo::mma_prefill) return gemm_mma_prefill(p, rows, queue);
  if (rows <= 8) start_few(p, rows, queue);
  else if (rows <= 16) start_tiles<2>(p, rows, queue);
  else if (rows <= 32) start_tiles<4>(p, rows, queue);
  else start_tiles<8>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
