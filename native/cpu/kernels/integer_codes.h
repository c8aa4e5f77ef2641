// What a 4-bit code of a weight stands for in integer products: an unsigned byte, `kMiddle` more than the integer.
//
// e2m1's values times 2 are integers of at most 12. Codes are stored inverted: a zero byte then stands for 0, as in
// int4, so that the padding of groups and the upper halves of 16-bit lanes need no mask.
#pragma once
#include <cstdint>

#include "cpu/kernels/format.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// By inverted code: 2 * e2m1 + 12.
alignas(16) constexpr uint8_t kE2M1Integers[16] = {0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12};

struct PlainCodes {
  static constexpr int kMiddle = 8;
  static AS_INLINE vi of(vi codes) { return codes; }
#if defined(AS_ISA_NEON)
  static AS_INLINE uint8x16_t of(uint8x16_t codes) { return codes; }
#endif
};

// of(): bytes of 0 to 15.
struct E2M1Codes {
  static constexpr int kMiddle = 12;
#if defined(AS_ISA_AVX512)
  static AS_INLINE vi of(vi codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kE2M1Integers)), codes);
  }
#elif defined(AS_ISA_AVX2)
  static AS_INLINE vi of(vi codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kE2M1Integers)), codes);
  }
#elif defined(AS_ISA_SVE)
  static AS_INLINE vi of(vi codes) {
    const svuint8_t table = svld1rq_u8(svptrue_b8(), kE2M1Integers);
    return svreinterpret_s32_u8(svtbl_u8(table, svreinterpret_u8_s32(codes)));
  }
#else
  static AS_INLINE uint8x16_t of(uint8x16_t codes) { return vqtbl1q_u8(vld1q_u8(kE2M1Integers), codes); }
  static AS_INLINE vi of(vi codes) { return vreinterpretq_s32_u8(of(vreinterpretq_u8_s32(codes))); }
#endif
};

}  // namespace
}  // namespace AS_ISA
}  // namespace as
