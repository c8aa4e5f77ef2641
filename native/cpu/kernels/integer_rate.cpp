// Measures the peak rate of 8-bit multiplications summed in 32 bits: the roofline of w8a8 and w4a8.
#include <cstdint>

#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// vb: an operand of dot(), which makes kProducts products. AS_REGISTER: the inline assembly constraint of its register.
#if defined(AS_ISA_AVX512) || defined(AS_ISA_AVX2)
#define AS_REGISTER "+v"
using vb = vi;
constexpr int kProducts = 4 * W;
inline vb bytes(int8_t x) { return iset(0x01010101 * x); }
#if defined(AS_ISA_VNNI)
inline vi dot(vi sum, vb x) { return idot8(sum, x, x); }
#elif defined(AS_ISA_AVX512)
inline vi dot(vi sum, vb x) { return iadd(sum, madd16(_mm512_maddubs_epi16(x, x), iset(0x00010001))); }
#else
inline vi dot(vi sum, vb x) { return iadd(sum, madd16(_mm256_maddubs_epi16(x, x), iset(0x00010001))); }
#endif
#elif defined(AS_ISA_SVE)
#define AS_REGISTER "+w"
typedef svint8_t vb AS_SVE_FIXED;
constexpr int kProducts = 4 * W;
inline vb bytes(int8_t x) { return svdup_n_s8(x); }
inline vi dot(vi sum, vb x) { return svdot_s32(sum, x, x); }
#else
#define AS_REGISTER "+w"
using vb = int8x16_t;
inline vb bytes(int8_t x) { return vdupq_n_s8(x); }
#if defined(AS_ISA_DOTPROD)
constexpr int kProducts = 16;
inline vi dot(vi sum, vb x) { return vdotq_s32(sum, x, x); }
#else
constexpr int kProducts = 4;  // widened in advance
inline vi dot(vi sum, vb x) {
  const int16x8_t wide = vreinterpretq_s16_s8(x);
  return vmlal_s16(sum, vget_low_s16(wide), vget_low_s16(wide));
}
#endif
#endif

}  // namespace

// `rounds` x 12 independent chains in registers. Returns the number of multiplications and additions.
double integer_multiply_add(int64_t rounds, float* keep) {
  vb x = bytes(3);
  vi a[12];
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) a[i] = iset(i);
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) {
      __asm__("" : AS_REGISTER(x));  // forces the products to be computed anew
      a[i] = dot(a[i], x);
    }
  }
  int32_t total = 0;
#pragma GCC unroll 12
  for (int i = 0; i < 12; i++) {
    alignas(64) int32_t lanes[W];
    __builtin_memcpy(lanes, &a[i], sizeof lanes);
    total ^= lanes[0] ^ lanes[W - 1];
  }
  *keep = (float)total;
  return 2.0 * kProducts * 12 * rounds;
}

}  // namespace AS_ISA
}  // namespace as
