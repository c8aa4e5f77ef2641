// The rate at which 8-bit integers are multiplied and summed in 32 bits: the ceiling of w8a8 and w4a8.
#include <cstdint>

#include "simd.h"

namespace as {
namespace AS_ISA {

// `rounds` x 12 independent chains in registers; returns how many multiplications and additions that were.
double integer_multiply_add(long rounds, float* keep) {
#if defined(AS_ISA_AVX512)
  [[maybe_unused]] const __m512i one = _mm512_set1_epi16(1);
  __m512i x = _mm512_set1_epi8(3), a[12];
  for (int i = 0; i < 12; i++) a[i] = _mm512_set1_epi32(i);
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      __asm__("" : "+v"(x));  // products are to be computed anew each time
#if defined(__AVX512VNNI__)
      a[i] = _mm512_dpbusd_epi32(a[i], x, x);
#else
      a[i] = _mm512_add_epi32(a[i], _mm512_madd_epi16(_mm512_maddubs_epi16(x, x), one));
#endif
    }
  }
  for (int i = 1; i < 12; i++) a[0] = _mm512_add_epi32(a[0], _mm512_xor_si512(a[i], one));
  *keep = (float)_mm512_reduce_add_epi32(a[0]);
  return 2.0 * 64 * 12 * rounds;
#elif defined(AS_ISA_AVX2)
  const __m256i one = _mm256_set1_epi16(1);
  __m256i x = _mm256_set1_epi8(3), a[12];
  for (int i = 0; i < 12; i++) a[i] = _mm256_set1_epi32(i);
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      __asm__("" : "+x"(x));  // products are to be computed anew each time
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), one));
    }
  }
  for (int i = 1; i < 12; i++) a[0] = _mm256_add_epi32(a[0], _mm256_xor_si256(a[i], one));
  alignas(32) int32_t sums[8];
  _mm256_store_si256((__m256i*)sums, a[0]);
  *keep = (float)(sums[0] ^ sums[5]);
  return 2.0 * 32 * 12 * rounds;
#elif defined(AS_ISA_SVE)
  typedef svint32_t vi AS_SVE_FIXED;
  typedef svint8_t vb AS_SVE_FIXED;
  vb x = svdup_n_s8(3);
  vi a[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) a[i] = svdup_n_s32(i);
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      __asm__("" : "+w"(x));
      a[i] = svdot_s32(a[i], x, x);
    }
  }
  int64_t total = 0;
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) total ^= svaddv_s32(vall(), a[i]);
  *keep = (float)total;
  return 2.0 * 4 * W * 12 * rounds;
#elif defined(AS_ISA_DOTPROD)
  int8x16_t x = vdupq_n_s8(3);
  int32x4_t a[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) a[i] = vdupq_n_s32(i);
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      __asm__("" : "+w"(x));
      a[i] = vdotq_s32(a[i], x, x);
    }
  }
  int32_t total = 0;
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) total ^= vaddvq_s32(a[i]);
  *keep = (float)total;
  return 2.0 * 16 * 12 * rounds;
#else
  int16x8_t x = vdupq_n_s16(3);
  int32x4_t a[12];
  for (int i = 0; i < 12; i++) a[i] = vdupq_n_s32(i);
  for (long r = 0; r < rounds; r++)
    for (int i = 0; i < 12; i++) {
      __asm__("" : "+w"(x));
      a[i] = vmlal_s16(a[i], vget_low_s16(x), vget_high_s16(x));
    }
  int32_t total = 0;
  for (int i = 0; i < 12; i++) total ^= vaddvq_s32(a[i]);
  *keep = (float)total;
  return 2.0 * 4 * 12 * rounds;
#endif
}

}  // namespace AS_ISA
}  // namespace as
