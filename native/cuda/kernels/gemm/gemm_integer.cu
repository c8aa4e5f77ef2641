// Integer GEMMs (gemm_integer.h) by mma.sync; gemm_quantized.cu is the bfloat16 counterpart.
#include "cuda/kernels/gemm/gemm_integer.h"
#include "cuda/kernels/gemm/gemm_wgmma.h"

#include <algorithm>

#include "cuda/kernels/gemm/warp_split_k.cuh"

namespace as::cuda {
namespace {

constexpr int kStageRows = kRowTile * kByteRow;
constexpr int kSharedBytes = 108 << 10;  // limit: two CTAs fit an SM of Hopper or the A100

// kTiles: tiles of 8 rows of activations; kColumnTiles: tiles of 16 columns (rows of the weights).
template <int kBits, int kTiles, int kColumnTiles>
struct Shape {
  static constexpr int kColumns = kTileRows * kColumnTiles, kRows = kRowTile * kTiles;
  static constexpr int kQuants = kColumnTiles * quant_bytes(kBits) / 4, kScales = kColumns * 4;
  static constexpr int kRowSums = kTiles * kRowTile * 4;
  static constexpr int kStages = kTiles == 1 ? (kBits == 4 ? 9 : 7) : kTiles == 2 ? 5 : kTiles == 4 ? 4 : 3;
  static constexpr int kStageBytes = kQuants + kScales + kTiles * kStageRows + kRowSums;
  static constexpr int kSums = kColumns * kRows;  // of a split-K part
  static constexpr size_t kWarpBytes = kSums * 4 + kStages * kStageBytes;

  static size_t shared(int warps) { return warps * kWarpBytes + kSums * 4; }
  static int max_warps() {
    return std::min<int>(kMaxWarps, (std::min(kSharedBytes, max_shared()) - kSums * 4) / kWarpBytes);
  }
};

template <int kBits, int kTiles, int kColumnTiles>
__global__ void __launch_bounds__(32 * kMaxWarps)
    gemm_kernel(const __grid_constant__ GemmArgs p, int rows, int tiles, SplitK k, Segments segments) {
  using S = Shape<kBits, kTiles, kColumnTiles>;
  extern __shared__ __align__(128) char shared[];
  constexpr int kStages = S::kStages, kBytes = S::kStageBytes, kSums = S::kSums, kColumns = S::kColumns;
  constexpr int kRowsAt = S::kQuants + S::kScales, kRowSumsAt = kRowsAt + kTiles * kStageRows;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* totals = reinterpret_cast<float*>(shared);  // of the previous rounds: [row][column]
  float* sums = totals + kSums;                      // of each warp's split-K part
  char* const ring = reinterpret_cast<char*>(sums + warps * kSums) + warp * kStages * kBytes;
  const uint32_t ring_at = shared_address(ring);
  const int first_row = blockIdx.y * kTiles * kRowTile, stride = blocks_of(rows) * kBlock;
  const Quants& quants = p.w.quants;
  const char* x = reinterpret_cast<const char*>(p.bytes.values) + (size_t)(first_row / kBlock) * k.blocks * kByteBlock +
                  first_row % kBlock * kByteRow;

  GroupWalk ahead{(int)blockIdx.x, warp, segments.group_blocks};
  ahead.begin_part(k);
  const auto fetch_weights = [&](const GroupWalk& at, int stage) {
    if (at.tile >= tiles) return;
    const int row_block = at.tile * kColumnTiles / 4, first = at.tile * kColumnTiles % 4;
    const uint32_t to = ring_at + stage * kBytes + lane * 16;
    const char* from = reinterpret_cast<const char*>(quants.words) +
                       ((size_t)row_block * k.blocks + at.block) * quant_bytes(kBits) +
                       first * (quant_bytes(kBits) / 4) + lane * 16;
#pragma unroll
    for (int i = 0; i < S::kQuants / 512; i++) copy_16(to + i * 512, from + i * 512);
    if (lane < S::kScales / 16)
      copy_16(to + S::kQuants,
              reinterpret_cast<const char*>(quants.scales) +
                  (((size_t)row_block * quants.groups + at.group) * kScaleWords + first * kTileRows) * 4 + lane * 16);
  };
  const auto fetch_rows = [&](const GroupWalk& at, int stage) {
    if (at.tile >= tiles) return;
    const uint32_t to = ring_at + stage * kBytes + kRowsAt + lane * 16;
    const char* from = x + (size_t)at.block * kByteBlock + lane * 16;
#pragma unroll
    for (int i = 0; i < kTiles * kStageRows / 512; i++)
      copy_16(to + i * 512, from + i * 512, first_row + i * 8 + lane / 4 < rows);
    if (lane < S::kRowSums / 16)
      copy_16(to + kTiles * kStageRows,
              reinterpret_cast<const char*>(p.bytes.sums + (size_t)at.block * stride + first_row) + lane * 16);
  };
  const auto fetch = [&](int stage) {
    fetch_weights(ahead, stage), fetch_rows(ahead, stage);
    commit_copies();
    ahead.next(k, warp, warps);
  };
  fetch_first_weights<kStages>(ahead, k, warp, warps, fetch_weights);
  fetch_first_rows<kStages>(ahead, k, warp, warps, fetch_rows);

  int stage = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int round = 0; round * warps < k.count; round++) {
      const int k_part = round * warps + warp;
      if (k_part < k.count) {
        int d[kColumnTiles][kTiles][4] = {};
        float total[kColumnTiles][kTiles][4] = {};
        const int begin = k_part * k.length, blocks = min(k.length, k.blocks - begin);
        int end = segments.end(begin);
        for (int b = 0; b < blocks; b++) {
          wait_copies<kStages - 2>();
          __syncwarp();
          fetch(stage == 0 ? kStages - 1 : stage - 1);  // refills the stage of the previous iteration
          const char* at = ring + stage * kBytes;
          uint32_t y[kTiles][4];
#pragma unroll
          for (int t = 0; t < kTiles; t++)
            load_cores(y[t], ring_at + stage * kBytes + kRowsAt + t * kStageRows + byte_chunk(lane % 8, lane / 8));
#pragma unroll
          for (int m = 0; m < kColumnTiles; m++) {
            uint32_t a[2][4];
            load_integers<kBits>(at + m * (quant_bytes(kBits) / 4), a);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
              for (int t = 0; t < kTiles; t++) multiply_add(d[m][t], a[half], y[t][half * 2], y[t][half * 2 + 1]);
          }
          if (begin + b == end) {
            end = segments.end(end + 1);
#pragma unroll
            for (int m = 0; m < kColumnTiles; m++) {
              const uint2 two = reinterpret_cast<const uint2*>(at + S::kQuants)[m * 8 + lane / 4];
              const uint32_t scales[2] = {two.x, two.y};
#pragma unroll
              for (int t = 0; t < kTiles; t++) {
                const float2 of_rows = reinterpret_cast<const float2*>(at + kRowSumsAt)[t * 4 + lane % 4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                  add_segment(total[m][t][i], scales[i / 2], d[m][t][i], i % 2 ? of_rows.y : of_rows.x);
                  d[m][t][i] = 0;
                }
              }
            }
          }
          stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        put_part(total, sums + warp * kSums);
      }
      __syncthreads();
      add_parts<kSums>(sums, totals, k, round, [&](int i, float total) {
        const Place at{first_row + i / kColumns, tile * kColumns + i % kColumns};
        if (at.row < rows) total = __fmul_rn(total, p.bytes.scales[at.row]);
        if (!p.gated) finish<1>(p, rows, p.w.n, &total, [&](int) { return at; });
        return total;
      });
      __syncthreads();
      if (p.gated && (round + 1) * warps >= k.count) put_gated<kColumns, kSums>(p, rows, first_row, tile, totals);
    }
  }
}

template <int kBits, int kTiles, int kColumnTiles>
void start_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  using S = Shape<kBits, kTiles, kColumnTiles>;
  const auto kernel = gemm_kernel<kBits, kTiles, kColumnTiles>;
  const SplitK k(p.w.k, p.w.max_split_k);
  const SplitKGrid grid = grid_of<S>(kernel, p.w, k, rows, S::max_warps());
  start(queue, kernel, grid.blocks, 32 * grid.warps, grid.shared, p, rows, grid.tiles, k, Segments(p.w, k));
  launched("gemm_integer");
}

template <int kBits>
void start_rows(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 2 && p.w.n < kManyColumns) start_tiles<kBits, 1, 1>(p, rows, queue);
  else if (rows <= 8) start_tiles<kBits, 1, 2>(p, rows, queue);
  else if (rows <= 16) start_tiles<kBits, 2, 2>(p, rows, queue);
  else if (rows <= 32) start_tiles<kBits, 4, 2>(p, rows, queue);
  else start_tiles<kBits, 8, 2>(p, rows, queue);
}

}  // namespace

void gemm_integer(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::small_m) gemm_few_rows_8bit(p, rows, queue);
  else if (algo == GemmAlgo::prefill) gemm_integer_prefill(p, rows, queue);
  else if (algo == GemmAlgo::stream_k) gemm_integer_stream_k(p, rows, queue);
  else if (p.w.quants.bits == 4) start_rows<4>(p, rows, queue);
  else start_rows<8>(p, rows, queue);
}

}  // namespace as::cuda
