// Lays quantized rows out in panels (format.h), some rows at a time, transposed in registers.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels/format.h"

namespace as {

constexpr int kRows = 16;   // rows laid out together: of 32-bit lanes a cache line
constexpr int kChunk = 64;  // k of a piece; a multiple of every unit and vector

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

typedef uint32_t Word4 __attribute__((vector_size(16)));

template <int A, int B, int C, int D>
AS_INLINE Word4 mix(Word4 a, Word4 b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, A, B, C, D);
#else
  return __builtin_shuffle(a, b, Word4{A, B, C, D});
#endif
}

// The next four 32-bit lanes of each of four rows, as they are laid out: of eight 4-bit values, or of four of 8 bits.
AS_INLINE void transpose_lanes(const uint8_t* q, int unit, char* out, long out_stride) {
  Word4 row[4];
  for (int r = 0; r < 4; r++, q += kChunk) {
    std::memcpy(&row[r], q, 16);
    if (unit == 8) {
      Word4 rest;
      std::memcpy(&rest, q + 16, 16);
      row[r] = mix<0, 2, 4, 6>(row[r], rest) | mix<1, 3, 5, 7>(row[r], rest) << 4;
    }
  }
  const Word4 a = mix<0, 4, 1, 5>(row[0], row[2]), b = mix<2, 6, 3, 7>(row[0], row[2]);
  const Word4 c = mix<0, 4, 1, 5>(row[1], row[3]), d = mix<2, 6, 3, 7>(row[1], row[3]);
  const Word4 columns[4] = {mix<0, 4, 1, 5>(a, c), mix<2, 6, 3, 7>(a, c), mix<0, 4, 1, 5>(b, d), mix<2, 6, 3, 7>(b, d)};
  for (int i = 0; i < 4; i++, out += out_stride) std::memcpy(out, &columns[i], 16);
}

// Lays q of `rows` rows and n k, from k0 of a group on, at lane `lane` of the group's weights.
AS_INLINE void place(const Packed& w, const uint8_t (*q)[kChunk], int rows, int n, int k0, int lane, char* weights) {
  const long panel = w.panel;
  const int unit = w.unit();
  char* out = weights + ((long)(k0 / unit) * panel + lane) * 4;
  if (rows == kRows)
    for (; n >= 4 * unit;
         n -= 4 * unit, q = reinterpret_cast<const uint8_t(*)[kChunk]>(q[0] + 4 * unit), out += 16 * panel)
      for (int r = 0; r < kRows; r += 4) transpose_lanes(q[0] + r * kChunk, unit, out + r * 4, panel * 4);
  for (int i = 0; i < n; i += unit, out += panel * 4)
    for (int r = 0; r < rows; r++) {
      uint32_t first, second = 0;
      std::memcpy(&first, q[0] + r * kChunk + i, 4);
      if (unit == 8) std::memcpy(&second, q[0] + r * kChunk + i + 4, 4);
      const uint32_t lanes = first | second << 4;
      std::memcpy(out + r * 4, &lanes, 4);
    }
}

}  // namespace as
