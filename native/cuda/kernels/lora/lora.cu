// LoRA adapters (Hu et al., 2021) in float32: low-rank products, each row with its own adapter's matrices.
//
// Recipe, independent of the rest of a launch. a x: the columns are divided into kWarps parts; in each part a lane has
// a chain of fused multiply-adds over its columns in ascending order. Parts are added in ascending order, then lanes as
// warp_sum() does; the sum is multiplied by the scale. b u: one chain over the rank, from zero, which is then added to
// y. Rows with the same adapter share the reads of its matrices; the chains are the same.
//
// The adapters of rows are read from GPU memory, so a launch has CTAs for every possible row, target and rank.
#include "cuda/kernels/lora/lora.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kWarps = 8;   // warps of a CTA
constexpr int kPart = 256;  // adjacent columns of a part
constexpr int kExpandThreads = 128;
constexpr int kColumns = 4;     // columns of a thread
constexpr int kAloneRows = 64;  // up to so many rows of a step, each row is computed by itself
constexpr int kRowsTogether = 8;

__device__ void load_eight(const float* from, float (&values)[8]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}
__device__ void load_four(const float* from, float (&values)[4]) {
  const float4 all = *reinterpret_cast<const float4*>(from);
  values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
}

__device__ void read_x(const Rows& x, int row, int column, float (&values)[8]) {
  if (!x.tiles) return read_eight(x.values + (size_t)row * x.width, column, x.width, values);
  const uint4 words = *reinterpret_cast<const uint4*>(x.tiles + tile_offset(row, column, blocks_of(x.width)));
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int j = 0; j < 8; j++)  // padding may have any value
    values[j] = column + j < x.width ? j % 2 ? high_of(all[j / 2]) : low_of(all[j / 2]) : 0.0f;
}

// A bit for each of kRows rows from `first` on that has the adapter of row `first + i`. 0: row `first + i` has no
// adapter, or an earlier row has the same.
template <int kRows>
__device__ uint32_t rows_with(const AdaptedSums& a, int first, int i, int rows) {
  const int adapter = adapter_of(a, first + i, rows);
  if (adapter < 0) return 0;
  uint32_t with = 0;
#pragma unroll
  for (int r = 0; r < kRows; r++) with |= (uint32_t)(adapter_of(a, first + r, rows) == adapter) << r;
  return with & ((1u << i) - 1) ? 0 : with;
}

__device__ float* inner_of(const AdaptedSums& a, int row, int number) {
  return a.inner + ((size_t)row * a.count + number) * whole_ranks(a.max_rank);
}

// A row by itself: one CTA for a rank, each of whose warps has a part of the columns. The matrix is read before the
// previous kernel has ended, since no kernel writes it. Grid: rows, targets, ranks.
__global__ void __launch_bounds__(32 * kWarps) shrink_alone_kernel(AdaptedSums a, int rows) {
  constexpr int kAhead = 4;
  __shared__ float parts[kWarps][32];
  let_next_begin();
  const int row = blockIdx.x, number = blockIdx.y, rank = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int k = a.x.width, adapter = adapter_of(a, row, rows);
  const LoraPair pair =
      adapter < 0 ? LoraPair{nullptr, nullptr, 0, 0} : a.pairs[(size_t)adapter * a.targets + a.columns[number].target];
  const bool there = rank < pair.rank;
  const float* matrix = reinterpret_cast<const float*>(pair.a) + (size_t)rank * lora_stride(k);
  const auto column_of = [&](int i) { return (i * kWarps + warp) * kPart + lane * 8; };
  float ahead[kAhead][8];
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (there && column_of(i) < k) load_eight(matrix + column_of(i), ahead[i]);
  await_previous();
  if (!there) return;
  float sum = 0;
  const auto add = [&](const float(&w)[8], int column) {
    float x[8];
    read_x(a.x, row, column, x);
#pragma unroll
    for (int j = 0; j < 8; j++) sum = __fmaf_rn(w[j], x[j], sum);
  };
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (column_of(i) < k) add(ahead[i], column_of(i));
#pragma unroll 4
  for (int i = kAhead; column_of(i) < k; i++) {
    float w[8];
    load_eight(matrix + column_of(i), w);
    add(w, column_of(i));
  }
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int i = 1; i < kWarps; i++) sum = __fadd_rn(sum, parts[i][lane]);
  sum = warp_sum(sum);
  if (lane == 0) inner_of(a, row, number)[rank] = __fmul_rn(sum, pair.scale);
}

// Rows together: a warp computes kRanks ranks for all of them. Grid: groups of rows, targets, ranks.
template <int kRows, int kRanks>
__global__ void __launch_bounds__(32 * kWarps) shrink_kernel(AdaptedSums a, int rows) {
  after_previous();
  const int first = blockIdx.x * kRows, number = blockIdx.y, lane = threadIdx.x % 32, k = a.x.width,
            stride = lora_stride(k), rank = (blockIdx.z * kWarps + threadIdx.x / 32) * kRanks;
#pragma unroll 1
  for (int i = 0; i < kRows; i++) {
    const uint32_t with = rows_with<kRows>(a, first, i, rows);
    if (!with) continue;
    const LoraPair pair = a.pairs[(size_t)adapter_of(a, first + i, rows) * a.targets + a.columns[number].target];
    if (rank >= pair.rank) continue;
    const float* matrix = reinterpret_cast<const float*>(pair.a) + (size_t)rank * stride;
    float totals[kRanks][kRows] = {};
#pragma unroll 1
    for (int part = 0; part < kWarps; part++) {
      float sums[kRanks][kRows] = {};
#pragma unroll 2
      for (int column = part * kPart + lane * 8; column < k; column += kWarps * kPart) {
        float w[kRanks][8] = {};
#pragma unroll
        for (int n = 0; n < kRanks; n++)
          if (rank + n < pair.rank) load_eight(matrix + (size_t)n * stride + column, w[n]);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          if (!(with >> r & 1)) continue;
          float x[8];
          read_x(a.x, first + r, column, x);
#pragma unroll
          for (int n = 0; n < kRanks; n++)
#pragma unroll
            for (int j = 0; j < 8; j++) sums[n][r] = __fmaf_rn(w[n][j], x[j], sums[n][r]);
        }
      }
#pragma unroll
      for (int n = 0; n < kRanks; n++)
#pragma unroll
        for (int r = 0; r < kRows; r++) totals[n][r] = part ? __fadd_rn(totals[n][r], sums[n][r]) : sums[n][r];
    }
#pragma unroll
    for (int n = 0; n < kRanks; n++)
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float sum = warp_sum(totals[n][r]);
        if (lane == 0 && (with >> r & 1) && rank + n < pair.rank)
          inner_of(a, first + r, number)[rank + n] = __fmul_rn(sum, pair.scale);
      }
  }
}

// y += sums, for four of a target's columns, the first a multiple of four.
__device__ void add_four(const AdaptedSums& a, int row, const AdaptedColumns& own, int column,
                         const float (&sums)[kColumns]) {
  float* y = a.y + (size_t)row * a.width;
  const int at = own.offset + column;
  if (column + kColumns <= own.columns && a.width % 4 == 0 && at % 4 == 0 && a.paired_gates % 4 == 0) {
    float4& place = *reinterpret_cast<float4*>(y + place_of(a, at));
    float4 values = place;
    values.x = __fadd_rn(values.x, sums[0]), values.y = __fadd_rn(values.y, sums[1]);
    values.z = __fadd_rn(values.z, sums[2]), values.w = __fadd_rn(values.w, sums[3]);
    place = values;
    return;
  }
#pragma unroll
  for (int c = 0; c < kColumns; c++)
    if (column + c < own.columns) {
      float& value = y[place_of(a, at + c)];
      value = __fadd_rn(value, sums[c]);
    }
}

// A row by itself. The matrix is read before the previous kernel has ended, since no kernel writes it. Grid: columns,
// rows, targets.
__global__ void __launch_bounds__(kExpandThreads) expand_alone_kernel(AdaptedSums a, int rows) {
  constexpr int kAhead = 16;
  let_next_begin();
  const int number = blockIdx.z, row = blockIdx.y, adapter = adapter_of(a, row, rows);
  const AdaptedColumns own = a.columns[number];
  const int column = (blockIdx.x * kExpandThreads + threadIdx.x) * kColumns, stride = lora_stride(own.columns);
  const LoraPair pair =
      adapter < 0 ? LoraPair{nullptr, nullptr, 0, 0} : a.pairs[(size_t)adapter * a.targets + own.target];
  const bool there = pair.rank && column < own.columns;
  const float* matrix = reinterpret_cast<const float*>(pair.b) + column;
  float ahead[kAhead][kColumns];
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (there && i < pair.rank) load_four(matrix + (size_t)i * stride, ahead[i]);
  await_previous();
  if (!there) return;
  const float* u = inner_of(a, row, number);
  float sums[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (i < pair.rank) {
#pragma unroll
      for (int c = 0; c < kColumns; c++) sums[c] = __fmaf_rn(ahead[i][c], u[i], sums[c]);
    }
#pragma unroll 8
  for (int i = kAhead; i < pair.rank; i++) {
    float w[kColumns];
    load_four(matrix + (size_t)i * stride, w);
#pragma unroll
    for (int c = 0; c < kColumns; c++) sums[c] = __fmaf_rn(w[c], u[i], sums[c]);
  }
  add_four(a, row, own, column, sums);
}

// Rows together. Grid: columns, groups of rows, targets.
template <int kRows>
__global__ void __launch_bounds__(kExpandThreads) expand_kernel(AdaptedSums a, int rows) {
  after_previous();
  const int number = blockIdx.z, first = blockIdx.y * kRows;
  const AdaptedColumns own = a.columns[number];
  const int column = (blockIdx.x * kExpandThreads + threadIdx.x) * kColumns, stride = lora_stride(own.columns);
  if (column >= own.columns) return;
#pragma unroll 1
  for (int i = 0; i < kRows; i++) {
    const uint32_t with = rows_with<kRows>(a, first, i, rows);
    if (!with) continue;
    const LoraPair pair = a.pairs[(size_t)adapter_of(a, first + i, rows) * a.targets + own.target];
    if (!pair.rank) continue;
    const float* matrix = reinterpret_cast<const float*>(pair.b) + column;
    float sums[kRows][kColumns] = {};
#pragma unroll 4
    for (int rank = 0; rank < pair.rank; rank++) {
      float w[kColumns];
      load_four(matrix + (size_t)rank * stride, w);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        if (!(with >> r & 1)) continue;
        const float u = inner_of(a, first + r, number)[rank];
#pragma unroll
        for (int c = 0; c < kColumns; c++) sums[r][c] = __fmaf_rn(w[c], u, sums[r][c]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; r++)
      if (with >> r & 1) add_four(a, first + r, own, column, sums[r]);
  }
}

constexpr int kThreads = 256;

// width: width of a row of `in`.
__global__ void silu_mul_pairs_kernel(const float* in, int width, const float* bias, Rows out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= out.width) return;
  const float* sums = in + (size_t)row * width + i / 8 * 16 + i % 8;
  GemmArgs p;
  p.bias = bias, p.y.width = out.width;
  put(out, row, i, gated(p, i, sums[0], sums[8]));
}

}  // namespace

void add_lora(const AdaptedSums& a, int rows, const Queue& queue) {
  if (a.is_dtype16) return add_lora_dtype16(a, rows, queue);
  int columns = 0;
  for (int i = 0; i < a.count; i++) columns = a.columns[i].columns > columns ? a.columns[i].columns : columns;
  const bool alone = rows <= kAloneRows;
  const int groups = alone ? rows : ceil_div(rows, kRowsTogether), ranks = alone ? 1 : kWarps;
  start(queue, alone ? shrink_alone_kernel : shrink_kernel<kRowsTogether, 1>,
        dim3(groups, a.count, ceil_div(a.max_rank, ranks)), 32 * kWarps, 0, a, rows);
  start(queue, alone ? expand_alone_kernel : expand_kernel<kRowsTogether>,
        dim3(ceil_div(columns, kExpandThreads * kColumns), groups, a.count), kExpandThreads, 0, a, rows);
}

void silu_mul_pairs(const float* in, const float* bias, int rows, const Rows& out, const Queue& queue) {
  start(queue, silu_mul_pairs_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in,
        paired_rows(2 * out.width), bias, out);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
