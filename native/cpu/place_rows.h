// Rows of codes into panels, eight rows at a time, transposed in registers: the part of place_rows() that takes the
// time. Instructions of AVX2, which every instruction set of x86-64 that kernels are compiled for has; none elsewhere.
#pragma once
#include <cstdint>

#include "cpu/quantized.h"

namespace as {

// Columns [column, column + k) of stored rows [row, row + rows) into lanes from `lane` on of a panel of w, for rows a
// multiple of eight and the largest k that its whole vectors reach, which is returned: 0 if there are no such. Adds to
// `bad` how many codes of e4m3 are NaN.
int place_eights(const Packed& w, const StoredRows& stored, int64_t column, int64_t row, int rows, int panel, int lane,
                 int64_t& bad);

// Rows of words (Packing::words), `stride` bytes apart, to rows of lanes; of eight k each, or of four, which lie as
// they do. Returns how many of a row's `lanes` it has laid out: whole eights, or none.
int place_words_of_eight(const uint8_t* from, int64_t stride, int rows, int lanes, bool eights, char* to,
                         int64_t to_stride);

// Words of octets (Packing::octets) of k <= `length`, a multiple of eight, `stride` bytes from one k's to the next: the
// lanes of the eight rows of word o to to[o], those of the next eight k `lane_stride` further on.
void place_words_of_octets(const uint8_t* from, int64_t stride, int length, int octets, char* const* to,
                           int64_t lane_stride);

}  // namespace as
