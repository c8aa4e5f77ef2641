// GEMMs of quantized weights with bfloat16 activations. Kernels round weights to bfloat16 when they use them. The sums
// are those of gemm_dtype16() with the rounded matrix, bit for bit, so any kernel may serve. Few rows: kernels
// dequantize weights in registers, here by mma.sync as in gemm_dtype16.cu. Many rows: the matrix is dequantized into
// tiles for gemm_dtype16(), some of its rows at a time.
#include "cuda/kernels/by_dtype16.h"
#include "cuda/kernels/gemm/gemm_quantized.h"
#include "cuda/kernels/gemm/gemv_plan.h"

#include <algorithm>

#include "cuda/kernels/gemm/warp_split_k.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace {

constexpr int kStageRows = kRowTile * kBlock * 2;
constexpr int kSharedBytes = 108 << 10;  // limit: two CTAs fit an SM of Hopper or the A100

// kTiles: tiles of 8 rows of activations; kColumnTiles: tiles of 16 columns (rows of the weights). kFine: scales change
// within a block of K.
template <int kBits, int kTiles, int kColumnTiles, bool kFine>
struct Shape {
  static constexpr int kColumns = kTileRows * kColumnTiles, kRows = kRowTile * kTiles;
  static constexpr int kQuants = kColumnTiles * quant_bytes(kBits) / 4;
  static constexpr int kSets = kFine ? 4 : 1, kSetBytes = kColumns * 4;
  static constexpr int kStages = kTiles == 1 ? (kBits == 4 ? 9 : 7) : kTiles == 2 ? (kBits == 4 ? 5 : 4) : 3;
  static constexpr int kStageBytes = kQuants + kSets * kSetBytes + kTiles * kStageRows;
  static constexpr int kSums = kColumns * kRows;  // of a split-K part
  static constexpr size_t kWarpBytes = kSums * 4 + kStages * kStageBytes;

  static size_t shared(int warps) { return warps * kWarpBytes + kSums * 4; }
  static int max_warps() {
    return std::min<int>(kMaxWarps, (std::min(kSharedBytes, max_shared()) - kSums * 4) / kWarpBytes);
  }
};

template <int kBits, int kTiles, int kColumnTiles, bool kFine>
__global__ void __launch_bounds__(32 * kMaxWarps)
    gemm_kernel(const __grid_constant__ GemmArgs p, int rows, int tiles, SplitK k) {
  using S = Shape<kBits, kTiles, kColumnTiles, kFine>;
  extern __shared__ __align__(128) char shared[];
  constexpr int kStages = S::kStages, kBytes = S::kStageBytes, kSums = S::kSums, kColumns = S::kColumns;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* totals = reinterpret_cast<float*>(shared);  // of the previous rounds: [row][column]
  float* sums = totals + kSums;                      // of each warp's split-K part
  char* const ring = reinterpret_cast<char*>(sums + warps * kSums) + warp * kStages * kBytes;
  const uint32_t ring_at = shared_address(ring);
  const int first_row = blockIdx.y * kTiles * kRowTile;
  const Quants& quants = p.w.quants;
  const int sets = kFine ? kBlock / quants.group : 1;
  const char* x = reinterpret_cast<const char*>(p.x.tiles) + (size_t)(first_row / kBlock) * k.blocks * kBlockBytes +
                  first_row % kBlock / kRowTile * kStageRows;

  GroupWalk ahead{(int)blockIdx.x, warp, quants.groups > 1 ? max(quants.group / kBlock, 1) : k.blocks};
  ahead.begin_part(k);
  const auto fetch_weights = [&](const GroupWalk& at, int stage) {
    if (at.tile >= tiles) return;
    const int row_block = at.tile * kColumnTiles / 4, first = at.tile * kColumnTiles % 4;
    uint32_t to = ring_at + stage * kBytes + lane * 16;
    const char* from = reinterpret_cast<const char*>(quants.words) +
                       ((size_t)row_block * k.blocks + at.block) * quant_bytes(kBits) +
                       first * (quant_bytes(kBits) / 4) + lane * 16;
#pragma unroll
    for (int i = 0; i < S::kQuants / 512; i++) copy_16(to + i * 512, from + i * 512);
    constexpr int kCopies = S::kSetBytes / 16;  // of a set of scales
    const int group = kFine ? at.block * sets : at.group;
    for (int i = lane; i < sets * kCopies; i += 32)
      if (const int set = i / kCopies; group + set < quants.groups)
        copy_16(ring_at + stage * kBytes + S::kQuants + i * 16,
                reinterpret_cast<const char*>(quants.scales) +
                    (((size_t)row_block * quants.groups + group + set) * kScaleWords + first * kTileRows) * 4 +
                    i % kCopies * 16);
  };
  const auto fetch_rows = [&](const GroupWalk& at, int stage) {
    if (at.tile >= tiles) return;
    const uint32_t to = ring_at + stage * kBytes + S::kQuants + S::kSets * S::kSetBytes;
    const char* from = x + (size_t)at.block * kBlockBytes;
#pragma unroll
    for (int i = 0; i < kTiles * kStageRows / 512; i++)
      copy_16(to + i * 512 + lane * 16, from + i * 512 + lane * 16, first_row + i * 4 + lane / 8 < rows);
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
        float d[kColumnTiles][kTiles][4] = {};
        const int begin = k_part * k.length, blocks = min(k.length, k.blocks - begin);
        for (int b = 0; b < blocks; b++) {
          wait_copies<kStages - 2>();
          __syncwarp();
          fetch(stage == 0 ? kStages - 1 : stage - 1);  // refills the stage of the previous iteration
          const char* at = ring + stage * kBytes;
          const uint32_t x_at = ring_at + stage * kBytes + S::kQuants + S::kSets * S::kSetBytes;
          const int there = p.w.k - (begin + b) * kBlock;  // columns of the weights that are left
          LaneQuants<kBits> own[kColumnTiles];
          Affine scales[kColumnTiles][2];
#pragma unroll
          for (int m = 0; m < kColumnTiles; m++)
#pragma unroll
            for (int i = 0; i < LaneQuants<kBits>::kLoads; i++)
              own[m].loaded[i] = reinterpret_cast<const uint4*>(at)[(m * LaneQuants<kBits>::kLoads + i) * 32 + lane];
          uint32_t y[kTiles][4];
#pragma unroll
          for (int step = 0; step < 4; step++) {
#pragma unroll
            for (int t = 0; t < kTiles; t++)
              if (step % 2 == 0) load_cores(y[t], x_at + t * kStageRows + chunk_offset(lane % 8, 2 * step + lane / 8));
#pragma unroll
            for (int m = 0; m < kColumnTiles; m++) {
              if (kFine || step == 0) {
                const int set = kFine ? step * sets / 4 : 0;
                const uint2 two =
                    reinterpret_cast<const uint2*>(at + S::kQuants + set * S::kSetBytes)[m * 8 + lane / 4];
                scales[m][0].set(two.x), scales[m][1].set(two.y);
              }
              uint32_t a[4];
              own[m].fragment(step, scales[m], a);
              if (there < kBlock) cut_fragment(a, there - step * 16);
#pragma unroll
              for (int t = 0; t < kTiles; t++) multiply_add(d[m][t], a, y[t][step % 2 * 2], y[t][step % 2 * 2 + 1]);
            }
          }
          stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        put_part(d, sums + warp * kSums);
      }
      __syncthreads();
      add_parts<kSums>(sums, totals, k, round, [&](int i, float total) {
        const Place at{first_row + i / kColumns, tile * kColumns + i % kColumns};
        if (!p.gated) finish<1>(p, rows, p.w.n, &total, [&](int) { return at; });
        return total;
      });
      __syncthreads();
      if (p.gated && (round + 1) * warps >= k.count) put_gated<kColumns, kSums>(p, rows, first_row, tile, totals);
    }
  }
}

template <int kBits, int kTiles, int kColumnTiles, bool kFine>
void start_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  using S = Shape<kBits, kTiles, kColumnTiles, kFine>;
  const auto kernel = gemm_kernel<kBits, kTiles, kColumnTiles, kFine>;
  const SplitK k(p.w.k, p.w.max_split_k);
  const SplitKGrid grid = grid_of<S>(kernel, p.w, k, rows, S::max_warps());
  start(queue, kernel, grid.blocks, 32 * grid.warps, grid.shared, p, rows, grid.tiles, k);
  launched("gemm_quantized");
}

template <int kBits, bool kFine>
void start_rows(const GemmArgs& p, int rows, const Queue& queue) {
  // Few columns: tiles are small, so that all SMs have some.
  if (rows <= 2 && p.w.n < kManyColumns) start_tiles<kBits, 1, 1, kFine>(p, rows, queue);
  else if (rows <= 8) start_tiles<kBits, 1, 2, kFine>(p, rows, queue);
  else if (rows <= 16) start_tiles<kBits, 2, 2, kFine>(p, rows, queue);
  else if (rows <= 32) start_tiles<kBits, 4, 2, kFine>(p, rows, queue);
  else start_tiles<kBits, 8, 2, kFine>(p, rows, queue);
}

// A warp dequantizes 16 rows of one block of columns. It goes through shared memory to write whole cache lines.
template <int kBits>
__global__ void __launch_bounds__(128) widen_kernel(Quants quants, int k, int first_block, uint16_t* to) {
  after_previous();
  __shared__ __align__(16) char shared[4][kTileRows * kRowBytes];
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32, blocks = blocks_of(k);
  const int row_block = first_block + blockIdx.y, block = blockIdx.x, there = k - block * kBlock;
  LaneQuants<kBits> own;
#pragma unroll
  for (int i = 0; i < LaneQuants<kBits>::kLoads; i++)
    own.loaded[i] = reinterpret_cast<const uint4*>(
        quants.words +
        ((size_t)row_block * blocks + block) * quant_words(kBits))[(tile * LaneQuants<kBits>::kLoads + i) * 32 + lane];
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const int group = min(block * kBlock + step * 16, k - 1) / quants.group;
    const uint32_t* scales =
        quants.scales + ((size_t)row_block * quants.groups + group) * kScaleWords + tile * kTileRows + lane / 4 * 2;
    Affine rows[2];
    rows[0].set(scales[0]), rows[1].set(scales[1]);
    uint32_t a[4];
    own.fragment(step, rows, a);
    if (there < kBlock) cut_fragment(a, there - step * 16);
#pragma unroll
    for (int i = 0; i < 4; i++)
      *reinterpret_cast<uint32_t*>(shared[tile] + chunk_offset(lane / 4 + i % 2 * 8, step * 2 + i / 2) + lane % 4 * 4) =
          a[i];
  }
  __syncwarp();
  uint4* out =
      reinterpret_cast<uint4*>(to + ((size_t)blockIdx.y * blocks + block) * kBlockValues + tile * kTileRows * kBlock);
#pragma unroll
  for (int i = 0; i < kTileRows * kRowBytes / 512; i++)
    out[i * 32 + lane] = reinterpret_cast<const uint4*>(shared[tile])[i * 32 + lane];
}

void widen(const Matrix& w, int first_block, int row_blocks, uint16_t* to, const Queue& queue) {
  const auto kernel = w.quants.bits == 4 ? widen_kernel<4> : widen_kernel<8>;
  start(queue, kernel, dim3(blocks_of(w.k), row_blocks), 128, 0, w.quants, w.k, first_block, to);
  launched("dequantizing weights");
}

constexpr int kTogether = 4;                 // blocks of rows; a part of a matrix has whole tiles of gemm_prefill()
constexpr size_t kWidenedBytes = 256 << 20;  // approximate size of a part

// Rows of a part of a matrix. A gated product needs all rows in one call.
int part_rows(int n, int k, bool gated) {
  const size_t row_bytes = (size_t)blocks_of(k) * kRowBytes;
  if (gated || row_bytes * n <= kWidenedBytes) return n;
  return std::max<int>(1, (int)(kWidenedBytes / row_bytes / (kTogether * kBlock))) * kTogether * kBlock;
}

void gemm_widened(const GemmArgs& p, int rows, const Queue& queue) {
  const int part = part_rows(p.w.n, p.w.k, p.gated);
  Queue no_pdl = queue;
  no_pdl.no_pdl = true;
  for (int first = 0; first < p.w.n; first += part) {
    const int n = std::min(part, p.w.n - first);
    GemmArgs some = p;
    widen(p.w, first / kBlock, blocks_of(n), p.widened, queue);
    some.w = {n, p.w.k, Kind::dtype16, DType16::bf16, nullptr, p.widened};
    some.w.max_split_k = p.w.max_split_k;
    if (first) {  // a multiple of a block of columns
      if (p.y.values) some.y.values += first;
      if (p.y.tiles) some.y.tiles += (size_t)first / kBlock * kBlockValues;
      if (p.bias) some.bias += first;
    }
    bf16::gemm_dtype16(some, rows, no_pdl, queue.capability == 90 ? GemmAlgo::prefill : GemmAlgo::mma_prefill);
  }
}

}  // namespace

void widen_quantized(const Matrix& w, uint16_t* to, const Queue& queue) { widen(w, 0, blocks_of(w.n), to, queue); }

size_t widened_bytes(int n, int k, bool gated, int rows) {
  return rows > kLeastWidened ? tiles_bytes(part_rows(n, k, gated), k) : 0;
}

void gemm_quantized_mma(const GemmArgs& p, int rows, const Queue& queue) {
  const bool fine = p.w.quants.groups > 1 && p.w.quants.group < kBlock;
  if (p.w.quants.bits == 4) fine ? start_rows<4, true>(p, rows, queue) : start_rows<4, false>(p, rows, queue);
  else fine ? start_rows<8, true>(p, rows, queue) : start_rows<8, false>(p, rows, queue);
}

void gemm_quantized(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::gemv) gemv_quantized(p, queue);
  else if (algo == GemmAlgo::prefill) gemm_widened(p, rows, queue);
  else if (algo == GemmAlgo::stream_k) gemm_quantized_stream_k(p, rows, queue);
  else gemm_quantized_mma(p, rows, queue);
}

}  // namespace as::cuda
