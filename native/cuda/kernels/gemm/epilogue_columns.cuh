// Epilogue of warpgroups whose first wgmma operand is the weights: 64 columns of the result and several rows each.
#pragma once
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// How sums become values: unchanged, times the scale of their row of 8-bit activations, or, for floats, times the scale
// of the column and then that of the row.
enum class SumScales { none, rows, columns_and_rows };

// A thread's sums in wgmma's order: number i belongs to row i / 4 * 8 + lane % 4 * 2 + i % 2 from first_row on, and to
// the block's column warp * 16 + lane / 4 + i % 4 / 2 * 8. Gate and up columns are interleaved as in pair_rows().
// of_rows: scales of the rows.
template <SumScales kScales, int kValues>
__device__ inline void epilogue_columns(const GemmArgs& p, int rows, int first_row, int column_block,
                                        float (&sums)[kValues], const float* of_rows) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = first_row + lane % 4 * 2,
            core = warp * 16 + lane / 4;
  if constexpr (kScales != SumScales::none) {
    float of_columns[2];
    if constexpr (kScales == SumScales::columns_and_rows)
#pragma unroll
      for (int i = 0; i < 2; i++)
        of_columns[i] = __uint_as_float(p.w.quants.scales[scale_of(column_block * kBlock + core + 8 * i, 0, 1)]);
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      const int at = row + i / 4 * 8 + i % 2;
      if constexpr (kScales == SumScales::columns_and_rows) sums[i] = __fmul_rn(sums[i], of_columns[i % 4 / 2]);
      sums[i] = __fmul_rn(sums[i], at < rows ? of_rows[at] : 0.0f);
    }
  }
  if (p.gated) {
    const int column = column_block * (kBlock / 2) + warp * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < kValues; i += 4)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (const int at = row + i / 4 * 8 + j; at < rows && column < p.y.width)
          finish_gated(p, at, column, sums[i + j], sums[i + 2 + j]);
  } else {
    constexpr int kTogether = kValues < 8 ? kValues : 8;
#pragma unroll
    for (int i = 0; i < kValues; i += kTogether)
      finish<kTogether>(p, rows, p.w.n, sums + i, [&](int j) {
        return Place{row + (i + j) / 4 * 8 + j % 2, column_block * kBlock + core + j % 4 / 2 * 8};
      });
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
