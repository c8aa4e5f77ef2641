// What warpgroups leave of products whose first side is rows of activations: 64 rows by some columns each.
#pragma once
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The number, which the compiler takes as new: so what is made of it is not kept in registers through the products.
__device__ inline int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A warpgroup's sums of 64 rows become gated values: a thread has gates and what they gate of the same columns, two
// adjacent ones of each eight; lanes exchange these, so that each has eight adjacent ones at a time. Few instructions
// count here: nobody multiplies meanwhile, and they do not stay in the cache.
template <bool kBias, int kColumns>
__device__ inline void write_gated(const Product& p, int rows, int first_row, int first_column,
                                   const float (&sums)[kColumns / 2]) {
  constexpr int kEights = kColumns / 16;
  const int thread = afresh(threadIdx.x % 128), lane = thread % 32, quarter = lane % 4, width = p.y.width,
            blocks = blocks_of(width);
  const auto gate_of = [&](int i, int j, const float* gates) {
    if constexpr (!kBias) return silu_times(gates[j], gates[4 + j]);
    const int column = first_column + i * 8 + 2 * quarter + j;
    const bool there = column < width;  // with -0 a sum is what is added
    return silu_times(__fadd_rn(gates[j], there ? p.bias[column] : -0.0f),
                      __fadd_rn(gates[4 + j], there ? p.bias[width + column] : -0.0f));
  };
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = first_row + thread / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
    for (int first = 0; first < kEights; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && first + i < kEights; i++) {
        const float* gates = sums + (first + i) * 8 + 2 * h;
        words[i] = two_bf16(gate_of(first + i, 0, gates), gate_of(first + i, 1, gates));
      }
      exchange(words);
      const int column = first_column + (first + quarter) * 8;
      if (row >= rows || first + quarter >= kEights || column >= width) continue;
      if (column + 8 > width) {  // columns from the width on are padding, which is zero
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] &= column + 2 * i + 1 < width ? ~0u : column + 2 * i < width ? 0xffff : 0;
      }
      *reinterpret_cast<uint4*>(p.y.tiles + tile_offset(row, column, blocks)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// What a warpgroup's sums of 64 rows are added to is on its way into the second-level cache.
template <int kColumns>
__device__ inline void ask_for_added(const Product& p, int rows, int first_row, int first_column) {
  constexpr int kLine = 32;  // values
  const int count = min(kColumns, p.w.n - first_column), width = p.y.width;
  for (int i = threadIdx.x % 128; i < kBlock * (kColumns / kLine); i += 128) {
    const int row = first_row + i / (kColumns / kLine), column = i % (kColumns / kLine) * kLine;
    if (row < rows && column < count)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.y.values + (size_t)row * width + first_column + column));
  }
}

// Likewise as they are, with a bias, or added to what is there. Lanes exchange two values of each 16 columns, so that
// each has four adjacent ones. All that is read of a row comes before anything is written.
template <int kColumns>
__device__ inline void write_sums(const Product& p, int rows, int first_row, int first_column,
                                  const float (&sums)[kColumns / 2]) {
  constexpr int kSixteens = kColumns / 16;
  const int thread = afresh(threadIdx.x % 128), lane = thread % 32, odd = lane % 2, width = p.y.width;
  const int column = first_column + 8 * odd + lane % 4 / 2 * 4, row = first_row + thread / 32 * 16 + lane / 4;
  const int left = p.w.n - column;  // of the columns that there are
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float4 values[kSixteens];
#pragma unroll
    for (int i = 0; i < kSixteens; i++) {
      const float *low = sums + 8 * i + 2 * h, *high = low + 4;
      const float first = __shfl_xor_sync(0xffffffffu, odd ? low[0] : high[0], 1),
                  second = __shfl_xor_sync(0xffffffffu, odd ? low[1] : high[1], 1);
      values[i] = odd ? make_float4(first, second, high[0], high[1]) : make_float4(low[0], low[1], first, second);
    }
    if (row + 8 * h >= rows) continue;
    if (p.bias) {
#pragma unroll
      for (int i = 0; i < kSixteens; i++)
        if (16 * i < left) values[i] = sum_of(values[i], *reinterpret_cast<const float4*>(p.bias + column + 16 * i));
    }
    if (p.y.tiles) {
#pragma unroll
      for (int i = 0; i < kSixteens; i++)
        if (16 * i < left)
          *reinterpret_cast<uint2*>(p.y.tiles + tile_offset(row + 8 * h, column + 16 * i, blocks_of(width))) =
              make_uint2(two_bf16(values[i].x, values[i].y), two_bf16(values[i].z, values[i].w));
      continue;
    }
    float4* to = reinterpret_cast<float4*>(p.y.values + (size_t)(row + 8 * h) * width + column);
    if (p.adds) {
      float4 before[kSixteens];
#pragma unroll
      for (int i = 0; i < kSixteens; i++) before[i] = 16 * i < left ? to[4 * i] : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kSixteens; i++) values[i] = sum_of(before[i], values[i]);
    }
#pragma unroll
    for (int i = 0; i < kSixteens; i++)
      if (16 * i < left) to[4 * i] = values[i];
  }
}
#endif

}  // namespace cuda
}  // namespace as
