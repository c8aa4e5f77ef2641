// Transposes 16 x 16 units of 32 bits in registers.
#pragma once
#include "cpu/simd.h"

#if defined(AS_ISA_AVX512)
namespace as {
namespace AS_ISA {

// 16 rows, `stride` bytes apart, to 16 rows, `to_stride` bytes apart. In each step, blocks of twice the size change
// places.
AS_INLINE void transpose_16(const char* rows, size_t stride, char* out, size_t to_stride = 64) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; t++) a[t] = _mm512_loadu_si512(rows + t * stride);
#pragma GCC unroll 8
  for (int t = 0; t < 16; t += 2)
    b[t] = _mm512_unpacklo_epi32(a[t], a[t + 1]), b[t + 1] = _mm512_unpackhi_epi32(a[t], a[t + 1]);
#pragma GCC unroll 4
  for (int t = 0; t < 16; t += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
      a[t + 2 * i] = _mm512_unpacklo_epi64(b[t + i], b[t + 2 + i]),
                a[t + 2 * i + 1] = _mm512_unpackhi_epi64(b[t + i], b[t + 2 + i]);
  // a[4 g + c]: units 4 l + c of rows 4 g to 4 g + 3 in lane l of 128 bits.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee),
                  low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44),
                  high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    _mm512_storeu_si512(out + to_stride * c, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(out + to_stride * (4 + c), _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(out + to_stride * (8 + c), _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(out + to_stride * (12 + c), _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}

}  // namespace AS_ISA
}  // namespace as
#endif
