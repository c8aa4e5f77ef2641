// The rate at which 8-bit integers are multiplied and summed in 32 bits: the ceiling of w8a8 and w4a8.
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace as {
namespace AS_ISA {

// `rounds` x 12 independent chains in registers; returns how many multiplications and additions that were.
double integer_multiply_add(long rounds, float* keep) {
#if defined(AS_ISA_AVX512) || defined(AS_ISA_AVX2)
#if defined(AS_ISA_AVX512)
  using vi = __m512i;
  const vi bytes = _mm512_set1_epi8(3), ones = _mm512_set1_epi16(1);
#else
  using vi = __m256i;
  const vi bytes = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
#endif
  vi a[12];
  std::memset(a, 1, sizeof a);
  for (long r = 0; r < rounds; r++) {
    for (int i = 0; i < 12; i++) {
#if defined(__AVX512VNNI__) && defined(AS_ISA_AVX512)
      (void)ones;
      a[i] = _mm512_dpbusd_epi32(a[i], bytes, bytes);
#elif defined(AS_ISA_AVX512)
      vi x = bytes;
      __asm__("" : "+v"(x));  // the product is to be computed anew each time
      a[i] = _mm512_add_epi32(a[i], _mm512_madd_epi16(_mm512_maddubs_epi16(x, bytes), ones));
#else
      vi x = bytes;
      __asm__("" : "+x"(x));
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, bytes), ones));
#endif
      __asm__("" : "+x"(a[i]));
    }
  }
  int32_t sums[12 * sizeof(vi) / 4], total = 0;
  std::memcpy(sums, a, sizeof a);
  for (int32_t s : sums) total ^= s;
  *keep = (float)total;
  return 2.0 * sizeof(vi) * 12 * rounds;
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
