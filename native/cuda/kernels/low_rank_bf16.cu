// Adapters' products of low rank (low_rank.cu says more) with matrices of bfloat16, by mma.sync.
//
// Recipes, whatever else a launch has: of a x a warp has a chain of products over every sixteenth 32 columns of a part
// of K, in ascending order; these are added in ascending order, then parts, and that times the scale. In b u each u is
// two values of bfloat16, which are exact to 16 bits: for each 16 ranks in ascending order the products of the higher
// ones, then those of the lower ones, in one chain from zero, which is then added to y.
//
// 16 rows are multiplied at once with the matrices of each adapter that any of them has, and who has it keeps the sums:
// a row's are its own. Within 32 (or 16) columns a lane multiplies what lies side by side, of both sides alike: which
// place of an mma.sync's K a column has does not matter.
#include "cuda/kernels/low_rank.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kRows = 16;                    // of an mma.sync
constexpr int kGroup = 32;                   // columns that a warp multiplies at once
constexpr int kWarps = 16;                   // of a block of shrink_kernel
constexpr int kExpandWarps = 4, kTiles = 8;  // of 8 columns, of a warp
constexpr int kExpandColumns = kExpandWarps * kTiles * 8;
constexpr int kFewRows = 64;  // up to so many blocks of threads have 16 rows, then 32

// The adapters of a lane's rows, g and g + 8 of each 16, and who is left to be looked at.
template <int kSets>
struct RowsOfAdapters {
  int own[kSets][2];
  uint32_t left[kSets][2];  // the first of the lanes of each row, as bits

  __device__ RowsOfAdapters(const AdaptedSums& a, int first, int rows) {
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        own[s][half] = adapter_of(a, first + kRows * s + 8 * half + threadIdx.x % 32 / 4, rows);
        left[s][half] = __ballot_sync(0xffffffffu, own[s][half] >= 0) & 0x11111111u;
      }
  }
  // The next adapter, the same in all lanes of all warps; -1: there is none.
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

__device__ LowRank pair_of(const AdaptedSums& a, int adapter, int number) {
  return a.pairs[(size_t)adapter * a.targets + a.columns[number].target];
}

// What a lane multiplies of rows [first, first + 16 kSets) and of a group of columns: eight columns of rows g and g + 8
// of each 16, in bfloat16; columns that there are not are zero.
template <bool kTiled, int kSets>
__device__ void read_x(const Rows& x, int first, int group, int rows, uint4 (&found)[kSets][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = group * kGroup + 8 * t;
  if constexpr (kTiled) {  // 32 rows from a multiple of 32 on are in one block of tiles
    const uint16_t* from = x.tiles + tile_offset(first + g, column, blocks_of(x.width));
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        found[s][half] = *reinterpret_cast<const uint4*>(from + (kRows * s + 8 * half) * kBlock);
    if ((group + 1) * kGroup <= x.width) return;
    const auto kept = [&](uint32_t pair, int at) {  // padding may be anything
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
        found[s][half] = make_uint4(two_bf16(values[0], values[1]), two_bf16(values[2], values[3]),
                                    two_bf16(values[4], values[5]), two_bf16(values[6], values[7]));
      }
  }
}

// Of a part of K. Blocks: rows, targets and their parts, blocks of ranks. What others do not make is read before the
// kernel before this one has ended.
template <bool kTiled, int kSets>
__global__ void __launch_bounds__(32 * kWarps) shrink_kernel(const __grid_constant__ AdaptedSums a, int rows) {
  constexpr int kAhead = 4 / kSets;
  __shared__ float sums[kWarps][kSets * kRows * kRankBlock];
  let_next_begin();
  const int k = a.x.width, parts = low_rank_parts(k, true), stride = low_rank_stride(k);
  const int first = blockIdx.x * kSets * kRows, number = blockIdx.y / parts, part = blockIdx.y % parts;
  const int rank = blockIdx.z * kRankBlock, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int groups = (k + kGroup - 1) / kGroup, each = (groups + parts - 1) / parts;
  const int begin = part * each + warp, end = min((part + 1) * each, groups);
  RowsOfAdapters<kSets> of_rows(a, first, rows);
  bool waits = true;
  for (int adapter; (adapter = of_rows.next()) >= 0;) {
    const LowRank pair = pair_of(a, adapter, number);
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
    __syncthreads();  // of the adapter before, sums have been read
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *reinterpret_cast<float2*>(&sums[warp][(kRows * s + 8 * half + g) * kRankBlock + 8 * n + 2 * t]) =
              make_float2(d[s][n][2 * half], d[s][n][2 * half + 1]);
    __syncthreads();
    const int row = first + threadIdx.x / kRankBlock;
    if (threadIdx.x < kSets * kRows * kRankBlock && adapter_of(a, row, rows) == adapter) {
      float sum = sums[0][threadIdx.x];
#pragma unroll
      for (int i = 1; i < kWarps; i++) sum = __fadd_rn(sum, sums[i][threadIdx.x]);
      a.inner[(((size_t)row * a.count + number) * parts + part) * whole_ranks(a.max_rank) + rank +
              threadIdx.x % kRankBlock] = sum;
    }
    __syncwarp();
  }
  if (waits) await_previous();  // every kernel does
}

// Four ranks of a row of scale * a x, as the values of bfloat16 that add up to them.
struct Halves {
  uint32_t high[2], low[2];
};
__device__ Halves halves_of(const float4& x) {
  Halves found;
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    found.high[i] = two_bf16(values[2 * i], values[2 * i + 1]);
    found.low[i] = two_bf16(__fsub_rn(values[2 * i], __uint_as_float(found.high[i] << 16)),
                            __fsub_rn(values[2 * i + 1], __uint_as_float(found.high[i] & 0xffff0000u)));
  }
  return found;
}

// Rows g and g + 8 of each 16 of scale * a x, for one target: of rows that have the adapter; others are zero.
template <int kSets>
struct Inner {
  const AdaptedSums& a;
  const RowsOfAdapters<kSets>& of_rows;
  int first, number, adapter;
  float scale;

  // Of a set, from a rank on.
  __device__ void read(int s, int rank, uint32_t (&high)[4], uint32_t (&low)[4]) const {
    const int stride = whole_ranks(a.max_rank), parts = low_rank_parts(a.x.width, true);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first + kRows * s + 8 * half + threadIdx.x % 32 / 4;
      float4 sum = make_float4(0, 0, 0, 0);
      if (of_rows.own[s][half] == adapter) {
        const float* from = a.inner + ((size_t)row * a.count + number) * parts * stride + rank + threadIdx.x % 4 * 4;
        sum = *reinterpret_cast<const float4*>(from);
        for (int i = 1; i < parts; i++) sum = sum_of(sum, *reinterpret_cast<const float4*>(from + i * stride));
      }
      const Halves u = halves_of(make_float4(__fmul_rn(sum.x, scale), __fmul_rn(sum.y, scale), __fmul_rn(sum.z, scale),
                                             __fmul_rn(sum.w, scale)));
      high[half] = u.high[0], high[half + 2] = u.high[1], low[half] = u.low[0], low[half + 2] = u.low[1];
    }
  }
};

// What a lane multiplies of columns [begin, begin + 8 kCount) of a matrix b, from a rank on.
template <int kCount>
__device__ void read_b(const LowRank& pair, int begin, int columns, int rank, uint2 (&w)[kCount]) {
  const int ranks = whole_ranks(pair.rank), g = threadIdx.x % 32 / 4;
  const uint16_t* from = reinterpret_cast<const uint16_t*>(pair.b) + rank + threadIdx.x % 4 * 4;
#pragma unroll
  for (int n = 0; n < kCount; n++)
    w[n] = rank < ranks && begin + 8 * n + g < columns
               ? *reinterpret_cast<const uint2*>(from + (size_t)(begin + 8 * n + g) * ranks)
               : make_uint2(0, 0);
}

// d = b u; w: what read_b() found of the first ranks.
template <int kSets, int kCount>
__device__ void expand(const Inner<kSets>& inner, const LowRank& pair, int begin, int columns, uint2 (&w)[kCount],
                       float (&d)[kSets][kCount][4]) {
#pragma unroll
  for (int i = 0; i < kSets * kCount * 4; i++) (&d[0][0][0])[i] = 0;
  for (int rank = 0; rank < pair.rank; rank += kRankBlock) {
    if (rank) read_b(pair, begin, columns, rank, w);
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      uint32_t high[4], low[4];
      inner.read(s, rank, high, low);
#pragma unroll
      for (int n = 0; n < kCount; n++) {
        multiply_add(d[s][n], high, w[n].x, w[n].y);
        multiply_add(d[s][n], low, w[n].x, w[n].y);
      }
    }
  }
}

// Blocks: columns, rows, targets.
template <int kSets>
__global__ void __launch_bounds__(32 * kExpandWarps) expand_kernel(const __grid_constant__ AdaptedSums a, int rows) {
  let_next_begin();
  const int first = blockIdx.y * kSets * kRows, number = blockIdx.z, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const AdaptedColumns own = a.columns[number];
  const int begin = (blockIdx.x * kExpandWarps + threadIdx.x / 32) * kTiles * 8;
  if (begin >= own.columns) return;
  const bool pairs = own.offset % 2 == 0 && a.width % 2 == 0 && a.half % 2 == 0;  // adjacent columns are so in y
  RowsOfAdapters<kSets> of_rows(a, first, rows);
  bool waits = true;
  for (int adapter; (adapter = of_rows.next()) >= 0;) {
    const LowRank pair = pair_of(a, adapter, number);
    uint2 w[kTiles];
    read_b(pair, begin, own.columns, 0, w);
    if (waits) await_previous();
    waits = false;
    if (!pair.rank) continue;
    float d[kSets][kTiles][4];
    expand(Inner<kSets>{a, of_rows, first, number, adapter, pair.scale}, pair, begin, own.columns, w, d);
#pragma unroll
    for (int s = 0; s < kSets; s++) {  // all that is read comes before anything is written
      float2 before[kTiles][2];
      const auto each = [&](const auto& what) {
#pragma unroll
        for (int n = 0; n < kTiles; n++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int column = begin + 8 * n + 2 * t, at = own.offset + column;
            if (column >= own.columns || of_rows.own[s][half] != adapter) continue;
            float* y = a.y + (size_t)(first + kRows * s + 8 * half + g) * a.width;
            const bool two = column + 1 < own.columns;
            what(y + place_of(a, at), two ? y + place_of(a, at + 1) : nullptr, pairs && two, n, half);
          }
      };
      each([&](float* one, float* other, bool adjacent, int n, int half) {
        if (adjacent) before[n][half] = *reinterpret_cast<const float2*>(one);
        else before[n][half] = make_float2(*one, other ? *other : 0.0f);
      });
      each([&](float* one, float* other, bool adjacent, int n, int half) {
        const float2 sum = make_float2(__fadd_rn(before[n][half].x, d[s][n][2 * half]),
                                       __fadd_rn(before[n][half].y, d[s][n][2 * half + 1]));
        if (adjacent) *reinterpret_cast<float2*>(one) = sum;
        else {
          *one = sum.x;
          if (other) *other = sum.y;
        }
      });
    }
    __syncwarp();
  }
  if (waits) await_previous();  // every kernel does
}

// Two adjacent values of a row, from an even column on.
__device__ void put_two(const Rows& out, int row, int column, float one, float other) {
  if (out.tiles)
    *reinterpret_cast<uint32_t*>(out.tiles + tile_offset(row, column, blocks_of(out.width))) = two_bf16(one, other);
  if (out.values) *reinterpret_cast<float2*>(out.values + (size_t)row * out.width + column) = make_float2(one, other);
}

// With `gated`. Blocks: its columns, rows.
template <int kSets>
__global__ void __launch_bounds__(32 * kExpandWarps)
    expand_gated_kernel(const __grid_constant__ AdaptedSums a, int rows) {
  constexpr int kEach = kTiles / 2;  // of gates, and of what they gate
  let_next_begin();
  const int first = blockIdx.y * kSets * kRows, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int begin = (blockIdx.x * kExpandWarps + threadIdx.x / 32) * kEach * 8;
  if (begin >= a.half) return;
  Product p;
  p.bias = a.bias, p.y.width = a.half;
  const auto finish = [&](int adapter, const RowsOfAdapters<kSets>& of_rows, const auto& added) {
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      float2 before[2][kEach][2];
      const auto row_of = [&](int half) { return first + kRows * s + 8 * half + g; };
#pragma unroll
      for (int n = 0; n < kEach; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (row_of(half) >= rows || of_rows.own[s][half] != adapter || begin + 8 * n >= a.half) continue;
          const float* y = a.y + (size_t)row_of(half) * a.width + 2 * (begin + 8 * n) + 2 * t;
          before[0][n][half] = *reinterpret_cast<const float2*>(y);
          before[1][n][half] = *reinterpret_cast<const float2*>(y + 8);
        }
#pragma unroll
      for (int n = 0; n < kEach; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (row_of(half) >= rows || of_rows.own[s][half] != adapter || begin + 8 * n >= a.half) continue;
          const int column = begin + 8 * n + 2 * t;
          const float2 gates = added(before[0][n][half], 0, s, n, half), ups = added(before[1][n][half], 1, s, n, half);
          put_two(a.gated, row_of(half), column, gated(p, column, gates.x, ups.x),
                  gated(p, column + 1, gates.y, ups.y));
        }
    }
  };
  RowsOfAdapters<kSets> of_rows(a, first, rows);
  bool waits = true;
  for (int adapter; (adapter = of_rows.next()) >= 0;) {
    const LowRank gate = pair_of(a, adapter, 0), up = pair_of(a, adapter, 1);
    uint2 w[2][kEach];
    read_b(gate, begin, a.half, 0, w[0]), read_b(up, begin, a.half, 0, w[1]);
    if (waits) await_previous();
    waits = false;
    float d[2][kSets][kEach][4];
    expand(Inner<kSets>{a, of_rows, first, 0, adapter, gate.scale}, gate, begin, a.half, w[0], d[0]);
    expand(Inner<kSets>{a, of_rows, first, 1, adapter, up.scale}, up, begin, a.half, w[1], d[1]);
    const bool has[2] = {gate.rank > 0, up.rank > 0};
    finish(adapter, of_rows, [&](const float2& x, int kind, int s, int n, int half) {
      if (!has[kind]) return x;
      return make_float2(__fadd_rn(x.x, d[kind][s][n][2 * half]), __fadd_rn(x.y, d[kind][s][n][2 * half + 1]));
    });
    __syncwarp();
  }
  if (waits) await_previous();
  finish(-1, of_rows, [](const float2& x, int, int, int, int) { return x; });
}

template <int kSets>
void add_of(const AdaptedSums& a, int rows, const Queue& queue) {
  int columns = 0;
  for (int i = 0; i < a.count; i++) columns = a.columns[i].columns > columns ? a.columns[i].columns : columns;
  const int groups = ceil_div(rows, kSets * kRows);
  start(queue, a.x.tiles ? shrink_kernel<true, kSets> : shrink_kernel<false, kSets>,
        dim3(groups, a.count * low_rank_parts(a.x.width, true), whole_ranks(a.max_rank) / kRankBlock), 32 * kWarps, 0,
        a, rows);
  launched("adapters");
  if (a.gated.width)
    start(queue, expand_gated_kernel<kSets>, dim3(ceil_div(a.half, kExpandColumns / 2), groups), 32 * kExpandWarps, 0,
          a, rows);
  else
    start(queue, expand_kernel<kSets>, dim3(ceil_div(columns, kExpandColumns), groups, a.count), 32 * kExpandWarps, 0,
          a, rows);
  launched("adapters");
}

}  // namespace

void add_low_rank_bf16(const AdaptedSums& a, int rows, const Queue& queue) {
  if (rows <= kFewRows) add_of<1>(a, rows, queue);
  else add_of<2>(a, rows, queue);
}

}  // namespace cuda
}  // namespace as
