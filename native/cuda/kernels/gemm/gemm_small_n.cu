// float32 GEMMs with few columns: logits of experts, gates of rows.
#include "cuda/kernels/gemm/gemm_small_n.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace {

constexpr int kWarps = 8;

// A warp computes kRows rows and kColumns columns of the result at a time. The CTA loads the weights of its columns
// into shared memory before the previous kernel has computed the rows.
template <int kRows, int kColumns, bool kWhole>
__global__ void __launch_bounds__(32 * kWarps) gemm_small_n_kernel(GemmArgs p, int rows) {
  extern __shared__ __align__(16) float weights[];
  const int first = blockIdx.x * kColumns, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_begin();
  bring_rows<kWhole>(p.w, first, kColumns, weights);
  await_previous();
  __syncthreads();
  for (int row = (blockIdx.y * kWarps + warp) * kRows; row < rows; row += gridDim.y * kWarps * kRows) {
    float sums[kRows][kColumns];
    multiply_rows<kRows, kColumns, kWhole>(p.x.values + (size_t)row * p.w.k, min(kRows, rows - row), weights, p.w.k,
                                           sums);
    if (lane) continue;
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        if (row + r < rows && first + c < p.w.n)
          p.y.values[(size_t)(row + r) * p.y.width + first + c] =
              p.bias ? __fadd_rn(sums[r][c], p.bias[first + c]) : sums[r][c];
  }
}

// Many rows: kTile rows and as many columns for each CTA, of which each warp computes 16 rows and 8 columns. Tiles are
// as large as registers allow, which hold 32 sums of each value, one for each lane: so rows and weights are read less
// often.
constexpr int kTile = 32, kTileRows = 16, kTileColumns = 8, kSums = kTileRows * kTileColumns, kTileWarps = 8;
constexpr int kStages = 3, kStage = 2 * kTile * kWarpColumns;  // of 128 columns; floats
static_assert(kTileWarps * kSums == kTile * kTile);

__global__ void __launch_bounds__(32 * kTileWarps, 1) gemm_small_n_tiles_kernel(GemmArgs p, int rows) {
  extern __shared__ __align__(16) float memory[];
  constexpr int kRowWarps = kTile / kTileRows;
  const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile, k = p.w.k,
            steps = padded_columns(k) / kWarpColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp % kRowWarps * kTileRows,
            column = warp / kRowWarps * kTileColumns;
  after_previous();
  // Rows and columns that do not exist are copies of the last ones. A warp copies one row at a time.
  const auto fetch = [&](int step) {
    const int at = step * kWarpColumns + lane * kLaneColumns;
    const uint32_t to = shared_address(memory) + (step % kStages * kStage + threadIdx.x * kLaneColumns) * sizeof(float);
    const bool there = at < k;
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < 2 * kTile; i += kTileWarps) {
        const int own = i % kTile + warp;
        const float* from = i < kTile ? p.x.values + (size_t)min(row0 + own, rows - 1) * k
                                      : p.w.values + (size_t)min(column0 + own, p.w.n - 1) * k;
        copy_16(to + i * kWarpColumns * sizeof(float), from + (there ? at : 0), there);
      }
    }
    commit_copies();
  };
  float sums[kSums] = {};
  for (int step = 0; step < kStages - 1; step++) fetch(step);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    wait_copies<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);
    const float* x = memory + step % kStages * kStage + first * kWarpColumns + lane * kLaneColumns;
    const float* w = memory + step % kStages * kStage + (kTile + column) * kWarpColumns + lane * kLaneColumns;
    float4 columns[kTileColumns];
#pragma unroll
    for (int c = 0; c < kTileColumns; c++) columns[c] = *reinterpret_cast<const float4*>(w + c * kWarpColumns);
#pragma unroll
    for (int r = 0; r < kTileRows; r++) {
      const float4 row = *reinterpret_cast<const float4*>(x + r * kWarpColumns);
#pragma unroll
      for (int c = 0; c < kTileColumns; c++)
        sums[r * kTileColumns + c] = multiply_add(row, columns[c], sums[r * kTileColumns + c]);
    }
  }
  // The order of warp_sum(), but at each step a lane keeps half of the values: at last four, whose number begins with
  // the lane's bits, from the lowest on.
#pragma unroll
  for (int bit = 0; bit < 5; bit++) {
    const int step = 1 << bit, count = kSums / 2 >> bit;
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < kSums / 2; i++) {
      if (i >= count) break;
      const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + count], step);
      sums[i] = (upper ? sums[i + count] : sums[i]) + other;
    }
  }
  const int number = __brev(lane) >> 27 << 2, row = row0 + first + number / kTileColumns;
  if (row >= rows) return;
#pragma unroll
  for (int i = 0; i < kSums / 32; i++)
    if (const int c = column0 + column + number % kTileColumns + i; c < p.w.n)
      p.y.values[(size_t)row * p.y.width + c] = p.bias ? __fadd_rn(sums[i], p.bias[c]) : sums[i];
}

template <int kRows, int kColumns>
void start_few(const GemmArgs& p, int rows, const Queue& queue) {
  const auto kernel =
      p.w.k % kLaneColumns ? gemm_small_n_kernel<kRows, kColumns, false> : gemm_small_n_kernel<kRows, kColumns, true>;
  const size_t shared = (size_t)kColumns * padded_columns(p.w.k) * sizeof(float);
  const int columns = ceil_div(p.w.n, kColumns), groups = ceil_div(rows, kWarps * kRows);
  // Each CTA reads the weights again, so there are no more CTAs than run at once.
  const int most = 2 * sm_count() / columns;
  start(queue, kernel, dim3(columns, most < 1 ? 1 : groups < most ? groups : most), 32 * kWarps, shared, p, rows);
}

}  // namespace

bool has_small_n(const Matrix& m) {
  constexpr size_t kMaxShared = 96 << 10;  // of the four columns of a CTA
  return m.kind == Kind::f32 && m.n <= kMaxExperts && 4 * sizeof(float) * padded_columns(m.k) <= kMaxShared;
}

void gemm_small_n(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr int kManyRows = 256, kManyColumns = kTile / 2, kFewTiles = 32, kFewValues = 2048, kSomeValues = 32768;
  const int tiles = ceil_div(p.w.n, kTile) * ceil_div(rows, kTile);
  if (rows <= 4 * kWarps || (p.w.n >= kManyColumns && rows * p.w.n <= kFewValues)) start_few<1, 1>(p, rows, queue);
  else if (p.w.n >= kManyColumns && tiles <= kFewTiles) {  // tiles leave most SMs idle
    // Twice as many columns halve the reads of rows; all SMs must have some.
    const bool wide = rows * p.w.n >= kSomeValues && 8 * sizeof(float) * padded_columns(p.w.k) <= (size_t)max_shared();
    (wide ? start_few<2, 8> : start_few<2, 4>)(p, rows, queue);
  } else if (rows >= kManyRows && p.w.n >= kManyColumns && p.w.k % kLaneColumns == 0)
    start(queue, gemm_small_n_tiles_kernel, dim3(ceil_div(p.w.n, kTile), ceil_div(rows, kTile)), 32 * kTileWarps,
          kStages * kStage * sizeof(float), p, rows);
  else start_few<8, 4>(p, rows, queue);
}

}  // namespace as::cuda
