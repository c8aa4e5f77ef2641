// The AVX2 part of place_rows(): moves rows of quantized values into panels, eight rows at a time, transposed in
// registers. Every x86-64 instruction set that kernels are compiled for has AVX2. Elsewhere the functions do nothing.
#pragma once
#include <cstdint>

#include "cpu/quantized.h"

namespace as {

// Moves columns [column, column + k) of stored rows [row, row + rows) into a panel of w, from lane `lane` on. rows: a
// multiple of eight. Returns the largest k that whole vectors cover, or 0. Adds the number of e4m3 NaN to `bad`.
int place_eights(const Packed& w, const StoredRows& stored, int64_t column, int64_t row, int rows, int panel, int lane,
                 int64_t& bad);

// Unpacks the groups' scales, and minimums if any, of block b of a K type of stored rows [row, row + 8): those of a
// group are adjacent, and the next group's follow `stride` bytes further. Returns false if it does nothing.
bool unpack_scales_of_eight(const StoredRows& stored, int64_t row, int64_t b, int8_t* scales, int8_t* minimums,
                            int64_t stride);

// Moves rows of words (Packing::words), `stride` bytes apart, to rows of lanes. A lane has eight k, which are
// reordered, or four, which are copied. Returns how many of a row's `lanes` it moved: a multiple of eight.
int place_words_of_eight(const uint8_t* from, int64_t stride, int rows, int lanes, bool eights, char* to,
                         int64_t to_stride);

// Moves words of octets (Packing::octets) for eight k. `stride`: bytes from one k to the next. The lanes of word o's
// eight rows go to to[o].
void place_words_of_octets(const uint8_t* from, int64_t stride, int octets, char* const* to);

// out[i] = scale * q[i] + 0 for n values of e4m3: without a negative zero, as matrices have it; rounded[i]: the same in
// bfloat16. Does all of them on any processor. Returns the number of NaN.
int64_t dequantize_e4m3(const uint8_t* q, int64_t n, float scale, float* out, uint16_t* rounded);

}  // namespace as
