// Integer products of matmul_integer.cpp on Arm. sdot adds four products of signed bytes to 32 bits. So 8-bit weights
// become q - 128 by flipping their highest bit, and 16-bit activations are two rows of bytes (planes). Without sdot
// (neon), smlal multiplies 16 bits: weights are widened in registers, and activations of all formats have 16 bits. An
// instruction makes as many products as with floats, without conversions. ld4 separates the k of a lane.
//
// On neon and neon_dotprod the product broadcasts activations, because it can take one element of a vector. On SVE the
// load broadcasts them.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/kernels/format.h"
#include "cpu/kernels/integer_codes.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

#if defined(AS_ISA_SVE)
inline vi signed_bytes(vi a) { return sveor_n_s32_x(vall(), a, (int32_t)0x80808080); }
template <int Part>
inline vi nibbles(vi a) {
  const svuint8_t bytes = svreinterpret_u8_s32(a);
  return svreinterpret_s32_u8(Part ? svlsr_n_u8_x(svptrue_b8(), bytes, 4) : svand_n_u8_x(svptrue_b8(), bytes, 15));
}
using Four = vi;
inline Four four_values(const void* p) { return iset_bytes(p); }
inline vi dot(vi acc, vi w, Four a) { return svdot_s32(acc, svreinterpret_s8_s32(w), svreinterpret_s8_s32(a)); }
#elif defined(AS_ISA_DOTPROD)
inline vi signed_bytes(vi a) { return veorq_s32(a, iset((int32_t)0x80808080)); }
template <int Part>
inline vi nibbles(vi a) {
  const uint8x16_t bytes = vreinterpretq_u8_s32(a);
  return vreinterpretq_s32_u8(Part ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
}
using Four = int8x8_t;  // in the first four lanes
inline Four four_values(const void* p) { return vcreate_s8((uint32_t)four_bytes(p)); }
inline vi dot(vi acc, vi w, Four a) { return vdotq_lane_s32(acc, vreinterpretq_s8_s32(w), a, 0); }
#endif

constexpr int kAheadBytes = 2048;

AS_INLINE void prefetch_unit(const char* w) {
  for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(w + kAheadBytes + line);
}

#if defined(AS_ISA_DOTPROD)
constexpr bool kWords = false;  // 16-bit values are two rows of 8-bit ones
constexpr int rows_of_tile(int planes) { return MR / planes; }

// acc += products of NV vectors of weights, four k a lane, with four activations of each of R rows. The first
// activation of row r is at line(r) + at.
template <int R, typename L>
AS_INLINE void dot_rows(const vi (&weights)[NV], L&& line, int at, vi (&acc)[R][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const Four values = four_values(line(r) + at);
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], weights[v], values);
  }
}

struct Bytes {
  static constexpr int kMiddle = 0, kUnit = 4, kAhead = kAheadBytes;  // signed_bytes() subtracts the middle
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t = 0) {
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi weights[NV];
      prefetch_unit(w);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = signed_bytes(iload(w + v * W * 4));
      dot_rows(weights, line, i, acc);
    }
  }
};

// Multiplies the lower halves of a unit's bytes, then loads the bytes again for the upper halves. Keeping both would
// take too many registers.
template <typename Codes>
struct NibblesOf {
  static constexpr int kMiddle = Codes::kMiddle, kUnit = 8, kAhead = kAheadBytes;
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t = 0) {
    constexpr bool kSplit =
        R * NV < 8;  // too few chains to hide the latency: low and high nibbles get their own chains
    vi upper[kSplit ? R : 1][NV];
#pragma GCC unroll 4
    for (int r = 0; r < (kSplit ? R : 1); r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) upper[r][v] = iset(0);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi weights[NV];
      prefetch_unit(w);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = Codes::of(nibbles<0>(iload(w + v * W * 4)));
      dot_rows(weights, line, i, acc);
      const char* again = w;
      asm("" : "+r"(again));  // forces a second load
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = Codes::of(nibbles<1>(iload(again + v * W * 4)));
      if constexpr (kSplit) dot_rows(weights, line, i + 4, upper);
      else dot_rows(weights, line, i + 4, acc);
    }
    if constexpr (kSplit)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], upper[r][v]);
  }
};

#else
#define AS_WORDS
constexpr bool kWords = true;         // 16-bit values are multiplied whole
constexpr int kExactWords = 512;      // k whose sums of 16-bit activations * (q - 128) always fit 32 bits,
constexpr int kUncentredWords = 256;  // and of activations * q
constexpr int rows_of_tile(int) {
  return 5;
}  // registers: 20 accumulators, 4 vectors of weights as loaded, 2 widened, 5 of activations

// acc += products of the 16 weights of one k and the J-th of four 16-bit activations of each row
template <int J, int R>
AS_INLINE void add_products(int16x8_t low, int16x8_t high, const int16x4_t (&values)[R], vi (&acc)[R][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    acc[r][0] = vmlal_lane_s16(acc[r][0], vget_low_s16(low), values[r], J);
    acc[r][1] = vmlal_high_lane_s16(acc[r][1], low, values[r], J);
    acc[r][2] = vmlal_lane_s16(acc[r][2], vget_low_s16(high), values[r], J);
    acc[r][3] = vmlal_high_lane_s16(acc[r][3], high, values[r], J);
  }
}

template <int R, typename L>
AS_INLINE void load_values(L&& line, int at, int16x4_t (&values)[R]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) values[r] = vld1_s16(reinterpret_cast<const int16_t*>(line(r)) + at);
}

struct Bytes {
  static constexpr int kMiddle = 0, kUnit = 4, kAhead = kAheadBytes;  // the highest bit is flipped
  using Value = int16_t;
  template <int J, int R>
  static AS_INLINE void add(int8x16_t weights, const int16x4_t (&values)[R], vi (&acc)[R][NV]) {
    const int8x16_t centred = veorq_s8(weights, vdupq_n_s8(-128));
    add_products<J>(vmovl_s8(vget_low_s8(centred)), vmovl_high_s8(centred), values, acc);
  }
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t = 0) {
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      prefetch_unit(w);
      const int8x16x4_t weights = vld4q_s8(reinterpret_cast<const int8_t*>(w));
      int16x4_t values[R];
      load_values(line, i, values);
      add<0>(weights.val[0], values, acc);
      add<1>(weights.val[1], values, acc);
      add<2>(weights.val[2], values, acc);
      add<3>(weights.val[3], values, acc);
    }
  }
};

template <typename Codes>
struct NibblesOf {
  static constexpr int kMiddle = Codes::kMiddle, kUnit = 8, kAhead = kAheadBytes;
  using Value = int16_t;
  template <int J, int R>
  static AS_INLINE void add(uint8x16_t weights, const int16x4_t (&values)[R], vi (&acc)[R][NV]) {
    add_products<J>(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(weights))),
                    vreinterpretq_s16_u16(vmovl_high_u8(weights)), values, acc);
  }
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t = 0) {
    const uint8x16_t low = vdupq_n_u8(15);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      prefetch_unit(w);
      const uint8x16x4_t weights = vld4q_u8(reinterpret_cast<const uint8_t*>(w));
      int16x4_t values[R];
      load_values(line, i, values);
      add<0>(Codes::of(vandq_u8(weights.val[0], low)), values, acc);
      add<1>(Codes::of(vandq_u8(weights.val[1], low)), values, acc);
      add<2>(Codes::of(vandq_u8(weights.val[2], low)), values, acc);
      add<3>(Codes::of(vandq_u8(weights.val[3], low)), values, acc);
      load_values(line, i + 4, values);
      add<0>(Codes::of(vshrq_n_u8(weights.val[0], 4)), values, acc);
      add<1>(Codes::of(vshrq_n_u8(weights.val[1], 4)), values, acc);
      add<2>(Codes::of(vshrq_n_u8(weights.val[2], 4)), values, acc);
      add<3>(Codes::of(vshrq_n_u8(weights.val[3], 4)), values, acc);
    }
  }
};

inline void add_doubles(double* sums, vi x) {
  vst1q_f64(sums, vaddq_f64(vld1q_f64(sums), vcvtq_f64_s64(vmovl_s32(vget_low_s32(x)))));
  vst1q_f64(sums + 2, vaddq_f64(vld1q_f64(sums + 2), vcvtq_f64_s64(vmovl_high_s32(x))));
}
inline vf round_doubles(const double* sums, double less) {
  const float64x2_t minus = vdupq_n_f64(less);
  return vcvt_high_f32_f64(vcvt_f32_f64(vsubq_f64(vld1q_f64(sums), minus)), vsubq_f64(vld1q_f64(sums + 2), minus));
}
#endif
using Nibbles = NibblesOf<PlainCodes>;
using WideBytes = Bytes;
template <typename Codes>
using WideNibbles = NibblesOf<Codes>;

// rounded() multiplies n <= W values by factor, rounds to nearest even, and zeroes the other lanes. store_values()
// stores n <= W lanes as bytes, or as 16 bits with n rounded up to a multiple of four.
template <typename Value>
void store_values(char* p, vi x, int n);
#if defined(AS_ISA_SVE)
inline vi rounded(const float* x, int n, vf factor) {
  return svcvt_s32_f32_x(vall(), svrintn_f32_x(vall(), svmul_f32_x(vall(), svld1_f32(svwhilelt_b32(0, n), x), factor)));
}
template <>
inline void store_values<int8_t>(char* p, vi x, int n) {
  svst1b_s32(svwhilelt_b32(0, n), reinterpret_cast<int8_t*>(p), x);
}
#else
inline vi rounded(const float* x, int n, vf factor) {
  float some[W] = {};
  if (n < W) std::memcpy(some, x, n * sizeof(float));
  return vcvtnq_s32_f32(vmul(vload(n < W ? some : x), factor));
}
template <>
inline void store_values<int16_t>(char* p, vi x, int) {
  const int16x4_t halves = vmovn_s32(x);
  std::memcpy(p, &halves, 8);
}
template <>
inline void store_values<int8_t>(char* p, vi x, int n) {
  const int16x4_t halves = vmovn_s32(x);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
  if (n == W) std::memcpy(p, &bytes, W);
  else std::memcpy(p, &bytes, n);
}
#endif

}  // namespace
}  // namespace AS_ISA
}  // namespace as
