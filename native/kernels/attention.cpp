// Attention of a few query rows that share one KV head over one block of kBlockTokens tokens of context.
//
// Recipe (the same in prefill and decode, whatever else is in the tile): scores, see below; maximum over the tokens the row
// sees; e^(score - maximum), 0 for the others; their sum over vectors of tokens in ascending order, then over lanes; out[d] =
// one chain over ascending tokens. Tokens a row does not see add exact zeros, so it does not matter how far the tile's other
// rows see. Keys are stored by groups of 16 tokens (span_layout.h): a lane is a token and no score needs a horizontal sum.
// Blocks are merged in ascending order (Milakov and Gimelshein, 2018).
//
// Spans are too short for the processor's own prefetching to get going: while keys are read the same tokens' values are
// prefetched, while values are read the keys of the next block.
//
//   float32, bfloat16   score = one chain of fused multiply-adds over the head dimension, times scale.
//   int8, uint4         the query is rounded to 16 bits (an error of 2^-16 of its largest value, far under that of 8-bit keys)
//                       and multiplied with the keys as they are stored, in exact integer sums: two products an instruction,
//                       no conversion to float, and no order to keep. Scale and minimum of a key come to its finished score:
//                       score = (key scale * f) * sum + (key minimum * (f * sum of the query)), f = query scale * scale.
//                       Values: p * value scale takes the place of p, and out starts from the sum of p * value minimum.
#include <algorithm>
#include <cstring>
#include <limits>
#include "kernels.h"
#include "simd.h"
#include "tables.h"
#include "tile.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int KV = kKeyGroup / W;  // vectors of a group of keys
// QR: rows of a score tile; OR, OV: rows and vectors of an output tile. Eight chains hide the multipliers' latency, and the
// more rows, the fewer times a key or value is converted.
#if defined(AS_ISA_AVX512)
constexpr int QR = 8, OR = 8, OV = 2;
#elif defined(AS_ISA_AVX2)
constexpr int QR = 4, OR = 4, OV = 2;
#elif defined(AS_ISA_SVE)
constexpr int QR = 8, OR = 8, OV = 2;
#else
constexpr int QR = 4, OR = 4, OV = 4;
#endif

#if defined(AS_ISA_AVX512)
using vi = __m512i;
inline vi izero() { return _mm512_setzero_si512(); }
inline vi iset(int32_t x) { return _mm512_set1_epi32(x); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vi add_pairs(vi acc, vi k, vi q) {
#if defined(AS_ISA_AVX512_VNNI)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(k), "v"(q));  // not the intrinsic: GCC 12 copies the accumulator around it
  return acc;
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(k, q));
#endif
}
inline vi pairs_i8(const char* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline vi pairs_u4(const char* p) {
  const vi x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)), _mm512_set1_epi32(0x000f000f));
}
inline vf value_i8(const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
template <int Part> inline vf value_u4(const char* p) {
  int64_t x;
  std::memcpy(&x, p, 8);
  const vi shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
  // vpermps looks at the low 4 bits of a lane: a table stands for mask and conversion.
  const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(x), shifts), table);
}
#elif defined(AS_ISA_AVX2)
using vi = __m256i;
inline vi izero() { return _mm256_setzero_si256(); }
inline vi iset(int32_t x) { return _mm256_set1_epi32(x); }
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline vi add_pairs(vi acc, vi k, vi q) { return _mm256_add_epi32(acc, _mm256_madd_epi16(k, q)); }
inline vi pairs_i8(const char* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline vi pairs_u4(const char* p) {
  const vi x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 12)), _mm256_set1_epi32(0x000f000f));
}
inline vf value_i8(const char* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
template <int Part> inline vf value_u4(const char* p) {
  int64_t x;
  std::memcpy(&x, p, 8);
  const vi shifts = _mm256_add_epi32(_mm256_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12), _mm256_set1_epi32(16 * Part));
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi64x(x), shifts), _mm256_set1_epi32(15)));
}
#elif defined(AS_ISA_SVE)
typedef svint32_t vi AS_SVE_FIXED;
inline vi izero() { return svdup_n_s32(0); }
inline vi iset(int32_t x) { return svdup_n_s32(x); }
inline vf to_float(vi a) { return svcvt_f32_s32_x(vall(), a); }
// SVE's own products of 16-bit pairs come with SVE2. The halves of k are the same for all rows, those of q for all vectors.
inline vi add_pairs(vi acc, vi k, vi q) {
  const svint32_t even = svmla_s32_x(vall(), acc, svand_n_s32_x(vall(), k, 0xffff), svexth_s32_x(vall(), q));
  return svmla_s32_x(vall(), even, svasr_n_s32_x(vall(), k, 16), svasr_n_s32_x(vall(), q, 16));
}
inline vi pairs_i8(const char* p) { return svreinterpret_s32_u16(svld1ub_u16(svptrue_b16(), reinterpret_cast<const uint8_t*>(p))); }
inline vi pairs_u4(const char* p) {
  const svuint32_t x = svld1ub_u32(vall(), reinterpret_cast<const uint8_t*>(p));
  return svreinterpret_s32_u32(svand_n_u32_x(vall(), svorr_u32_x(vall(), x, svlsl_n_u32_x(vall(), x, 12)), 0x000f000f));
}
inline vf value_i8(const char* p) { return svcvt_f32_u32_x(vall(), svld1ub_u32(vall(), reinterpret_cast<const uint8_t*>(p))); }
template <int Part> inline vf value_u4(const char* p) {
  int64_t x;
  std::memcpy(&x, p, 8);
  const svuint32_t pair = svlsr_n_u32_x(vall(), svindex_u32(Part * W, 1), 1), words = svreinterpret_u32_s64(svdup_n_s64(x));
  return svcvt_f32_u32_x(vall(), svand_n_u32_x(vall(), svlsr_u32_x(vall(), words, svlsl_n_u32_x(vall(), pair, 2)), 15));
}
#else
using vi = int32x4_t;
inline vi izero() { return vdupq_n_s32(0); }
inline vi iset(int32_t x) { return vdupq_n_s32(x); }
inline vf to_float(vi a) { return vcvtq_f32_s32(a); }
inline vi add_pairs(vi acc, vi k, vi q) {
  const int16x8_t a = vreinterpretq_s16_s32(k), b = vreinterpretq_s16_s32(q);
  return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
}
inline vi pairs_i8(const char* p) { return vreinterpretq_s32_u16(vmovl_u8(vld1_u8((const uint8_t*)p))); }
inline vi pairs_u4(const char* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  const uint16x4_t x16 = vget_low_u16(vmovl_u8(vcreate_u8(bytes)));
  const uint32x4_t x = vmovl_u16(x16);
  return vreinterpretq_s32_u32(vandq_u32(vorrq_u32(x, vshlq_n_u32(x, 12)), vdupq_n_u32(0x000f000f)));
}
inline vf value_i8(const char* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
}
template <int Part> inline vf value_u4(const char* p) {
  const uint32x2_t x = vld1_u32((const uint32_t*)p);
  const int32_t shifts[4] = {-8 * Part, -8 * Part, -8 * Part - 4, -8 * Part - 4};
  return vcvtq_f32_u32(vandq_u32(vshlq_u32(vcombine_u32(x, x), vld1q_s32(shifts)), vdupq_n_u32(15)));
}
#endif

// The types of the cache: vector v of the values at `p`, and of pairs of keys at `p`.
template <typename T> struct Floats {
  static constexpr bool quantized = false;
  static constexpr size_t bits = 8 * sizeof(T);
  template <int V> static vf value(const char* p) { return vload_as<T>(reinterpret_cast<const T*>(p) + V * W); }
  static vf keys(const char* p, int v) { return vload_as<T>(reinterpret_cast<const T*>(p) + v * W); }
  static constexpr size_t row = kKeyGroup * sizeof(T);  // bytes of one d (quantized: pair of d) of a group of keys
};
struct Int8 {
  static constexpr bool quantized = true;
  static constexpr size_t bits = 8;
  template <int V> static vf value(const char* p) { return value_i8(p + V * W); }
  static vi keys(const char* p, int v) { return pairs_i8(p + v * W * 2); }
  static constexpr size_t row = kKeyGroup * 2;
};
struct UInt4 {
  static constexpr bool quantized = true;
  static constexpr size_t bits = 4;
  template <int V> static vf value(const char* p) { return value_u4<V * W % 16 / W>(p + V * W / 16 * 8); }
  static vi keys(const char* p, int v) { return pairs_u4(p + v * W); }
  static constexpr size_t row = kKeyGroup;
};

// The tile's queries rounded to 16 bits.
struct Queries {
  alignas(64) int16_t q[kTileRows][kQuantizedHeadDim];
  float factor[kTileRows], offset[kTileRows];  // query scale * scale; that times the sum of the rounded query
};

void round_queries(const AttentionTile& a, int levels, Queries& out) {
  const int dim = a.layout->head_dim, padded = a.layout->padded_dim;
  // The largest that cannot overflow 32 bits.
  const int most = (int)std::min(32767L, 2147483647L / ((long)levels * dim));
  alignas(64) float x[kQuantizedHeadDim];
  for (int r = 0; r < a.rows; r++) {
    std::copy_n(a.q[r], dim, x);
    std::fill(x + dim, x + padded, 0.0f);
    vf top = vzero(), poison = vzero();  // poison: 0, or NaN if any value is not finite
    for (int d = 0; d < padded; d += W) {
      const vf v = vload(x + d);
      top = vmax(top, vmax(v, vsub(vzero(), v)));
      poison = vfma(v, vzero(), poison);
    }
    const float largest = vhmax(top);
    const bool usable = largest > 1e-34f;
    const vf inverse = vset(usable ? (float)most / largest : 0.0f);
    for (int d = 0; d < padded; d += W) vstore(x + d, vround(vmul(vload(x + d), inverse)));
    int32_t sum = 0;
    for (int d = 0; d < padded; d++) {
      const int32_t q = (int32_t)x[d];
      out.q[r][d] = (int16_t)q;
      sum += q;
    }
    out.factor[r] = (usable ? largest / (float)most * a.scale : 0.0f) + vsum(poison);
    out.offset[r] = out.factor[r] * (float)sum;
  }
}

// Scores of rows [r0, r0 + R) with a group of keys.
template <int R, typename C>
inline void scores_floats(const char* keys, const char* ahead, const AttentionTile& a, int r0, float* out) {
  vf acc[R][KV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < KV; v++) acc[r][v] = vzero();
  for (int d = 0; d < a.layout->head_dim; d++) {
    vf k[KV];
    for (int v = 0; v < KV; v++) k[v] = C::keys(keys + d * C::row, v);
    __builtin_prefetch(ahead + d * C::row);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf x = vset(a.q[r0 + r][d]);
      for (int v = 0; v < KV; v++) acc[r][v] = vfma(x, k[v], acc[r][v]);
    }
  }
  const vf s = vset(a.scale);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int v = 0; v < KV; v++) vstore(out + r * kBlockTokens + v * W, vmul(acc[r][v], s));
}

template <int R, typename C>
inline void scores_integers(const char* keys, const char* ahead, const Queries& queries, int r0, int pairs, const float* scale,
                            const float* minimum, float* out) {
  vi acc[R][KV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < KV; v++) acc[r][v] = izero();
  for (int p = 0; p < pairs; p++) {
    vi k[KV];
    for (int v = 0; v < KV; v++) k[v] = C::keys(keys + p * C::row, v);
    __builtin_prefetch(ahead + p * C::row);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, queries.q[r0 + r] + 2 * p, 4);
      const vi x = iset(pair);
      for (int v = 0; v < KV; v++) acc[r][v] = add_pairs(acc[r][v], k[v], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const vf f = vset(queries.factor[r0 + r]), o = vset(queries.offset[r0 + r]);
    for (int v = 0; v < KV; v++)
      vstore(out + r * kBlockTokens + v * W,
             vfma(vmul(vload(scale + v * W), f), to_float(acc[r][v]), vmul(vload(minimum + v * W), o)));
  }
}

// out[r][0 .. V * W) = sum over tokens of p[r][token] * values[token], continuing the chain in `out`.
template <int R, typename C, int... V>
inline void weigh(std::integer_sequence<int, V...>, const char* values, const char* ahead, size_t stride, int padded_dim, const float* p, int tokens,
                  float* out) {
  constexpr int N = sizeof...(V);
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) acc[r][v] = vload(out + (size_t)r * padded_dim + v * W);
  for (int t = 0; t < tokens; t++) {
    const vf x[N] = {C::template value<V>(values + t * stride)...};
    for (size_t line = 0; line < N * W * C::bits / 8; line += 64) __builtin_prefetch(ahead + t * stride + line);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf a = vset(p[r * kBlockTokens + t]);
      for (int v = 0; v < N; v++) acc[r][v] = vfma(a, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) vstore(out + (size_t)r * padded_dim + v * W, acc[r][v]);
}

// Scores to weights e^(score - maximum); returns their sum.
inline float exponentials(float* row, int limit, int padded, float* maximum) {
  for (int t = limit; t < padded; t++) row[t] = -std::numeric_limits<float>::infinity();
  vf m = vset(-std::numeric_limits<float>::infinity());
  for (int t = 0; t < padded; t += W) m = vmax(m, vload(row + t));
  *maximum = limit > 0 ? vhmax(m) : 0.0f;
  vf sum = vzero();
  for (int t = 0; t < padded; t += W) {
    const vf e = vexp(vsub(vload(row + t), vset(*maximum)));
    sum = vadd(sum, e);
    vstore(row + t, e);
  }
  return vsum(sum);
}

template <typename C>
void attend_typed(const AttentionTile& a, int levels) {
  const SpanLayout& s = *a.layout;
  alignas(64) float p[kTileRows * kBlockTokens];
  alignas(64) float scale[kBlockTokens], minimum[kBlockTokens];  // of the values
  [[maybe_unused]] Queries queries;
  if constexpr (C::quantized) round_queries(a, levels, queries);
  const int padded = (a.tokens + kKeyGroup - 1) / kKeyGroup * kKeyGroup, blocks = s.padded_dim / 16;
  for (int t = 0; t < padded; t += kKeyGroup) {
    const char* span = static_cast<const char*>(a.spans[t / s.span_size]);
    const char* keys = span + t % s.span_size / kKeyGroup * s.group_bytes;
    const char* values = span + s.value_offset + t % s.span_size * s.value_bytes;
    [[maybe_unused]] const float* scales = reinterpret_cast<const float*>(span + s.scale_offset) + t % s.span_size;
    for (int r = 0; r < a.rows; r += QR)
      with_constant<QR>(std::min(QR, a.rows - r), [&](auto rows) {
        float* out = p + r * kBlockTokens + t;
        const char* ahead = r ? keys : values;
        if constexpr (C::quantized)
          scores_integers<rows, C>(keys, ahead, queries, r, (s.head_dim + 1) / 2, scales, scales + s.span_size, out);
        else scores_floats<rows, C>(keys, ahead, a, r, out);
      });
    if constexpr (C::quantized) {
      std::copy_n(scales + 2 * s.span_size, kKeyGroup, scale + t);
      std::copy_n(scales + 3 * s.span_size, kKeyGroup, minimum + t);
    }
  }
  if constexpr (C::quantized) {  // what lies past the tokens may be anything, NaN too
    std::fill(scale + a.tokens, scale + padded, 0.0f);
    std::fill(minimum + a.tokens, minimum + padded, 0.0f);
  }
  for (int r = 0; r < a.rows; r++) {
    float* row = p + r * kBlockTokens;
    a.sum[r] = exponentials(row, std::max(0, std::min(a.limit[r], a.tokens)), padded, a.maximum + r);
    vf offset = vzero();
    if constexpr (C::quantized)
      for (int t = 0; t < padded; t += W) {
        offset = vfma(vload(row + t), vload(minimum + t), offset);
        vstore(row + t, vmul(vload(row + t), vload(scale + t)));
      }
    std::fill_n(a.out + (size_t)r * s.padded_dim, s.padded_dim, vsum(offset));
  }
  constexpr int B = OV * W / 16;  // blocks of 16 values of an output tile
  for (int t = 0; t < a.tokens; t += s.span_size) {
    const char* values = static_cast<const char*>(a.spans[t / s.span_size]) + s.value_offset;
    const int tokens = std::min(s.span_size, a.tokens - t);
    for (int r = 0; r < a.rows; r += OR)
      with_constant<OR>(std::min(OR, a.rows - r), [&](auto rows) {
        const float* weights = p + r * kBlockTokens + t;
        float* out = a.out + (size_t)r * s.padded_dim;
        const char* ahead = r ? values : static_cast<const char*>(a.next[t / s.span_size]);
        const size_t block_bytes = 2 * C::bits;
        int b = 0;
        for (; b + B <= blocks; b += B)
          weigh<rows, C>(std::make_integer_sequence<int, OV>(), values + b * block_bytes, ahead + b * block_bytes, s.value_bytes, s.padded_dim,
                         weights, tokens, out + 16 * b);
        for (; b < blocks; b++)
          weigh<rows, C>(std::make_integer_sequence<int, 16 / W>(), values + b * block_bytes, ahead + b * block_bytes, s.value_bytes,
                         s.padded_dim, weights, tokens, out + 16 * b);
      });
  }
}

}  // namespace

void attend(const AttentionTile& tile) {
  switch (tile.layout->dtype) {
    case DType::f32: return attend_typed<Floats<float>>(tile, 0);
    case DType::bf16: return attend_typed<Floats<uint16_t>>(tile, 0);
    case DType::i8: return attend_typed<Int8>(tile, 255);
    case DType::u4: return attend_typed<UInt4>(tile, 15);
  }
}

void merge(float* maximum, float* sum, float* out, float block_maximum, float block_sum, const float* block_out, int padded_dim) {
  const float top = *maximum > block_maximum ? *maximum : block_maximum;
  const vf a = vexp(vset(*maximum - top)), b = vexp(vset(block_maximum - top));
  float scale_a[W], scale_b[W];
  vstore(scale_a, a);
  vstore(scale_b, b);
  *maximum = top;
  *sum = *sum * scale_a[0] + block_sum * scale_b[0];
  for (int d = 0; d < padded_dim; d += W) vstore(out + d, vfma(vload(out + d), a, vmul(vload(block_out + d), b)));
}

}  // namespace AS_ISA
}  // namespace as
