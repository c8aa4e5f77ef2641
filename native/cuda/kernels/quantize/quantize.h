// Conversion of weights and activations to the layouts and types that GEMMs read.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

// Copies rows [count, matrix.k] of type `source`, `stride` values apart, to rows [first, first + count) of a matrix.
// Adds to *bad the number of values that are NaN, infinite, or too large for a float16 matrix.
void pack_rows(const void* rows, SourceType source, int64_t stride, int count, const Matrix& matrix, int first,
               unsigned long long* bad, const Queue& queue);
// Quantizes rows [count, columns] in groups of `group` columns, bit for bit as the CPU backend
// (cpu/kernels/quantize.cpp), and writes the columns from `column` on to the matrix' rows from `first` on. The matrix'
// groups must divide `group`. ranges: scratch, two floats for each row and group. Adds the number of NaN and infinite
// values to *bad.
void quantize_rows(const void* rows, SourceType source, int64_t columns, int group, int64_t column, int count,
                   const Matrix& matrix, int first, float* ranges, unsigned long long* bad, const Queue& queue);
// Writes quantized values [count, k], a byte each, with bfloat16 scales and offsets [count, groups], to the matrix'
// rows from `first` on.
void place_rows(const uint8_t* quants, const uint16_t* scales, const uint16_t* offsets, int count, const Matrix& matrix,
                int first, const Queue& queue);

// The same for MXFP4: packed values [count, k / 2], the even column in the lower half, with stored scales (quantized.h)
// [count, groups].
void place_mx_rows(const uint8_t* values, const uint8_t* scales, int count, const Matrix& matrix, int first,
                   const Queue& queue);

// Whether e4m3 in groups has the same scales in all rows r of a 64-row block with r % 16 < 8, and in all others: so it
// is with FP8 in blocks of 128 x 128, also with gate and up rows interleaved. Waits for the device.
bool has_block_scales(const Matrix& matrix, const Queue& queue);

struct GemmArgs;

// 8-bit rows of activations (kernels/gemm/gemm_integer.h), sums of their segments, and a scale for each row. For
// weights with float groups, `sums` has the scales of each row's groups instead, each at its group's last block of K.
struct ByteRows {
  uint8_t* values = nullptr;
  float *sums = nullptr, *scales = nullptr;
};
constexpr int kMaxIntegers = 131000;  // columns for which exact sums of products fit 32 bits
size_t byte_rows_bytes(int rows, int k);
ByteRows byte_rows(char* memory, int rows, int k);

// Interleaves the rows of gate and up projections: each 16 rows of `to` are 8 rows of the first half of `from` and the
// 8 corresponding rows of the second half. Both are in tiles or quantized; `to` has paired_rows(from.n) rows.
constexpr int paired_rows(int n) { return (n / 2 + 7) / 8 * 16; }
void pair_rows(const Matrix& from, const Matrix& to, const Queue& queue);

// Quantizes p.x to p.bytes.
void quantize_activations(const GemmArgs& p, int rows, const Queue& queue);
// RMS norm of rows [rows, p.w.k], quantized to p.bytes by the same kernel. norms_into_bytes(): whether it supports a
// width.
void rms_norm_into_bytes(const float* x, const Norm& norm, const GemmArgs& p, int rows, const Queue& queue);
bool norms_into_bytes(int width);

}  // namespace as::cuda
