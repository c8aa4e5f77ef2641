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
  // The code runs once or twice in a launch, which fetches it anew. So it is a loop over some of the sums at a time,
  // and the others move up in their registers.
  constexpr int kTogether = kValues < 8 ? kValues : 8;
#pragma unroll 1
  for (int eight = 0; eight < kValues / 4; eight += kTogether / 4) {
    const int at_row = row + eight * 8;
    if (p.gated) {
      const int column = column_block * (kBlock / 2) + warp * 8 + lane / 4;
#pragma unroll
      for (int i = 0; i < kTogether; i++)
        if (const int at = at_row + i / 4 * 8 + i % 2; i % 4 < 2 && at < rows && column < p.y.width)
          finish_gated(p, at, column, sums[i], sums[i + 2]);
    } else {
      finish<kTogether>(p, rows, p.w.n, sums, [&](int i) {
        return Place{at_row + i / 4 * 8 + i % 2, column_block * kBlock + core + i % 4 / 2 * 8};
      });
    }
#pragma unroll
    for (int i = 0; i + kTogether < kValues; i++) sums[i] = sums[i + kTogether];
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
