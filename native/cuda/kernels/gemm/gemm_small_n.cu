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

// Still more: a warp has one chain of all values of a tile of 64 x 64, so that lanes share rows and columns, and the
// chains of a value are in different warps. A CTA computes four chains at a time.
namespace large {

constexpr int kTile = 64, kChains = 4, kThreads = 32 * kChains, kPasses = 32 / kChains, kLevels = 3;
constexpr int kRows = 8, kColumns = 16, kSums = kRows * kColumns;        // of a thread
constexpr int kStages = 4, kStage = 2 * kTile * kChains * kLaneColumns;  // floats: rows, then columns
constexpr int kKept = kSums / kChains;  // sums of a thread that all chains are added to
constexpr size_t kBytes = sizeof(float) * (kStages * kStage + kThreads * (kSums / 2 + kLevels * kKept));
static_assert(kTile * kTile == 32 * kSums && 1 << kLevels == kPasses);

// Where a row's four columns of a chain are in a stage, in floats: rows that lanes read at once lie in different banks.
__device__ inline int place(int row, int chain) { return (row * kChains + (chain ^ row / 2 % kChains)) * kLaneColumns; }

__global__ void __launch_bounds__(kThreads, 2) gemm_small_n_large_kernel(GemmArgs p, int rows) {
  extern __shared__ __align__(16) float memory[];
  const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile, k = p.w.k,
            steps = padded_columns(k) / kWarpColumns;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, own_row = lane / 4, own_column = lane % 4;
  float4* const exchange =
      reinterpret_cast<float4*>(memory + kStages * kStage) + tid;  // of each thread, kThreads apart
  float4* const pending = exchange + kThreads * kSums / 8;
  after_previous();
  // The next step's rows and columns. Those that do not exist are copies of the last ones.
  constexpr int kCopied = kThreads / kChains;  // rows and columns that the CTA copies at once
  const float* from[2 * kTile / kCopied];
#pragma unroll
  for (int i = 0; i < 2 * kTile; i += kCopied)
    from[i / kCopied] = i < kTile ? p.x.values + (size_t)min(row0 + i + tid / kChains, rows - 1) * k
                                  : p.w.values + (size_t)min(column0 + i + tid / kChains - kTile, p.w.n - 1) * k;
  const uint32_t stages = shared_address(memory), to = stages + place(tid / kChains, tid % kChains) * sizeof(float);
  uint32_t fetched = 0;  // the stage, in bytes
  int at = tid % kChains * kLaneColumns, pass = 0;
  const auto fetch = [&] {
    if (pass < kPasses)
#pragma unroll
      for (int i = 0; i < 2 * kTile / kCopied; i++)
        copy_16(to + fetched + i * kCopied * kChains * kLaneColumns * sizeof(float), from[i] + (at < k ? at : 0),
                at < k);
    commit_copies();
    fetched = fetched == (kStages - 1) * kStage * sizeof(float) ? 0 : fetched + kStage * sizeof(float);
    at += kWarpColumns;
    if (at >= steps * kWarpColumns) at += kChains * kLaneColumns - steps * kWarpColumns, pass++;
  };
  const uint32_t x_place = stages + place(own_row, warp) * sizeof(float),
                 w_places[2] = {stages + place(kTile + own_column, warp) * (uint32_t)sizeof(float),
                                stages + place(kTile + own_column + 4, warp) * (uint32_t)sizeof(float)};
  for (int i = 0; i < kStages - 1; i++) fetch();
  uint32_t used = 0;  // the stage, in bytes
#pragma unroll 1
  for (int computed = 0; computed < kPasses; computed++) {
    float sums[kRows][kColumns] = {};
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      wait_copies<kStages - 2>();
      __syncthreads();
      fetch();
      constexpr int kRow = kChains * kLaneColumns * sizeof(float);  // bytes
      float4 x[kRows];
#pragma unroll
      for (int r = 0; r < kRows; r++) x[r] = load_floats(x_place + used + 8 * r * kRow);
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const float4 w = load_floats(w_places[c % 2] + used + c / 2 * 8 * kRow);
#pragma unroll
        for (int r = 0; r < kRows; r++) sums[r][c] = multiply_add(x[r], w, sums[r][c]);
      }
      used = used == (kStages - 1) * kStage * sizeof(float) ? 0 : used + kStage * sizeof(float);
    }
    // The order of warp_sum(): chains next to each other first. Two warps send each other half of the sums.
    float half[kSums / 2], kept[kKept];
    const auto add = [&](auto& to, const auto& from, int bit) {
      constexpr int kCount = sizeof(to) / sizeof(float);
      const bool upper = warp & bit;
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
        float sent[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          sent[e] = upper ? from[n + e] : from[n + e + kCount];
          to[n + e] = upper ? from[n + e + kCount] : from[n + e];
        }
        exchange[n / 4 * kThreads] = make_float4(sent[0], sent[1], sent[2], sent[3]);
      }
      __syncthreads();
      const float4* const other = exchange + ((warp ^ bit) - warp) * 32;
#pragma unroll
      for (int n = 0; n < kCount; n += 4) {
        const float4 four = other[n / 4 * kThreads];
        to[n] += four.x, to[n + 1] += four.y, to[n + 2] += four.z, to[n + 3] += four.w;
      }
    };
    const float(&all)[kSums] = reinterpret_cast<const float(&)[kSums]>(sums);
    add(half, all, 1);
    __syncthreads();
    add(kept, half, 2);
    // Then passes next to each other.
    int level = 0;
#pragma unroll 1
    for (; computed >> level & 1; level++)
#pragma unroll
      for (int n = 0; n < kKept; n += 4) {
        const float4 four = pending[(level * kKept + n) / 4 * kThreads];
        kept[n] += four.x, kept[n + 1] += four.y, kept[n + 2] += four.z, kept[n + 3] += four.w;
      }
    if (computed < kPasses - 1) {
#pragma unroll
      for (int n = 0; n < kKept; n += 4)
        pending[(level * kKept + n) / 4 * kThreads] = make_float4(kept[n], kept[n + 1], kept[n + 2], kept[n + 3]);
      continue;
    }
    const int first = warp % 2 * kRows / 2 + warp / 2 * kRows / 4;  // of the thread's rows
#pragma unroll
    for (int n = 0; n < kKept; n++) {
      const int row = row0 + own_row + 8 * (first + n / kColumns), c = column0 + own_column + 4 * (n % kColumns);
      if (row < rows && c < p.w.n)
        p.y.values[(size_t)row * p.y.width + c] = p.bias ? __fadd_rn(kept[n], p.bias[c]) : kept[n];
    }
  }
}

// Whether the GPU is through with large tiles, two at a time on an SM, before it would be with tiles of 32 x 32.
bool is_faster(const GemmArgs& p, int rows) {
  constexpr int kTwo = 7;  // small ones take as long as two large ones
  const int sms = sm_count(), tiles = ceil_div(p.w.n, kTile) * ceil_div(rows, kTile),
            small = ceil_div(p.w.n, kTile / 2) * ceil_div(rows, kTile / 2);
  return p.w.n >= kTile && p.w.k % kLaneColumns == 0 && (int)kBytes <= max_shared() &&
         kTwo * ceil_div(tiles, 2 * sms) <= ceil_div(small, sms);
}

}  // namespace large

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
  if (rows <= 4 * kWarps || (p.w.n >= kManyColumns && rows * p.w.n <= kFewValues)) {
    start_few<1, 1>(p, rows, queue);
  } else if (p.w.n >= kManyColumns && tiles <= kFewTiles) {  // tiles leave most SMs idle
    // Twice as many columns halve the reads of rows; all SMs must have some.
    const bool wide = rows * p.w.n >= kSomeValues && 8 * sizeof(float) * padded_columns(p.w.k) <= (size_t)max_shared();
    (wide ? start_few<2, 8> : start_few<2, 4>)(p, rows, queue);
  } else if (large::is_faster(p, rows)) {
    start(queue, large::gemm_small_n_large_kernel, dim3(ceil_div(p.w.n, large::kTile), ceil_div(rows, large::kTile)),
          large::kThreads, large::kBytes, p, rows);
  } else if (rows >= kManyRows && p.w.n >= kManyColumns && p.w.k % kLaneColumns == 0) {
    start(queue, gemm_small_n_tiles_kernel, dim3(ceil_div(p.w.n, kTile), ceil_div(rows, kTile)), 32 * kTileWarps,
          kStages * kStage * sizeof(float), p, rows);
  } else {
    start_few<8, 4>(p, rows, queue);
  }
}

}  // namespace as::cuda
