// Quantized rows as a serialized model holds them: plain row-major arrays, the same for every instruction set and
// number of ranks.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cpu/kernels/kernels.h"

namespace as {

using QuantizedScale = std::remove_pointer_t<decltype(std::declval<Packed>().scales(0, 0))>;  // of format.h's panels

template <bool kConst>
struct QuantizedRowsOf {
  template <typename T>
  using Pointer = std::conditional_t<kConst, const T*, T*>;
  Pointer<uint8_t> q;               // [rows, row_bytes()]: a weight a byte; of 4 bits two, the even k in the lower half
  Pointer<QuantizedScale> scales;   // [rows, groups()]
  Pointer<QuantizedScale> offsets;  // [rows, groups()]
  int bits;
  int64_t columns, group;  // k of a row, and of its groups (the last one may be shorter)

  int64_t row_bytes() const { return bits == 8 ? columns : (columns + 1) / 2; }
  int64_t groups() const { return (columns + group - 1) / group; }
};
using QuantizedRows = QuantizedRowsOf<false>;
using StoredRows = QuantizedRowsOf<true>;

// Quantizes rows [r0, r1) of `source` into the same rows of `out`, which has its columns and groups. Returns how many
// values are NaN or infinite.
int64_t quantize_rows(const Kernels& kernels, const SourceRows& source, const QuantizedRows& out, int64_t r0,
                      int64_t r1);

// Lays rows [r0, r1) of w out from columns [column, column + w.k) of stored rows, the first of which is w's row
// `row_offset`. Every group of w must be part of one stored group.
void place_rows(const Packed& w, const StoredRows& rows, int64_t row_offset, int64_t column, int64_t r0, int64_t r1);

}  // namespace as
