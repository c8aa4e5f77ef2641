// The vectors of the instruction set that a kernel is compiled for: `vf`, W floats, and `vi`, the same register as
// integers of 32 bits (or as an operation says). One source, one namespace per ISA. Fused multiply-adds are explicit
// (the build forbids contraction), so that all loops over the same recipe round alike. Bitwise invariance depends on
// it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(AS_ISA_AVX512) || defined(AS_ISA_AVX2)
#include <immintrin.h>
#elif defined(AS_ISA_SVE)
#include <arm_neon.h>
#include <arm_sve.h>
#elif defined(AS_ISA_NEON)
#include <arm_neon.h>
#else
#error "compile kernels with -DAS_ISA=name -DAS_ISA_NAME"
#endif

namespace as {
namespace AS_ISA {

// The four bytes at p, aligned or not.
inline int32_t four_bytes(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(AS_ISA_AVX512)

using vf = __m512;
constexpr int W = 16;
inline vf vzero() { return _mm512_setzero_ps(); }
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline vf vload_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^t for t >= -126 (error 1.4e-7): 2^floor(t) times a polynomial of the remainder 0 <= r < 1, which is 1 at 0. NaN is
// propagated.
inline vf vexp2(vf t) {
  const vf r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = vfma(vset(0.0018671313300728798f), r, vset(0.009017027914524078f));
  p = vfma(p, r, vset(0.05579991638660431f));
  p = vfma(p, r, vset(0.24016444385051727f));
  p = vfma(p, r, vset(0.6931512951850891f));
  p = vfma(p, r, vset(1.0f));
  return _mm512_scalef_ps(p, t);  // takes the floor of t
}
// a * 2^n, n integral in [-126, 127]
inline vf vscale2(vf a, vf n) {
  return _mm512_mul_ps(
      a, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23)));
}

using vi = __m512i;
inline vi izero() { return _mm512_setzero_si512(); }
inline vi iset(int32_t x) { return _mm512_set1_epi32(x); }
inline vi iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, vi x) { _mm512_storeu_si512(p, x); }
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
inline vi isub16(vi a, vi b) { return _mm512_sub_epi16(a, b); }
inline vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
template <int N>
inline vi shift_right16(vi a) {
  return N ? _mm512_srli_epi16(a, N) : a;
}
template <int N>
inline vi shift_right(vi a) {  // arithmetic
  return _mm512_srai_epi32(a, N);
}
template <int N>
inline vi shift_left(vi a) {
  return _mm512_slli_epi32(a, N);
}
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline int32_t isum(vi a) { return _mm512_reduce_add_epi32(a); }
inline vi madd16(vi a, vi b) { return _mm512_madd_epi16(a, b); }
// Inline assembly below, because GCC 12 copies the accumulator before and after each of these intrinsics.
#if defined(AS_ISA_VNNI)
// acc + four products of u8 and s8 in every lane.
inline vi idot8(vi acc, vi u8, vi s8) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8));
  return acc;
}
// acc + two 16-bit products in every lane.
inline vi idot16(vi acc, vi a, vi b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#else
inline vi idot16(vi acc, vi a, vi b) { return iadd(acc, madd16(a, b)); }
#endif
#if defined(AS_ISA_AVX512_BF16)
// acc + two bfloat16 products in every lane, one after the other.
inline vf vdot_bf16(vf acc, vi a, vi b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#endif

#elif defined(AS_ISA_AVX2)

using vf = __m256;
constexpr int W = 8;
inline vf vzero() { return _mm256_setzero_ps(); }
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline void vstore(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline vf vload_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf vload_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vscale2(vf a, vf n) {
  return _mm256_mul_ps(
      a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}

using vi = __m256i;
inline vi izero() { return _mm256_setzero_si256(); }
inline vi iset(int32_t x) { return _mm256_set1_epi32(x); }
inline vi iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void istore(void* p, vi x) { _mm256_storeu_si256((__m256i*)p, x); }
inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi isub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
inline vi isub16(vi a, vi b) { return _mm256_sub_epi16(a, b); }
inline vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
template <int N>
inline vi shift_right16(vi a) {
  return N ? _mm256_srli_epi16(a, N) : a;
}
template <int N>
inline vi shift_right(vi a) {
  return _mm256_srai_epi32(a, N);
}
template <int N>
inline vi shift_left(vi a) {
  return _mm256_slli_epi32(a, N);
}
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline int32_t isum(vi a) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
inline vi madd16(vi a, vi b) { return _mm256_madd_epi16(a, b); }
#if defined(AS_ISA_VNNI) && defined(AS_AVX2_VNNI_EMULATED)
inline vi idot16(vi acc, vi a, vi b) { return iadd(acc, madd16(a, b)); }
inline vi idot8(vi acc, vi u8, vi s8) {
  const vi even = madd16(iand(u8, iset(0x00ff00ff)), _mm256_srai_epi16(_mm256_slli_epi16(s8, 8), 8));
  return iadd(acc, iadd(even, madd16(shift_right16<8>(u8), _mm256_srai_epi16(s8, 8))));
}
#elif defined(AS_ISA_VNNI)
// Forces the VEX encoding: assemblers prefer the AVX-512 encoding, which these processors lack.
inline vi idot8(vi acc, vi u8, vi s8) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u8), "x"(s8));
  return acc;
}
inline vi idot16(vi acc, vi a, vi b) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
#else
inline vi idot16(vi acc, vi a, vi b) { return iadd(acc, madd16(a, b)); }
#endif

#elif defined(AS_ISA_SVE)

// Vectors of the compiled-in length, so that arrays of them are possible. Every operation uses all lanes.
#define AS_SVE_FIXED __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)))
typedef svfloat32_t vf AS_SVE_FIXED;
constexpr int W = __ARM_FEATURE_SVE_BITS / 32;
inline svbool_t vall() { return svptrue_b32(); }
inline vf vzero() { return svdup_n_f32(0); }
inline vf vset(float x) { return svdup_n_f32(x); }
inline vf vload(const float* p) { return svld1_f32(vall(), p); }
inline void vstore(float* p, vf v) { svst1_f32(vall(), p, v); }
inline vf vload_bf16(const uint16_t* p) {
  return svreinterpret_f32_u32(svlsl_n_u32_x(vall(), svld1uh_u32(vall(), p), 16));
}
inline vf vload_f16(const uint16_t* p) {
  return svcvt_f32_f16_x(vall(), svreinterpret_f16_u32(svld1uh_u32(vall(), p)));
}
inline vf vfma(vf a, vf b, vf c) { return svmla_f32_x(vall(), c, a, b); }
inline vf vadd(vf a, vf b) { return svadd_f32_x(vall(), a, b); }
inline vf vsub(vf a, vf b) { return svsub_f32_x(vall(), a, b); }
inline vf vmul(vf a, vf b) { return svmul_f32_x(vall(), a, b); }
inline vf vdiv(vf a, vf b) { return svdiv_f32_x(vall(), a, b); }
inline vf vmax(vf a, vf b) { return svmax_f32_x(vall(), a, b); }
inline vf vmin(vf a, vf b) { return svmin_f32_x(vall(), a, b); }
inline vf vround(vf a) { return svrintn_f32_x(vall(), a); }
inline vf vscale2(vf a, vf n) { return svscale_f32_x(vall(), a, svcvt_s32_f32_x(vall(), n)); }

typedef svint32_t vi AS_SVE_FIXED;
inline vi izero() { return svdup_n_s32(0); }
inline vi iset(int32_t x) { return svdup_n_s32(x); }
inline vi iload(const void* p) { return svld1_s32(vall(), static_cast<const int32_t*>(p)); }
inline vi iadd(vi a, vi b) { return svadd_s32_x(vall(), a, b); }
inline vi isub(vi a, vi b) { return svsub_s32_x(vall(), a, b); }
template <int N>
inline vi shift_right(vi a) {
  return svasr_n_s32_x(vall(), a, N);
}
template <int N>
inline vi shift_left(vi a) {
  return svlsl_n_s32_x(vall(), a, N);
}
inline vf to_float(vi a) { return svcvt_f32_s32_x(vall(), a); }
inline int32_t isum(vi a) { return (int32_t)svaddv_s32(vall(), a); }
// SVE has products of 16-bit pairs only from SVE2 on. The halves of a may be reused for many b, and vice versa.
inline vi idot16(vi acc, vi a, vi b) {
  const svint32_t even = svmla_s32_x(vall(), acc, svexth_s32_x(vall(), a), svexth_s32_x(vall(), b));
  return svmla_s32_x(vall(), even, svasr_n_s32_x(vall(), a, 16), svasr_n_s32_x(vall(), b, 16));
}

#elif defined(AS_ISA_NEON)

using vf = float32x4_t;
constexpr int W = 4;
inline vf vzero() { return vdupq_n_f32(0); }
inline vf vset(float x) { return vdupq_n_f32(x); }
inline vf vload(const float* p) { return vld1q_f32(p); }
inline void vstore(float* p, vf v) { vst1q_f32(p, v); }
inline vf vload_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline vf vload_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline vf vfma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
inline vf vadd(vf a, vf b) { return vaddq_f32(a, b); }
inline vf vsub(vf a, vf b) { return vsubq_f32(a, b); }
inline vf vmul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf vdiv(vf a, vf b) { return vdivq_f32(a, b); }
inline vf vmax(vf a, vf b) { return vmaxq_f32(a, b); }
inline vf vmin(vf a, vf b) { return vminq_f32(a, b); }
inline vf vround(vf a) { return vrndnq_f32(a); }
inline vf vscale2(vf a, vf n) {
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23)));
}

using vi = int32x4_t;
inline vi izero() { return vdupq_n_s32(0); }
inline vi iset(int32_t x) { return vdupq_n_s32(x); }
inline vi iload(const void* p) { return vld1q_s32(static_cast<const int32_t*>(p)); }
inline vi iadd(vi a, vi b) { return vaddq_s32(a, b); }
inline vi isub(vi a, vi b) { return vsubq_s32(a, b); }
template <int N>
inline vi shift_right(vi a) {
  return vshrq_n_s32(a, N);
}
template <int N>
inline vi shift_left(vi a) {
  return vshlq_n_s32(a, N);
}
inline vf to_float(vi a) { return vcvtq_f32_s32(a); }
inline int32_t isum(vi a) { return vaddvq_s32(a); }
inline vi idot16(vi acc, vi a, vi b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}

#endif

// The four bytes at p in every lane.
inline vi iset_bytes(const void* p) { return iset(four_bytes(p)); }

// Sum and maximum over the lanes, always in the same order.
inline float vsum(vf v) {
  float lane[W];
  vstore(lane, v);
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lane[i] += lane[i + step];
  return lane[0];
}
inline float vhmax(vf v) {
  float lane[W];
  vstore(lane, v);
  float m = lane[0];
  for (int i = 1; i < W; i++) m = lane[i] > m ? lane[i] : m;
  return m;
}

// y, but 0 where x < least. NaN counts as not less.
inline vf vzero_below(vf y, vf x, vf least) {
#if defined(AS_ISA_AVX512)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y);
#elif defined(AS_ISA_AVX2)
  return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_NLT_UQ), y);
#elif defined(AS_ISA_SVE)
  return svsel_f32(svcmplt_f32(vall(), x, least), vzero(), y);
#else
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, least)));
#endif
}

// e^x for x <= 88, about 1 ulp: x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a Taylor polynomial of degree 7 in Horner's
// form (relative error 5e-9), scaled by 2^n. Below -87.3 the result is 0.
inline vf vexp(vf x) {
  const vf low = vset(-87.3f);
  const vf xc = vmax(low, x);  // this order propagates NaN
  const vf n = vround(vmul(xc, vset(1.44269504088896341f)));
  vf r = vfma(n, vset(-0.693359375f), xc);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.0f / 5040);
  p = vfma(p, r, vset(1.0f / 720));
  p = vfma(p, r, vset(1.0f / 120));
  p = vfma(p, r, vset(1.0f / 24));
  p = vfma(p, r, vset(1.0f / 6));
  p = vfma(p, r, vset(0.5f));
  p = vfma(p, r, vset(1.0f));
  p = vfma(p, r, vset(1.0f));
  return vzero_below(vscale2(p, n), x, low);  // x < low gives exactly 0: a masked score must not contribute
}

// (e^2x - 1) / (e^2x + 1), within 2e-7; beyond 10 it is 1.
inline vf vtanh(vf x) {
  const vf e = vexp(vmul(vset(2.0f), vmin(vset(10.0f), vmax(vset(-10.0f), x))));  // this order propagates NaN
  return vdiv(vsub(e, vset(1.0f)), vadd(e, vset(1.0f)));
}

template <typename T>
inline vf vload_as(const T* p);
template <>
inline vf vload_as<float>(const float* p) {
  return vload(p);
}
template <>
inline vf vload_as<uint16_t>(const uint16_t* p) {
  return vload_bf16(p);
}

}  // namespace AS_ISA

}  // namespace as
