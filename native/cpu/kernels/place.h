// Moves quantized rows into panels (format.h), several rows at a time, transposed in registers.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels/format.h"
#include "cpu/words.h"

namespace as {

constexpr int kPlacedRows = 16;  // rows moved together: a cache line of 32-bit lanes
constexpr int kPlacedK = 64;     // k of a chunk; a multiple of every unit and vector

typedef uint8_t Byte16 __attribute__((vector_size(16)));
typedef uint64_t Long2 __attribute__((vector_size(16)));

AS_INLINE Byte16 mix(Byte16 a, Byte16 b, Byte16 order) {
#if defined(__clang__)
  Byte16 out;
  for (int i = 0; i < 16; i++) out[i] = order[i] < 16 ? a[order[i]] : b[order[i] - 16];
  return out;
#else
  return __builtin_shuffle(a, b, order);
#endif
}

// Transposes the next four 32-bit lanes of four rows. A lane has eight 4-bit values or four 8-bit ones.
AS_INLINE void transpose_lanes(const uint8_t* q, int unit, char* out, int64_t out_stride) {
  Word4 row[4];
  for (int r = 0; r < 4; r++, q += kPlacedK) {
    std::memcpy(&row[r], q, 16);
    if (unit == 8) {
      Word4 rest;
      std::memcpy(&rest, q + 16, 16);
      row[r] = shuffle<0, 2, 4, 6>(row[r], rest) | shuffle<1, 3, 5, 7>(row[r], rest) << 4;
    }
  }
  transpose_words(row[0], row[1], row[2], row[3], out, out_stride);
}

// Moves q of `rows` rows and n k, from the group's k0 on, into the group's weights, to lanes from `lane` on.
AS_INLINE void place(const Packed& w, const uint8_t (*q)[kPlacedK], int rows, int n, int k0, int lane, char* weights) {
  const int64_t panel = w.panel;
  const int unit = w.unit();
  char* out = weights + ((int64_t)(k0 / unit) * panel + lane) * 4;
  if (rows % 4 == 0)
    for (; n >= 4 * unit;
         n -= 4 * unit, q = reinterpret_cast<const uint8_t(*)[kPlacedK]>(q[0] + 4 * unit), out += 16 * panel)
      for (int r = 0; r < rows; r += 4) transpose_lanes(q[0] + r * kPlacedK, unit, out + r * 4, panel * 4);
  for (int i = 0; i < n; i += unit, out += panel * 4)
    for (int r = 0; r < rows; r++) {
      uint32_t first, second = 0;
      std::memcpy(&first, q[0] + r * kPlacedK + i, 4);
      if (unit == 8) std::memcpy(&second, q[0] + r * kPlacedK + i + 4, 4);
      const uint32_t lanes = first | second << 4;
      std::memcpy(out + r * 4, &lanes, 4);
    }
}

}  // namespace as
