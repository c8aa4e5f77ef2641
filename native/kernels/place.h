// Lays quantized rows out in panels (format.h), some rows at a time, transposed in registers.
#pragma once
#include <cstdint>
#include <cstring>

#include "format.h"

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

// Eight rows of eight bytes, `stride` apart, become eight columns.
AS_INLINE void transpose_bytes(const uint8_t* in, long stride, char* out, long out_stride) {
  const Byte16 lower = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Byte16 upper = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  Byte16 a[4], b[4];
  for (int i = 0; i < 4; i++) {
    uint64_t first, second;
    std::memcpy(&first, in + i * stride, 8);
    std::memcpy(&second, in + (i + 4) * stride, 8);
    a[i] = mix((Byte16)Long2{first, 0}, (Byte16)Long2{second, 0}, lower);
  }
  b[0] = mix(a[0], a[2], lower), b[1] = mix(a[0], a[2], upper), b[2] = mix(a[1], a[3], lower), b[3] = mix(a[1], a[3], upper);
  const Byte16 c[4] = {mix(b[0], b[2], lower), mix(b[0], b[2], upper), mix(b[1], b[3], lower), mix(b[1], b[3], upper)};
  for (int i = 0; i < 8; i++) {
    const uint64_t column = ((Long2)c[i / 2])[i % 2];
    std::memcpy(out + i * out_stride, &column, 8);
  }
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
AS_INLINE void transpose_lanes(const uint8_t* q, int unit, uint32_t centre, char* out, long out_stride) {
  Word4 row[4];
  for (int r = 0; r < 4; r++, q += kChunk) {
    std::memcpy(&row[r], q, 16);
    if (unit == 8) {
      Word4 rest;
      std::memcpy(&rest, q + 16, 16);
      row[r] = mix<0, 2, 4, 6>(row[r], rest) | mix<1, 3, 5, 7>(row[r], rest) << 4;
    }
    row[r] ^= centre;
  }
  const Word4 a = mix<0, 4, 1, 5>(row[0], row[2]), b = mix<2, 6, 3, 7>(row[0], row[2]);
  const Word4 c = mix<0, 4, 1, 5>(row[1], row[3]), d = mix<2, 6, 3, 7>(row[1], row[3]);
  const Word4 columns[4] = {mix<0, 4, 1, 5>(a, c), mix<2, 6, 3, 7>(a, c), mix<0, 4, 1, 5>(b, d), mix<2, 6, 3, 7>(b, d)};
  for (int i = 0; i < 4; i++, out += out_stride) std::memcpy(out, &columns[i], 16);
}

// Lays q of `rows` rows and n k, from k0 of a group on, at lane `lane` of the group's weights.
AS_INLINE void place(const Packed& w, const uint8_t (*q)[kChunk], int rows, int n, int k0, int lane, char* weights) {
  const long panel = w.panel;
  if (w.unit() == 1) {
    uint8_t centred[kRows][kChunk];
    for (int r = 0; r < kRows; r++)
      for (int i = 0; i < kChunk; i++) centred[r][i] = q[r][i] ^ 0x80;
    char* out = weights + k0 * panel + lane;
    int i = 0;
    if (rows == kRows)
      for (; i + 8 <= n; i += 8)
        for (int r = 0; r < kRows; r += 8) transpose_bytes(centred[r] + i, kChunk, out + i * panel + r, panel);
    for (; i < n; i++)
      for (int r = 0; r < rows; r++) out[i * panel + r] = (char)centred[r][i];
    return;
  }
  const int unit = w.unit();
  const uint32_t centre = w.planes ? 0 : 0x88888888u;
  char* out = weights + ((long)(k0 / unit) * panel + lane) * 4;
  if (rows == kRows)
    for (; n >= 4 * unit; n -= 4 * unit, q = reinterpret_cast<const uint8_t(*)[kChunk]>(q[0] + 4 * unit), out += 16 * panel)
      for (int r = 0; r < kRows; r += 4) transpose_lanes(q[0] + r * kChunk, unit, centre, out + r * 4, panel * 4);
  for (int i = 0; i < n; i += unit, out += panel * 4)
    for (int r = 0; r < rows; r++) {
      uint32_t first, second = 0;
      std::memcpy(&first, q[0] + r * kChunk + i, 4);
      if (unit == 8) std::memcpy(&second, q[0] + r * kChunk + i + 4, 4);
      const uint32_t lanes = (first | second << 4) ^ centre;
      std::memcpy(out + r * 4, &lanes, 4);
    }
}

}  // namespace as
