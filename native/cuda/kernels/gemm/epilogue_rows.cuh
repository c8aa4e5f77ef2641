// Epilogue of warpgroups whose first wgmma operand is the activations: 64 rows and several columns each.
#pragma once
#include <climits>

#include "cuda/kernels/common/exchange.cuh"
#include "cuda/kernels/common/wgmma.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The two epilogues below read a thread's results by results(sixteen, h, v): for 16 columns and the thread's row h (0
// or 1), columns 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q, q = lane % 4.

// Writes the gated values of a warpgroup's 64 rows. A thread has gate and up values of the same columns, two adjacent
// ones of each eight; lanes exchange results so that each stores eight adjacent ones at a time. Few instructions matter
// here: no warp of the CTA multiplies meanwhile, and the code does not stay in the instruction cache. last: columns
// from this one on are not written, although there are results for them.
template <bool kBias, int kColumns, typename Results>
__device__ inline void write_gated(const GemmArgs& p, int rows, int first_row, int first_column, const Results& results,
                                   int last = INT_MAX) {
  constexpr int kEights = kColumns / 16;
  const unsigned thread = afresh(threadIdx.x % 128), lane = thread % 32, quarter = lane % 4;
  const int width = p.y.width, blocks = blocks_of(width);
  const auto gate_of = [&](int i, int j, const float* gates) {
    if constexpr (!kBias) return silu_times(gates[j], gates[2 + j]);
    const int column = first_column + i * 8 + 2 * (int)quarter + j;
    const bool there = column < width;  // -0 plus x is x
    return silu_times(__fadd_rn(gates[j], there ? p.bias[column] : -0.0f),
                      __fadd_rn(gates[2 + j], there ? p.bias[width + column] : -0.0f));
  };
#pragma unroll
  for (int step = 0; step < (kEights + 3) / 4 * 2; step++) {
    const int first = step / 2 * 4, h = step % 2, row = first_row + (int)(thread / 32 * 16 + lane / 4) + 8 * h;
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4 && first + i < kEights; i++) {
      float gates[4];
      results(first + i, h, gates);
      words[i] = to_dtype16x2(gate_of(first + i, 0, gates), gate_of(first + i, 1, gates));
    }
    exchange(words);
    const int column = first_column + (first + (int)quarter) * 8;
    if (row >= rows || first + (int)quarter >= kEights || column >= min(width, last)) continue;
    if (column + 8 > width) {  // columns from `width` on are padding, which is zero
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] &= column + 2 * i + 1 < width ? ~0u : column + 2 * i < width ? 0xffff : 0;
    }
    *reinterpret_cast<uint4*>(p.y.tiles + tile_offset(row, column, blocks)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Prefetches the values of y that a warpgroup's sums of 64 rows are added to, into the L2 cache.
template <int kColumns>
__device__ inline void ask_for_added(const GemmArgs& p, int rows, int first_row, int first_column) {
  constexpr int kLine = 32;  // float32 values of a cache line
  const int count = min(kColumns, p.w.n - first_column), width = p.y.width;
  for (int i = threadIdx.x % 128; i < kBlock * (kColumns / kLine); i += 128) {
    const int row = first_row + i / (kColumns / kLine), column = i % (kColumns / kLine) * kLine;
    if (row < rows && column < count)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.y.values + (size_t)row * width + first_column + column));
  }
}

// Writes a warpgroup's 64 rows to tiles. Lanes exchange results so that each stores eight adjacent columns at a time.
// kPushes: also to another GPU if p.y.copy is set. bias, last: as in epilogue_rows().
template <int kColumns, bool kBiasShared, bool kPushes, typename Results>
__device__ inline void write_tiles(const GemmArgs& p, int rows, int first_row, int first_column, const Results& results,
                                   uint32_t bias, int last) {
  constexpr int kEights = kColumns / 8;
  const unsigned thread = afresh(threadIdx.x % 128), lane = thread % 32, quarter = lane % 4;
  const int blocks = blocks_of(p.y.width);
#pragma unroll
  for (int step = 0; step < (kEights + 3) / 4 * 2; step++) {
    const int first = step / 2 * 4, h = step % 2, row = first_row + (int)(thread / 32 * 16 + lane / 4) + 8 * h;
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 2 && first + 2 * i < kEights; i++) {
      float v[4];
      results(first / 2 + i, h, v);
      if (p.bias)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int within = first * 8 + i * 16 + j / 2 * 8 + 2 * (int)quarter + j % 2, column = first_column + within;
          if (column >= p.w.n) continue;
          v[j] = __fadd_rn(v[j], kBiasShared ? load_float(bias + 4 * within) : p.bias[column]);
        }
      words[2 * i] = to_dtype16x2(v[0], v[1]), words[2 * i + 1] = to_dtype16x2(v[2], v[3]);
    }
    exchange(words);
    const int column = first_column + (first + (int)quarter) * 8;
    if (row >= rows || first + (int)quarter >= kEights || column >= last) continue;
    if (column + 8 > p.w.n) words[2] = words[3] = 0;  // the columns' number is a multiple of four; padding is zero
    const size_t at = tile_offset(row, column, blocks);
    const uint4 eight = make_uint4(words[0], words[1], words[2], words[3]);
    *reinterpret_cast<uint4*>(p.y.tiles + at) = eight;
    if (kPushes && p.y.copy) push(p.y.copy + at, eight);
  }
}

// Writes a warpgroup's 64 rows without gating: with a bias, or added to y. Lanes exchange two values of each 16
// columns, so that each has four adjacent ones. The values to add are loaded for kAsked such fours at a time while the
// previous ones are computed; single loads would expose each latency. bias: shared-memory address of the tile's biases.
// last: columns from this one on are not written, although there are results for them. kPushes: as in write_tiles().
template <int kColumns, int kAsked, bool kBiasShared, bool kPushes = false, typename Results>
__device__ inline void epilogue_rows(const GemmArgs& p, int rows, int first_row, int first_column,
                                     const Results& results, uint32_t bias = 0, int last = INT_MAX) {
  last = min(last, p.w.n);
  if (p.y.tiles)
    return write_tiles<kColumns, kBiasShared, kPushes>(p, rows, first_row, first_column, results, bias, last);
  constexpr int kSixteens = kColumns / 16, kSteps = (kSixteens + kAsked - 1) / kAsked * 2;
  const unsigned thread = afresh(threadIdx.x % 128), lane = thread % 32, odd = lane % 2;
  const int width = p.y.width, within = 8 * odd + lane % 4 / 2 * 4, column = first_column + within,
            row = first_row + (int)(thread / 32 * 16 + lane / 4);
  const int left = last - column;                  // columns that exist from `column` on
  const bool with_bias = !kBiasShared && !p.adds;  // then the bias is loaded in place of y
  const float* added = (with_bias ? p.bias : p.y.values + (size_t)row * width) + column;
  const int stride = with_bias ? 0 : 8 * width;
  const bool adds = p.adds || (with_bias && p.bias);
  bias += within * 4;
  float4 asked[2][kAsked];
  const auto ask = [&](int step) {
    const int h = step % 2;
#pragma unroll
    for (int i = 0; i < kAsked; i++)
      if (const int at = step / 2 * kAsked + i; at < kSixteens)
        asked[step % 2][i] =
            read_if(added + (size_t)h * stride + 16 * at, adds && row + 8 * h < rows && 16 * at < left);
  };
  ask(0);
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    if (step + 1 < kSteps) ask(step + 1);
    const int h = step % 2;
#pragma unroll
    for (int i = 0; i < kAsked; i++) {
      const int at = step / 2 * kAsked + i;
      if (at >= kSixteens) continue;
      float v[4];
      results(at, h, v);
      const float first = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[2], 1),
                  second = __shfl_xor_sync(0xffffffffu, odd ? v[1] : v[3], 1);
      float4 four = odd ? make_float4(first, second, v[2], v[3]) : make_float4(v[0], v[1], first, second);
      if (row + 8 * h >= rows || 16 * at >= left) continue;
      if (p.bias && kBiasShared) four = sum_of(four, load_floats(bias + 64 * at));
      if (p.bias && !kBiasShared && p.adds)
        four = sum_of(four, *reinterpret_cast<const float4*>(p.bias + column + 16 * at));
      if (adds) four = sum_of(asked[step % 2][i], four);
      *reinterpret_cast<float4*>(p.y.values + (size_t)(row + 8 * h) * width + column + 16 * at) = four;
    }
  }
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
