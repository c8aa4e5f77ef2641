// LoRA adapters (lora.cu) with 16-bit matrices by mma.sync.
//
// Recipe, independent of the rest of a launch. a x: in each part of K there are eight chains, each over every eighth
// group of 32 columns in ascending order. They are added in ascending order, then parts are; the sum is multiplied by
// the scale. b u: each u is split into two 16-bit values, which together have twice the mantissa (in float16: down to
// 2^-25, which matters for u below 2^-3). For each 16 ranks in ascending order, first the high values and then the low
// values are multiplied, in one chain from zero, which is then added to y.
//
// 16 rows at a time are multiplied with the matrices of each adapter that any of them has; a row keeps the sums of its
// own adapter. Within 32 columns, or 16 ranks, a lane multiplies adjacent values of both operands: their position
// within mma.sync's K does not matter.
#include <algorithm>

#include "cuda/kernels/lora/lora.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kRows = 16;        // rows of an mma.sync
constexpr int kGroup = 32;       // columns that a warp multiplies at once
constexpr int kWarps = 8;        // warps of a CTA of shrink_kernel, each with a chain
constexpr int kExpandWarps = 4;  // warps of a CTA of expand_kernel
constexpr int kFewRows = 64;     // up to so many rows, adapters have their own CTAs, and CTAs at most 16 rows
constexpr int kMaxTurns = 8;     // most CTAs among which adapters are divided

// The adapters of a lane's rows, g and g + 8 of each 16, and the rows whose adapters next() has not returned yet.
template <int kSets>
struct RowsOfAdapters {
  int own[kSets][2];
  uint32_t left[kSets][2];  // a bit for each row's first lane

  __device__ RowsOfAdapters(const AdaptedSums& a, int first, int rows) {
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        own[s][half] = adapter_of(a, first + kRows * s + 8 * half + threadIdx.x % 32 / 4, rows);
        left[s][half] = __ballot_sync(0xffffffffu, own[s][half] >= 0) & 0x11111111u;
      }
  }
  // The next adapter, the same in all lanes of all warps; -1 after the last.
  __device__ int next() {
    int found = -1;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (found < 0 && left[s][half]) found = __shfl_sync(0xffffffffu, own[s][half], __ffs(left[s][half]) - 1);
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) left[s][half] &= ~__ballot_sync(0xffffffffu, own[s][half] == found);
    return found;
  }
};

__device__ LoraPair pair_of(const AdaptedSums& a, int adapter, int number) {
  return a.pairs[(size_t)adapter * a.targets + a.columns[number].target];
}

// Reads a lane's operands of rows [first, first + 16 kSets) and a group of columns: eight columns of rows g and g + 8
// of each 16, with zeros beyond the last column.
template <bool kTiled, int kSets>
__device__ void read_x(const Rows& x, int first, int group, int rows, uint4 (&found)[kSets][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = group * kGroup + 8 * t;
  if constexpr (kTiled) {  // 32 rows from a multiple of 32 on lie in one block of tiles
    const uint16_t* from = x.tiles + tile_offset(first + g, column, blocks_of(x.width));
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        found[s][half] = *reinterpret_cast<const uint4*>(from + (kRows * s + 8 * half) * kBlock);
    if ((group + 1) * kGroup <= x.width) return;
    const auto kept = [&](uint32_t pair, int at) {  // padding may have any value
      return column + at + 1 < x.width ? pair : column + at < x.width ? pair & 0xffffu : 0u;
    };
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint4& own = found[s][half];
        own = make_uint4(kept(own.x, 0), kept(own.y, 2), kept(own.z, 4), kept(own.w, 6));
      }
  } else {
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = min(first + kRows * s + 8 * half + g, rows - 1);
        float values[8];
        read_eight(x.values + (size_t)row * x.width, column, x.width, values);
        found[s][half] = make_uint4(to_dtype16x2(values[0], values[1]), to_dtype16x2(values[2], values[3]),
                                    to_dtype16x2(values[4], values[5]), to_dtype16x2(values[6], values[7]));
      }
  }
}

// Computes a x over a part of K. Grid: rows; targets and their parts; blocks of ranks and turns of adapters. The matrix
// is read before the previous kernel has ended, since no kernel writes it.
template <bool kTiled, int kSets>
__global__ void __launch_bounds__(32 * kWarps)
    shrink_kernel(const __grid_constant__ AdaptedSums a, int rows, int turns) {
  constexpr int kAhead = 4 / kSets;
  __shared__ float sums[kWarps][kSets * kRows * kRankBlock];
  let_next_begin();
  const int k = a.x.width, parts = lora_k_parts(k, true), stride = lora_stride(k);
  const int first = blockIdx.x * kSets * kRows, number = blockIdx.y / parts, part = blockIdx.y % parts;
  const int rank = blockIdx.z / turns * kRankBlock, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
            t = threadIdx.x % 4;
  const int groups = (k + kGroup - 1) / kGroup, each = (groups + parts - 1) / parts;
  const int begin = part * each + warp, end = min((part + 1) * each, groups);
  RowsOfAdapters<kSets> of_rows(a, first, rows);
  bool waits = true;
  for (int adapter, turn = blockIdx.z % turns; (adapter = of_rows.next()) >= 0; turn += turns - 1) {
    if (turn % turns) continue;
    const LoraPair pair = pair_of(a, adapter, number);
    const bool there = rank < pair.rank;
    const uint16_t* matrix = reinterpret_cast<const uint16_t*>(pair.a) + (size_t)(rank + g) * stride + 8 * t;
    uint4 w[kAhead][2];
    const auto read_matrix = [&](int group, uint4(&of)[2]) {
      const bool has = there && group < end && group * kGroup + 8 * t < k;
#pragma unroll
      for (int n = 0; n < 2; n++)
        of[n] = has ? *reinterpret_cast<const uint4*>(matrix + (size_t)8 * n * stride + group * kGroup)
                    : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < kAhead; i++) read_matrix(begin + i * kWarps, w[i]);
    if (waits) await_previous();
    waits = false;
    if (!there) continue;
    float d[kSets][2][4] = {};
#pragma unroll 1
    for (int from = begin; from < end; from += kAhead * kWarps) {
      uint4 x[kAhead][kSets][2];
#pragma unroll
      for (int i = 0; i < kAhead; i++)
        if (from + i * kWarps < end) read_x<kTiled, kSets>(a.x, first, from + i * kWarps, rows, x[i]);
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        if (from + i * kWarps >= end) break;
#pragma unroll
        for (int s = 0; s < kSets; s++) {
          const uint4 &low = x[i][s][0], &high = x[i][s][1];
          const uint32_t left[4] = {low.x, high.x, low.y, high.y}, right[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int n = 0; n < 2; n++) {
            multiply_add(d[s][n], left, w[i][n].x, w[i][n].y);
            multiply_add(d[s][n], right, w[i][n].z, w[i][n].w);
          }
        }
        read_matrix(from + (kAhead + i) * kWarps, w[i]);
      }
    }
    __syncthreads();  // the previous adapter's sums have been read
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *reinterpret_cast<float2*>(&sums[warp][(kRows * s + 8 * half + g) * kRankBlock + 8 * n + 2 * t]) =
              make_float2(d[s][n][2 * half], d[s][n][2 * half + 1]);
    __syncthreads();
#pragma unroll
    for (int at = threadIdx.x; at < kSets * kRows * kRankBlock; at += 32 * kWarps) {
      const int row = first + at / kRankBlock;
      if (adapter_of(a, row, rows) != adapter) continue;
      float sum = sums[0][at];
#pragma unroll
      for (int i = 1; i < kWarps; i++) sum = __fadd_rn(sum, sums[i][at]);
      a.inner[(((size_t)row * a.count + number) * parts + part) * whole_ranks(a.max_rank) + rank + at % kRankBlock] =
          sum;
    }
    __syncwarp();
  }
  if (waits) await_previous();  // every kernel does
}

// Four ranks of a row of scale * a x, each as two 16-bit values whose sum it is.
struct HighLow {
  uint32_t high[2], low[2];
};
__device__ HighLow high_low_of(const float4& x) {
  HighLow found;
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    found.high[i] = to_dtype16x2(values[2 * i], values[2 * i + 1]);
    found.low[i] = to_dtype16x2(__fsub_rn(values[2 * i], low_of(found.high[i])),
                                __fsub_rn(values[2 * i + 1], high_of(found.high[i])));
  }
  return found;
}

// Reads a lane's operands of scale * a x, for a target and 16 ranks from `rank` on. Rows without the adapter are zero.
__device__ void read_u(const AdaptedSums& a, const RowsOfAdapters<1>& of_rows, int first, int number, int adapter,
                       float scale, int rank, uint32_t (&high)[4], uint32_t (&low)[4]) {
  const int stride = whole_ranks(a.max_rank), parts = lora_k_parts(a.x.width, true);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first + 8 * half + threadIdx.x % 32 / 4;
    float4 sum = make_float4(0, 0, 0, 0);
    if (of_rows.own[0][half] == adapter) {
      const float* from = a.inner + ((size_t)row * a.count + number) * parts * stride + rank + threadIdx.x % 4 * 4;
      sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 4
      for (int i = 1; i < parts; i++) sum = sum_of(sum, *reinterpret_cast<const float4*>(from + i * stride));
    }
    const HighLow u = high_low_of(make_float4(__fmul_rn(sum.x, scale), __fmul_rn(sum.y, scale), __fmul_rn(sum.z, scale),
                                              __fmul_rn(sum.w, scale)));
    high[half] = u.high[0], high[half + 2] = u.high[1], low[half] = u.low[0], low[half + 2] = u.low[1];
  }
}

// Columns [begin, begin + 8 kTiles) of a target's matrix b. A lane keeps its operands of the first ranks in registers,
// since consecutive rows mostly have the same adapter.
template <int kTiles>
struct Columns {
  int number = 0, begin = 0, columns = 0, adapter = -1;
  LoraPair pair;
  uint2 first[kTiles];

  __device__ void read(int rank, uint2 (&w)[kTiles]) const {
    const int ranks = whole_ranks(pair.rank), g = threadIdx.x % 32 / 4;
    const uint16_t* from = reinterpret_cast<const uint16_t*>(pair.b) + rank + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = 0; n < kTiles; n++)
      w[n] = rank < ranks && begin + 8 * n + g < columns
                 ? *reinterpret_cast<const uint2*>(from + (size_t)(begin + 8 * n + g) * ranks)
                 : make_uint2(0, 0);
  }
  __device__ void choose(const AdaptedSums& a, int wanted) {
    if (wanted == adapter) return;
    adapter = wanted, pair = pair_of(a, wanted, number);
    read(0, first);
  }
  // d = b u of 16 rows
  __device__ void multiply(const AdaptedSums& a, const RowsOfAdapters<1>& of_rows, int row,
                           float (&d)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles * 4; i++) (&d[0][0])[i] = 0;
    for (int rank = 0; rank < pair.rank; rank += kRankBlock) {
      uint2 w[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; n++) w[n] = first[n];
      if (rank) read(rank, w);
      uint32_t high[4], low[4];
      read_u(a, of_rows, row, number, adapter, pair.scale, rank, high, low);
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        multiply_add(d[n], high, w[n].x, w[n].y);
        multiply_add(d[n], low, w[n].x, w[n].y);
      }
    }
  }
};

__device__ float2 sum_of(const float2& a, const float2& b) {
  return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
}

// The following classes say what happens to sums. kTiles: tiles of 8 columns of a warp. kBlocks: CTAs of an SM. IntoY
// adds them to a target's columns of y.
struct IntoY {
  static constexpr int kTiles = 8, kKinds = 1, kBlocks = 3;
  static constexpr bool kEveryRow = false;

  __device__ static int columns(const AdaptedSums& a, int number) { return a.columns[number].columns; }
  // Calls `what` for each pair of a lane's columns from `begin` on, with the places of both in y; other: -1 if the
  // second column does not exist.
  template <typename What>
  __device__ static void each(const AdaptedSums& a, int number, int begin, const What& what) {
    const AdaptedColumns own = a.columns[number];
    const bool pairs =
        own.offset % 2 == 0 && a.width % 2 == 0 && a.paired_gates % 2 == 0;  // adjacent columns are adjacent in y
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const int column = begin + 8 * n + threadIdx.x % 4 * 2, at = own.offset + column;
      if (column < own.columns)
        what(n, place_of(a, at), column + 1 < own.columns ? place_of(a, at + 1) : -1,
             pairs && column + 1 < own.columns);
    }
  }
  struct Before {
    float2 y[kTiles][2];
  };
  __device__ static void read(const AdaptedSums& a, int number, int begin, int half, int row, Before& before) {
    const float* y = a.y + (size_t)row * a.width;
    each(a, number, begin, [&](int n, int one, int other, bool adjacent) {
      before.y[n][half] =
          adjacent ? *reinterpret_cast<const float2*>(y + one) : make_float2(y[one], other < 0 ? 0.0f : y[other]);
    });
  }
  __device__ static void finish(const AdaptedSums& a, int number, int begin, int half, int row, const Before& before,
                                const bool (&)[1], const float (&d)[1][kTiles][4]) {
    float* y = a.y + (size_t)row * a.width;
    each(a, number, begin, [&](int n, int one, int other, bool adjacent) {
      const float2 sum = sum_of(before.y[n][half], make_float2(d[0][n][2 * half], d[0][n][2 * half + 1]));
      if (adjacent) *reinterpret_cast<float2*>(y + one) = sum;
      else {
        y[one] = sum.x;
        if (other >= 0) y[other] = sum.y;
      }
    });
  }
};

// Adds sums to y, and the result to `added`.
struct IntoAdded {
  static constexpr int kTiles = 4, kKinds = 1, kBlocks = 3;
  static constexpr bool kEveryRow = true;

  __device__ static int columns(const AdaptedSums& a, int) { return a.width; }
  struct Before {
    float2 y[kTiles][2], added[kTiles][2];
  };
  __device__ static float2 two(const float* row, int column, int width) {
    return width % 2 == 0 ? *reinterpret_cast<const float2*>(row + column)
                          : make_float2(row[column], column + 1 < width ? row[column + 1] : 0.0f);
  }
  __device__ static void read(const AdaptedSums& a, int, int begin, int half, int row, Before& before) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const int column = begin + 8 * n + threadIdx.x % 4 * 2;
      if (column >= a.width) continue;
      before.y[n][half] = two(a.y + (size_t)row * a.width, column, a.width);
      before.added[n][half] = two(a.added + (size_t)row * a.width, column, a.width);
    }
  }
  __device__ static void finish(const AdaptedSums& a, int, int begin, int half, int row, const Before& before,
                                const bool (&has)[1], const float (&d)[1][kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const int column = begin + 8 * n + threadIdx.x % 4 * 2;
      if (column >= a.width) continue;
      float2 sum = before.y[n][half];
      if (has[0]) sum = sum_of(sum, make_float2(d[0][n][2 * half], d[0][n][2 * half + 1]));
      sum = sum_of(before.added[n][half], sum);
      float* to = a.added + (size_t)row * a.width + column;
      if (a.width % 2 == 0) *reinterpret_cast<float2*>(to) = sum;
      else {
        to[0] = sum.x;
        if (column + 1 < a.width) to[1] = sum.y;
      }
    }
  }
};

// Adds gate and up sums to y, and gates the results into `gated`.
struct IntoGated {
  static constexpr int kTiles = 4, kKinds = 2, kBlocks = 2;
  static constexpr bool kEveryRow = true;

  __device__ static int columns(const AdaptedSums& a, int) { return a.paired_gates; }
  struct Before {
    float2 y[2][kTiles][2];
  };
  __device__ static void read(const AdaptedSums& a, int, int begin, int half, int row, Before& before) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      if (begin + 8 * n >= a.paired_gates) continue;
      const float* y = a.y + (size_t)row * a.width + 2 * (begin + 8 * n) + threadIdx.x % 4 * 2;
      before.y[0][n][half] = *reinterpret_cast<const float2*>(y);
      before.y[1][n][half] = *reinterpret_cast<const float2*>(y + 8);
    }
  }
  __device__ static void finish(const AdaptedSums& a, int, int begin, int half, int row, const Before& before,
                                const bool (&has)[2], const float (&d)[2][kTiles][4]) {
    GemmArgs p;
    p.bias = a.bias, p.y.width = a.paired_gates;
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const int column = begin + 8 * n + threadIdx.x % 4 * 2;
      if (begin + 8 * n >= a.paired_gates) continue;
      float2 sums[2];
#pragma unroll
      for (int kind = 0; kind < 2; kind++) {
        sums[kind] = before.y[kind][n][half];
        if (has[kind]) sums[kind] = sum_of(sums[kind], make_float2(d[kind][n][2 * half], d[kind][n][2 * half + 1]));
      }
      const float one = gated(p, column, sums[0].x, sums[1].x), other = gated(p, column + 1, sums[0].y, sums[1].y);
      if (a.gated.tiles)
        *reinterpret_cast<uint32_t*>(a.gated.tiles + tile_offset(row, column, blocks_of(a.paired_gates))) =
            to_dtype16x2(one, other);
      if (a.gated.values)
        *reinterpret_cast<float2*>(a.gated.values + (size_t)row * a.paired_gates + column) = make_float2(one, other);
    }
  }
};

// Grid: columns; groups of `each` times 16 rows; targets and turns of adapters.
template <typename Into>
__global__ void __launch_bounds__(32 * kExpandWarps, Into::kBlocks)
    expand_kernel(const __grid_constant__ AdaptedSums a, int rows, int each, int turns) {
  constexpr int kKinds = Into::kKinds, kTiles = Into::kTiles;
  let_next_begin();
  const int number = blockIdx.z / turns, own_turn = blockIdx.z % turns, g = threadIdx.x % 32 / 4;
  const int begin = (blockIdx.x * kExpandWarps + threadIdx.x / 32) * kTiles * 8, columns = Into::columns(a, number);
  if (begin >= columns) return;
  Columns<kTiles> of[kKinds];
#pragma unroll
  for (int kind = 0; kind < kKinds; kind++)
    of[kind].number = kKinds > 1 ? kind : number, of[kind].begin = begin, of[kind].columns = columns;
  bool waits = true;
#pragma unroll 1
  for (int i = 0; i < each; i++) {
    const int first = (blockIdx.y * each + i) * kRows;
    if (first >= rows) break;
    RowsOfAdapters<1> of_rows(a, first, rows);
    const auto finish = [&](int adapter) {
      bool has[kKinds];
      float d[kKinds][kTiles][4];
      typename Into::Before before;
      if (waits) await_previous();
      waits = false;
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (first + 8 * half + g < rows && of_rows.own[0][half] == adapter)
          Into::read(a, number, begin, half, first + 8 * half + g, before);
#pragma unroll
      for (int kind = 0; kind < kKinds; kind++) {
        has[kind] = adapter >= 0 && of[kind].pair.rank > 0;
        if (has[kind]) of[kind].multiply(a, of_rows, first, d[kind]);
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (first + 8 * half + g < rows && of_rows.own[0][half] == adapter && (Into::kEveryRow || has[0]))
          Into::finish(a, number, begin, half, first + 8 * half + g, before, has, d);
      __syncwarp();
    };
    for (int adapter, turn = own_turn; (adapter = of_rows.next()) >= 0; turn += turns - 1) {
      if (turn % turns) continue;
#pragma unroll
      for (int kind = 0; kind < kKinds; kind++) of[kind].choose(a, adapter);
      finish(adapter);
    }
    if (Into::kEveryRow && !own_turn) finish(-1);
  }
  if (waits) await_previous();  // every kernel does
}

template <typename Into>
void expand(const AdaptedSums& a, int columns, int targets, int rows, int turns, const Queue& queue) {
  const int wide = ceil_div(columns, kExpandWarps * Into::kTiles * 8), tiles = ceil_div(rows, kRows);
  const int each = rows <= kFewRows ? 1 : std::clamp(tiles * wide * targets / (16 * sm_count()), 1, 16);
  start(queue, expand_kernel<Into>, dim3(wide, ceil_div(tiles, each), targets * turns), 32 * kExpandWarps, 0, a, rows,
        each, turns);
}

template <int kSets>
void shrink(const AdaptedSums& a, int rows, int turns, const Queue& queue) {
  start(queue, a.x.tiles ? shrink_kernel<true, kSets> : shrink_kernel<false, kSets>,
        dim3(ceil_div(rows, kSets * kRows), a.count * lora_k_parts(a.x.width, true),
             whole_ranks(a.max_rank) / kRankBlock * turns),
        32 * kWarps, 0, a, rows, turns);
}

}  // namespace

void add_lora_dtype16(const AdaptedSums& a, int rows, const Queue& queue) {
  const int turns = rows > kFewRows ? 1 : std::clamp(std::min(a.adapter_count, rows), 1, kMaxTurns);
  if (rows <= kFewRows) shrink<1>(a, rows, turns, queue);
  else shrink<2>(a, rows, turns, queue);
  int columns = 0;
  for (int i = 0; i < a.count; i++) columns = std::max(columns, a.columns[i].columns);
  if (a.gated.width) expand<IntoGated>(a, a.paired_gates, 1, rows, turns, queue);
  else if (a.added) expand<IntoAdded>(a, a.width, 1, rows, turns, queue);
  else expand<IntoY>(a, columns, a.count, rows, turns, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
