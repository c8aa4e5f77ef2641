// Quantized rows as a serialized model holds them: plain row-major arrays, the same for every instruction set and
// number of ranks.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/kernels/kernels.h"

namespace as {

using QuantizedScale = std::remove_pointer_t<decltype(std::declval<Packed>().scales(0, 0))>;  // of format.h's panels

struct RowShape {
  int bits;                // of a weight: of 4, two in a byte, the even k in the lower half
  int64_t columns, group;  // k of a row, and of its groups (the last one may be shorter)

  int64_t row_bytes() const { return bits == 8 ? columns : (columns + 1) / 2; }
  int64_t groups() const { return (columns + group - 1) / group; }
};

// What InstantQuant makes.
struct QuantizedRows : RowShape {
  uint8_t* q;               // [rows, row_bytes()]
  QuantizedScale* scales;   // [rows, groups()]
  QuantizedScale* offsets;  // [rows, groups()]
};

// Rows of a matrix whose scales are laid out as the matrix' are (ScaleLayout).
struct StoredRows : RowShape {
  const uint8_t* q;               // [rows, row_bytes()]
  const char* scales;             // [rows, groups()] of the layout's type, or int8 of nested ones
  const char* zeros;              // the same of offsets, or uint8 points; null where there are none
  int64_t super_group;            // of nested scales
  const uint16_t* super_scales;   // float16 [rows, super_groups()]
  const uint16_t* super_offsets;  // null where there are no offsets

  int64_t super_groups() const { return super_group ? (columns + super_group - 1) / super_group : 0; }
  // The rows from `row` on, for matrix m.
  StoredRows from(const Packed& m, int64_t row) const;
  // Of a row, for Weights::source_hash().
  uint64_t hash(const Packed& m, int64_t row) const;
};

// Quantizes rows [r0, r1) of `source` into the same rows of `out`, which has its columns and groups. Returns how many
// values are NaN or infinite.
int64_t quantize_rows(const Kernels& kernels, const SourceRows& source, const QuantizedRows& out, int64_t r0,
                      int64_t r1);

// Lays rows [r0, r1) of w out from columns [column, column + w.k) of stored rows, the first of which is w's row
// `row_offset`. Every group of w must be part of one stored group.
void place_rows(const Packed& w, const StoredRows& rows, int64_t row_offset, int64_t column, int64_t r0, int64_t r1);

}  // namespace as
