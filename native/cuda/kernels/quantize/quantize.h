// Weights and activations into the layouts and types that products read.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

// Puts rows [count, matrix.k] of `source`, `stride` values apart, into rows [first, first + count) of a matrix; adds
// how many values are NaN or infinite, or too large for a matrix of float16, to *bad.
void pack_rows(const void* rows, SourceType source, int64_t stride, int count, const Matrix& matrix, int first,
               unsigned long long* bad, const Queue& queue);
// Quantizes rows [count, columns], groups of so many columns each, as InstantQuant does (cpu/kernels/quantize.cpp), to
// the bit: into rows from `first` on of a matrix whose columns are those from `column` on, and whose groups are parts
// of these. ranges: of each row and group two floats, to work in. Adds how many values are NaN or infinite to *bad.
void quantize_rows(const void* rows, SourceType source, int64_t columns, int group, int64_t column, int count,
                   const Matrix& matrix, int first, float* ranges, unsigned long long* bad, const Queue& queue);
// Places codes [count, k] a byte each, and scales and offsets [count, groups] in bfloat16, into rows from `first` on.
void place_rows(const uint8_t* quants, const uint16_t* scales, const uint16_t* offsets, int count, const Matrix& matrix,
                int first, const Queue& queue);

struct GemmArgs;

// Rows of activations of 8 bits (kernels/gemm/gemm_integer.h), with the sums of parts of them, and each row's scale.
struct ByteRows {
  uint8_t* values = nullptr;
  float *sums = nullptr, *scales = nullptr;
};
constexpr int kMostIntegers = 131000;  // columns: exact sums of products fit 32 bits
size_t byte_rows_bytes(int rows, int k);
ByteRows byte_rows(char* memory, int rows, int k);

// Puts rows of gates and of what they gate side by side: in each 16 rows of `to` 8 of the first half of `from`, and the
// 8 of the second that belong to them. Both in tiles or codes; `to` has paired_rows(from.n).
constexpr int paired_rows(int n) { return (n / 2 + 7) / 8 * 16; }
void pair_rows(const Matrix& from, const Matrix& to, const Queue& queue);

// Rows as such products take them: p.x becomes p.bytes.
void quantize_activations(const GemmArgs& p, int rows, const Queue& queue);
// Rows [rows, p.w.k] normed, and quantized at once, of rows so wide at most.
void rms_norm_into_bytes(const float* x, const Norm& norm, const GemmArgs& p, int rows, const Queue& queue);
bool norms_into_bytes(int width);

}  // namespace as::cuda
