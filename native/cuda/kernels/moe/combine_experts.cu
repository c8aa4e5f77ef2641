// Weighted sums of rows' entries, and sums with a gated shared expert, optionally with the norm that follows.
#include <algorithm>

#include "cuda/kernels/gemm/gemm_small_n.cuh"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kEight = 8, kThreads = 512;
constexpr int kManyRows = 1024, kRowsOfCta = 8;  // rows of a CTA in steps of many rows, if it does not sum entries

// Norms a row of which each thread keeps its first eight columns and has summed the squares of all of its own. weights:
// of these eight columns.
__device__ void norm_row(const NormedSum& c, int row, float squares, float (&kept)[kEight], float (&weights)[kEight]) {
  const int width = c.y.width, first = kEight * threadIdx.x, stride = kEight * blockDim.x;
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, blockDim.x) / width + c.norm.eps);
  const float one = c.norm.unit_offset ? 1.0f : 0.0f;
  for (int column = first; column < width; column += stride) {
    if (column > first) {
      read_eight(c.y.values + (size_t)row * width, column, width, kept);
      read_eight(c.norm.weight, column, width, weights);
    }
#pragma unroll
    for (int j = 0; j < kEight; j++) kept[j] = kept[j] * factor * (weights[j] + one);
    put_eight(c.normed, row, column, width, kept);
  }
}

int threads_of(int width) { return std::min(ceil_div(width, 32 * kEight) * 32, kThreads); }

// Eight columns of an entry as they are stored: float32, or 16 bits. Columns from the width on are zero in float32
// only.
template <bool kTiles>
struct Stored {
  float values[kEight];

  __device__ __forceinline__ void read(const Rows& entries, int entry, int column) {
    read_eight(entries.values + (size_t)entry * entries.width, column, entries.width, values);
  }
  __device__ __forceinline__ float at(int j) const { return values[j]; }
};
template <>
struct Stored<true> {
  uint32_t pairs[kEight / 2];

  __device__ __forceinline__ void read(const Rows& entries, int entry, int column) {
    const uint4 read = *reinterpret_cast<const uint4*>(
        entries.tiles + tile_offset(entry, min(column, entries.width - 1), blocks_of(entries.width)) / kEight * kEight);
    pairs[0] = read.x, pairs[1] = read.y, pairs[2] = read.z, pairs[3] = read.w;
  }
  __device__ __forceinline__ float at(int j) const { return j % 2 ? high_of(pairs[j / 2]) : low_of(pairs[j / 2]); }
};

// Eight columns of the weighted sum of a row's entries. Columns from the width on are zero.
template <bool kTiles>
__device__ __forceinline__ void sum_entries(const Rows& rows, const int* entries, const float* shares, int top,
                                            int column, float (&sum)[kEight]) {
  constexpr int kAtOnce = kTiles ? 8 : 4;  // entries whose loads are under way together
#pragma unroll
  for (int j = 0; j < kEight; j++) sum[j] = 0;
  for (int begin = 0; begin < top; begin += kAtOnce) {
    Stored<kTiles> own[kAtOnce];
    float share[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int at = min(begin + i, top - 1), entry = entries[at];
      there[i] = begin + i < top && entry >= 0, share[i] = shares[at];
      own[i].read(rows, max(entry, 0), column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int j = 0; j < kEight; j++)
        if (there[i]) sum[j] = fmaf(own[i].at(j), share[i], sum[j]);
  }
  if (kTiles && column + kEight > rows.width) {
#pragma unroll
    for (int j = 0; j < kEight; j++)
      if (column + j >= rows.width) sum[j] = 0;
  }
}

// A CTA computes a row; a thread computes eight columns of it, and further ones of rows with more than 4,096 columns.
template <bool kTiles>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Combination c) {
  const int row = blockIdx.x, width = c.y.width, top = c.routing.top, first = kEight * threadIdx.x,
            stride = kEight * blockDim.x;
  const int* entries = c.routing.entry_of + (size_t)row * top;
  const float* shares = c.routing.shares + (size_t)row * top;
  let_next_begin();
  float weights[kEight];  // prefetched before the previous kernel has written the entries
  if (c.norm.weight) read_eight(c.norm.weight, first, width, weights);
  await_previous();
  float squares = 0, kept[kEight];
  for (int column = first; column < width; column += stride) {
    float before[kEight] = {}, sum[kEight];
    if (c.adds) read_eight(c.y.values + (size_t)row * width, column, width, before);
    sum_entries<kTiles>(c.entries, entries, shares, top, column, sum);
#pragma unroll
    for (int j = 0; j < kEight; j++) {
      if (c.adds) sum[j] = __fadd_rn(before[j], sum[j]);
      squares = fmaf(sum[j], sum[j], squares);
      if (column == first) kept[j] = sum[j];
    }
    put_eight(c.y, row, column, width, sum);
  }
  if (c.norm.weight) norm_row(c, row, squares, kept, weights);
}

// The logit of a row's gate, by a warp; in every lane. x: the row; weights: the gate's, in shared memory.
template <bool kWhole>
__device__ __forceinline__ float gate_logit(const SharedSum& c, const float* x, const float* weights) {
  float dot[1][1];
  multiply_rows<1, 1, kWhole>(x, 1, weights, c.gate.w.k, dot);
  return c.gate.bias ? __fadd_rn(dot[0][0], *c.gate.bias) : dot[0][0];
}

// What a shared expert's output is added to: a sum, or entries that are summed by ascending expert.
enum class Routed { sum, values, tiles };

// Eight columns of what a row's sum adds.
template <Routed kRouted>
struct Summands {
  float before[kEight] = {}, shared[kEight], sum[kEight];

  __device__ __forceinline__ void read(const SharedSum& c, int row, int column) {
    const int width = c.y.width, top = c.routing.top;
    const size_t begin = (size_t)row * width;
    if (c.adds) read_eight(c.y.values + begin, column, width, before);
    read_eight(c.shared + begin, column, width, shared);
    if constexpr (kRouted == Routed::sum) read_eight(c.routed + begin, column, width, sum);
    else
      sum_entries<kRouted == Routed::tiles>(c.entries, c.routing.entry_of + (size_t)row * top,
                                            c.routing.shares + (size_t)row * top, top, column, sum);
  }
  // Leaves the total in `sum` and writes it. squares: receives those of the columns.
  __device__ __forceinline__ void add_up(const SharedSum& c, int row, int column, float gate, float& squares) {
    const float factor = 1.0f / (1.0f + expf(-gate));  // of sigmoid_mul()
#pragma unroll
    for (int j = 0; j < kEight; j++) {
      sum[j] = __fadd_rn(sum[j], __fmul_rn(shared[j], factor));
      if (c.adds) sum[j] = __fadd_rn(before[j], sum[j]);
      squares = fmaf(sum[j], sum[j], squares);
    }
    put_eight(c.y, row, column, c.y.width, sum);
  }
};

// Queues the copy of k floats, a multiple of four, to shared memory, with zeros up to padded_columns(k).
__device__ inline void queue_row(const float* from, int k, float* to) {
  for (int i = threadIdx.x * kLaneColumns; i < padded_columns(k); i += blockDim.x * kLaneColumns)
    copy_16(shared_address(to + i), from + (i < k ? i : 0), i < k);
}

// A CTA computes adjacent rows, with the same threads for a row. A warp computes the gates of some of them. If the CTA
// has one row, it is staged in shared memory with the gate's weights, so that memory is waited for once.
template <bool kWhole, Routed kRouted>
__global__ void __launch_bounds__(kThreads)
    add_shared_expert_kernel(const __grid_constant__ SharedSum c, int rows, int each) {
  extern __shared__ __align__(16) float gate_weights[];
  __shared__ float gates[kRowsOfCta];
  const int row0 = blockIdx.x * each, end = min(row0 + each, rows), width = c.y.width, first = kEight * threadIdx.x,
            stride = kEight * blockDim.x;
  let_next_begin();
  const int k = c.gate.w.k;
  const bool stages_row = kWhole && each == 1;
  float* const own_row = gate_weights + padded_columns(k);
  if (stages_row) queue_row(c.gate.w.values, k, gate_weights);
  else bring_rows<kWhole>(c.gate.w, 0, 1, gate_weights);
  float norm[kEight];  // prefetched before the previous kernel has written the rows
  if (c.norm.weight) read_eight(c.norm.weight, first, width, norm);
  if (!c.gates_early) await_previous();
  const float* const x = c.gate.x.values + (size_t)row0 * k;
  if (stages_row) queue_row(x, k, own_row);
  Summands<kRouted> own;
  if (!c.gates_early) own.read(c, row0, first);
  commit_copies(), wait_copies<0>();
  __syncthreads();
  for (int row = row0 + threadIdx.x / 32; row < end; row += blockDim.x / 32) {
    const float gate = gate_logit<kWhole>(c, stages_row ? own_row : x + (size_t)(row - row0) * k, gate_weights);
    if (threadIdx.x % 32 == 0) gates[row - row0] = gate;
  }
  if (c.gates_early) await_previous(), own.read(c, row0, first);
  __syncthreads();
  for (int row = row0; row < end; row++) {
    float squares = 0, kept[kEight], weights[kEight];
    for (int column = first; column < width; column += stride) {
      if (row > row0 || column > first) own.read(c, row, column);
      own.add_up(c, row, column, gates[row - row0], squares);
      if (column > first) continue;
#pragma unroll
      for (int j = 0; j < kEight; j++) kept[j] = own.sum[j], weights[j] = norm[j];
    }
    if (c.norm.weight) norm_row(c, row, squares, kept, weights);
  }
}

// The sum of 16-bit entries in steps of many rows, of up to kManyWidth columns: a CTA for each row, with few registers
// so that more rows are under way. Its last warp computes the gate while the others read.
constexpr int kManyWidth = 2048, kManyThreads = kManyWidth / kEight + 32;
template <bool kWhole>
__global__ void __launch_bounds__(kManyThreads, 3) sum_many_kernel(const __grid_constant__ SharedSum c) {
  extern __shared__ __align__(16) float gate_weights[];
  __shared__ float gate;
  const int row = blockIdx.x, width = c.y.width, first = kEight * threadIdx.x;
  let_next_begin();
  bring_rows<kWhole>(c.gate.w, 0, 1, gate_weights);
  await_previous();
  __syncthreads();
  Summands<Routed::tiles> own;
  if (threadIdx.x / 32 == blockDim.x / 32 - 1) {
    const float logit = gate_logit<kWhole>(c, c.gate.x.values + (size_t)row * c.gate.w.k, gate_weights);
    if (threadIdx.x % 32 == 0) gate = logit;
  } else if (first < width) {
    own.read(c, row, first);
  }
  float weights[kEight];
  if (c.norm.weight) read_eight(c.norm.weight, first, width, weights);
  __syncthreads();
  float squares = 0;
  if (first < width) own.add_up(c, row, first, gate, squares);
  if (c.norm.weight) norm_row(c, row, squares, own.sum, weights);
}

template <bool kWhole, Routed kRouted>
void start_shared(const SharedSum& c, int rows, const Queue& queue) {
  const int threads = threads_of(c.y.width);
  const size_t shared = padded_columns(c.gate.w.k) * sizeof(float);
  if constexpr (kRouted == Routed::tiles)
    if (rows >= kManyRows && c.y.width <= kManyWidth)
      return start(queue, sum_many_kernel<kWhole>, rows, threads + 32, shared, c);
  const int each = kRouted != Routed::sum || rows < kManyRows ? 1 : kRowsOfCta;
  start(queue, add_shared_expert_kernel<kWhole, kRouted>, ceil_div(rows, each), threads,
        each == 1 ? 2 * shared : shared, c, rows, each);
}

template <bool kWhole>
void start_shared(const SharedSum& c, int rows, const Queue& queue) {
  if (c.entries.tiles) start_shared<kWhole, Routed::tiles>(c, rows, queue);
  else if (c.entries.values) start_shared<kWhole, Routed::values>(c, rows, queue);
  else start_shared<kWhole, Routed::sum>(c, rows, queue);
}

}  // namespace

void combine_experts(const Combination& c, int rows, const Queue& queue) {
  start(queue, c.entries.tiles ? combine_kernel<true> : combine_kernel<false>, rows, threads_of(c.y.width), 0, c);
}

void add_shared_expert(const SharedSum& c, int rows, const Queue& queue) {
  if (c.gate.w.k % kLaneColumns) start_shared<false>(c, rows, queue);
  else start_shared<true>(c, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
