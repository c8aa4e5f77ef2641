// Attention of a few query rows that share one KV head over one block of kBlockTokens tokens of context.
//
// Recipe, the same in prefill and decode: scores (see below) get the soft cap and slopes, if any. The maximum is over
// the tokens that the row sees. A token's weight is e^(score - maximum), or 0 if the row does not see it. Weights are
// summed over vectors of tokens in ascending order, then over lanes. Each out[d] is one chain over ascending tokens.
// Unseen tokens add exact zeros, so the tile's other rows do not matter. Keys are stored in groups of 16 tokens
// (span_layout.h): a lane is a token, so no score needs a horizontal sum. attention_work.h has the order in which
// blocks are merged (Milakov and Gimelshein, 2018).
//
// Spans are too short for the hardware prefetcher. So for each line that it reads of this block, the kernel prefetches
// a line of the next block. (Prefetching all of it at once would fill the queues and stall other loads: half the rate.)
//
// float32 and bfloat16 (for bfloat16 in pairs, see attention_bf16.cpp): a score is one chain of fused multiply-adds
// over the head dimension, times scale.
//
// int8 and uint4: the query is rounded to 16 bits once a tile. The error is 2^-16 of its largest value, far less than
// that of 8-bit keys. Products with the stored keys are summed exactly in integers: two products an instruction,
// without conversion to float, in any order. A key's scale and minimum are applied to its score: score = (key scale *
// f) * sum + (key minimum * (f * sum of the query)), f = query scale * scale. For values, p * value scale is rounded to
// 16 bits and multiplied in integers, in pairs of tokens: out = factor * sum + sum of p * value minimum. That error is
// 2^-16 of the row's largest p * value scale in the block: half a step of 8-bit values at worst (all equal), usually a
// hundredth.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int KV = kKeyGroup / W;  // vectors of a group of keys
// QR: rows of a score tile. QG: groups of keys of an integer score tile. OR, OV: rows and vectors of an output tile.
// Eight chains hide the latency of multiplications. With more rows, a key or value is converted less often.
#if defined(AS_ISA_AVX512)
constexpr int QR = 8, QG = 2, OR = 8, OV = 2;
#elif defined(AS_ISA_AVX2)
constexpr int QR = 4, QG = 1, OR = 4, OV = 2;
#elif defined(AS_ISA_SVE)
constexpr int QR = 8, QG = 1, OR = 8, OV = 2;
#else
constexpr int QR = 4, QG = 1, OR = 4, OV = 4;
#endif

// Load int8 or uint4 values from the cache at p as two 16-bit values a lane.
#if defined(AS_ISA_AVX512)
inline vi pairs_i8(const char* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline vi pairs_u4(const char* p) {
  const vi x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)), _mm512_set1_epi32(0x000f000f));
}
#elif defined(AS_ISA_AVX2)
inline vi pairs_i8(const char* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline vi pairs_u4(const char* p) {
  const vi x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 12)), _mm256_set1_epi32(0x000f000f));
}
#elif defined(AS_ISA_SVE)
inline vi pairs_i8(const char* p) {
  return svreinterpret_s32_u16(svld1ub_u16(svptrue_b16(), reinterpret_cast<const uint8_t*>(p)));
}
inline vi pairs_u4(const char* p) {
  const svuint32_t x = svld1ub_u32(vall(), reinterpret_cast<const uint8_t*>(p));
  return svreinterpret_s32_u32(svand_n_u32_x(vall(), svorr_u32_x(vall(), x, svlsl_n_u32_x(vall(), x, 12)), 0x000f000f));
}
#else
inline vi pairs_i8(const char* p) { return vreinterpretq_s32_u16(vmovl_u8(vld1_u8((const uint8_t*)p))); }
inline vi pairs_u4(const char* p) {
  const uint16x4_t x16 = vget_low_u16(vmovl_u8(vcreate_u8((uint32_t)four_bytes(p))));
  const uint32x4_t x = vmovl_u16(x16);
  return vreinterpretq_s32_u32(vandq_u32(vorrq_u32(x, vshlq_n_u32(x, 12)), vdupq_n_u32(0x000f000f)));
}
#endif

#if defined(AS_ISA_AVX512)
inline void store_rounded(int16_t* p, vf a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}
inline float lane_sum(vf a) { return _mm512_reduce_add_ps(a); }
inline float lane_max(vf a) { return _mm512_reduce_max_ps(a); }
// e^x for x <= 0, 0 below -87.3. Half the instructions of vexp(), because the result is rounded to 16 bits.
inline vf exponential(vf x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, vset(-87.3f), _CMP_NLT_UQ),
                             vexp2(vmul(x, vset(1.44269504088896341f))));
}
#else
inline void store_rounded(int16_t* p, vf a) {
  float x[W];
  vstore(x, vround(a));
  for (int i = 0; i < W; i++) p[i] = (int16_t)(int32_t)x[i];
}
inline float lane_sum(vf a) { return vsum(a); }
inline float lane_max(vf a) { return vhmax(a); }
inline vf exponential(vf x) { return vexp(x); }
#endif

// The types of the cache: vector v of the values at `p`.
template <typename T>
struct FloatCache {
  static constexpr size_t bits = 8 * sizeof(T);
  template <int V>
  static vf value(const char* p) {
    return vload_as<T>(reinterpret_cast<const T*>(p) + V * W);
  }
  static vf keys(const char* p, int v) { return vload_as<T>(reinterpret_cast<const T*>(p) + v * W); }
  static constexpr size_t row = kKeyGroup * sizeof(T);  // bytes of one d of a group of keys (quantized: of a pair)
};
struct Int8Cache {
  static vi pairs(const char* p, int v) { return pairs_i8(p + v * W * 2); }  // of keys, or of values
  static constexpr size_t vector_bytes = W * 2;
  static constexpr size_t row = kKeyGroup * 2;
};
struct UInt4Cache {
  static vi pairs(const char* p, int v) { return pairs_u4(p + v * W); }
  static constexpr size_t vector_bytes = W;
  static constexpr size_t row = kKeyGroup;
};

// The tile's queries rounded to 16 bits, as convert_queries() writes them.
struct Queries {
  const int16_t* q;              // [rows][stride]
  const float *factor, *offset;  // [kTileRows]: query scale * scale; that times the sum of the rounded query
  size_t stride;
};

Queries queries_of(const AttentionTile& a) {
  const size_t stride = a.layout->query_dim();
  const float* factor = reinterpret_cast<const float*>(a.converted + kTileRows * stride * 2);
  return {reinterpret_cast<const int16_t*>(a.converted), factor, factor + kTileRows, stride};
}

void round_queries(const AttentionTile& a, int levels, char* to) {
  const int dim = a.layout->head_dim, padded = a.layout->query_dim();
  int16_t* rounded = reinterpret_cast<int16_t*>(to);
  float *factor = reinterpret_cast<float*>(to + kTileRows * (size_t)padded * 2), *offset = factor + kTileRows;
  // The largest rounded query value whose sums always fit 32 bits.
  const int most = (int)std::min<int64_t>(32767, 2147483647 / ((int64_t)levels * dim));
  alignas(64) float x[kQuantizedHeadDim];
  for (int r = 0; r < a.rows; r++, rounded += padded) {
    std::copy_n(a.q[r], dim, x);
    std::fill(x + dim, x + padded, 0.0f);
    vf top = vzero(), poison = vzero();  // 0, or NaN if any value is not finite
    for (int d = 0; d < padded; d += W) {
      const vf v = vload(x + d);
      top = vmax(top, vmax(v, vsub(vzero(), v)));
      poison = vfma(v, vzero(), poison);
    }
    const float unusable = vsum(poison);
    if (unusable != 0) std::fill(x, x + padded, 0.0f), top = vzero();  // non-finite values cannot become integers
    const float largest = vhmax(top);
    const bool usable = largest > 1e-34f;
    const vf inverse = vset(usable ? (float)most / largest : 0.0f);
    for (int d = 0; d < padded; d += W) vstore(x + d, vround(vmul(vload(x + d), inverse)));
    int32_t sum = 0;
    for (int d = 0; d < padded; d++) {
      const int32_t q = (int32_t)x[d];
      rounded[d] = (int16_t)q;
      sum += q;
    }
    factor[r] = (usable ? largest / (float)most * a.scale : 0.0f) + unusable;
    offset[r] = factor[r] * (float)sum;
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
    prefetch_far(ahead + d * C::row);
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

// The same with G groups of quantized keys, including their scale and minimum.
template <int R, int G, typename C>
inline void scores_integers(const char* const (&keys)[QG], const char* const (&ahead)[QG], const Queries& queries,
                            int r0, int pairs, const float* const (&scale)[QG], size_t minimum, float* out) {
  vi acc[R][G * KV];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < G * KV; v++) acc[r][v] = izero();
  for (int p = 0; p < pairs; p++) {
    vi k[G * KV];
#pragma GCC unroll 4
    for (int v = 0; v < G * KV; v++) k[v] = C::pairs(keys[v / KV] + p * C::row, v % KV);
    for (int g = 0; g < G; g++) prefetch_far(ahead[g] + p * C::row);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vi x = iset_bytes(queries.q + (r0 + r) * queries.stride + 2 * p);
#pragma GCC unroll 4
      for (int v = 0; v < G * KV; v++) acc[r][v] = idot16(acc[r][v], k[v], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const vf f = vset(queries.factor[r0 + r]), o = vset(queries.offset[r0 + r]);
#pragma GCC unroll 4
    for (int v = 0; v < G * KV; v++) {
      const float* at = scale[v / KV] + v % KV * W;
      vstore(out + r * kBlockTokens + v * W,
             vfma(vmul(vload(at), f), to_float(acc[r][v]), vmul(vload(at + minimum), o)));
    }
  }
}

struct Block {
  const char *keys, *values;
  const float* scales;
};
// The addresses of a token's group of keys, value and four runs of scales. spans: the tile's, or the next block's.
Block block_at(const SpanLayout& s, const void* const* spans, int token) {
  const char* span = static_cast<const char*>(spans[token / s.span_size]);
  const int t = token % s.span_size;
  return {span + t / kKeyGroup * s.group_bytes, span + s.value_offset + t * s.value_bytes,
          reinterpret_cast<const float*>(span + s.scale_offset) + t};
}

// out[r][0 .. V * W) = sum over tokens of p[r][token] * values[token], continuing the chain in `out`.
template <int R, typename C, int... V>
inline void weigh(std::integer_sequence<int, V...>, const char* values, const char* ahead, size_t stride,
                  int padded_dim, const float* p, int tokens, float* out) {
  constexpr int N = sizeof...(V);
  vf acc[R][N];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < N; v++) acc[r][v] = vload(out + (size_t)r * padded_dim + v * W);
  for (int t = 0; t < tokens; t++) {
    const vf x[N] = {C::template value<V>(values + t * stride)...};
    for (size_t line = 0; line < N * W * C::bits / 8; line += 64) prefetch_far(ahead + t * stride + line);
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

// out of rows [r0, r0 + R), vectors [first, first + V): += factor[r] * sum over pairs of tokens of weights * values.
template <int R, int V, typename C>
inline void weigh_integers(const AttentionTile& a, int r0, int first, const int16_t* weights, const float* factor) {
  const SpanLayout& s = *a.layout;
  const size_t stride = 2 * s.value_bytes, at = first * C::vector_bytes;
  vi acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[r][v] = izero();
  for (int t = 0; t < a.tokens; t += s.span_size) {
    const char* values = block_at(s, a.spans, t).values + at;
    const char* ahead = r0 ? values : block_at(s, a.next, t).values + at;
    const int pairs = (std::min(s.span_size, a.tokens - t) + 1) / 2;  // an odd last token is paired with weight 0
    for (int p = 0; p < pairs; p++, values += stride, ahead += stride) {
      vi x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) x[v] = C::pairs(values, v);
      for (size_t line = 0; line < V * C::vector_bytes; line += 64) prefetch_far(ahead + line);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vi w = iset_bytes(weights + (r0 + r) * kBlockTokens + t + 2 * p);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[r][v] = idot16(acc[r][v], x[v], w);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float* out = a.out + (size_t)(r0 + r) * s.padded_dim + first * W;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      vstore(out + v * W, vfma(to_float(acc[r][v]), vset(factor[r0 + r]), vload(out + v * W)));
  }
}

// The tokens [begin, end) of the block that a row sees.
struct Seen {
  int begin, end;
  bool none() const { return begin >= end; }
};
Seen seen_by(const AttentionTile& a, int row) {
  return {std::max(0, a.first[row] - a.begin), std::max(0, std::min(a.context[row] - a.begin, a.tokens))};
}

// Masks the scores of tokens that a row does not see.
inline void mask_scores(const AttentionTile& a, int r, Seen seen, int padded, float* row) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  if (a.soft_cap || a.sloped) bend_scores(a, r, 1, row, padded);
  for (int t = 0; t < std::min(seen.begin, padded); t++) row[t] = kNone;
  for (int t = seen.end; t < padded; t++) row[t] = kNone;
}

// Replaces scores by weights e^(score - maximum). Returns their sum.
inline float exponentials(float* row, bool none, int padded, float* maximum) {
  vf m = vset(-std::numeric_limits<float>::infinity());
  for (int t = 0; t < padded; t += W) m = vmax(m, vload(row + t));
  *maximum = none ? 0.0f : vhmax(m);
  vf sum = vzero();
  for (int t = 0; t < padded; t += W) {
    const vf e = vexp(vsub(vload(row + t), vset(*maximum)));
    sum = vadd(sum, e);
    vstore(row + t, e);
  }
  return vsum(sum);
}

// Scores with all groups of keys, to out [rows][kBlockTokens].
template <typename C>
void scores_of(const AttentionTile& a, float* out) {
  for (int t = 0; t < a.tokens; t += kKeyGroup) {
    const Block at = block_at(*a.layout, a.spans, t), ahead = block_at(*a.layout, a.next, t);
    for (int r = 0; r < a.rows; r += QR)
      with_constant<QR>(std::min(QR, a.rows - r), [&](auto rows) {
        scores_floats<rows, C>(at.keys, r ? at.keys : ahead.keys, a, r, out + r * kBlockTokens + t);
      });
  }
}

template <typename C>
void attend_floats(const AttentionTile& a) {
  const SpanLayout& s = *a.layout;
  alignas(64) float p[kTileRows * kBlockTokens];
  const int padded = (a.tokens + kKeyGroup - 1) / kKeyGroup * kKeyGroup, blocks = s.padded_dim / 16;
  scores_of<C>(a, p);
  for (int r = 0; r < a.rows; r++) {
    const Seen seen = seen_by(a, r);
    mask_scores(a, r, seen, padded, p + r * kBlockTokens);
    a.sum[r] = exponentials(p + r * kBlockTokens, seen.none(), padded, a.maximum + r);
    std::fill_n(a.out + (size_t)r * s.padded_dim, s.padded_dim, 0.0f);
  }
  constexpr int B = OV * W / 16;  // blocks of 16 values of an output tile
  for (int t = 0; t < a.tokens; t += s.span_size) {
    const char *values = block_at(s, a.spans, t).values, *next_values = block_at(s, a.next, t).values;
    const int tokens = std::min(s.span_size, a.tokens - t);
    for (int r = 0; r < a.rows; r += OR)
      with_constant<OR>(std::min(OR, a.rows - r), [&](auto rows) {
        const float* weights = p + r * kBlockTokens + t;
        float* out = a.out + (size_t)r * s.padded_dim;
        const char* ahead = r ? values : next_values;
        const size_t block_bytes = 2 * C::bits;
        int b = 0;
        for (; b + B <= blocks; b += B)
          weigh<rows, C>(std::make_integer_sequence<int, OV>(), values + b * block_bytes, ahead + b * block_bytes,
                         s.value_bytes, s.padded_dim, weights, tokens, out + 16 * b);
        for (; b < blocks; b++)
          weigh<rows, C>(std::make_integer_sequence<int, 16 / W>(), values + b * block_bytes, ahead + b * block_bytes,
                         s.value_bytes, s.padded_dim, weights, tokens, out + 16 * b);
      });
  }
}

template <typename C>
void attend_integers(const AttentionTile& a) {
  const SpanLayout& s = *a.layout;
  alignas(64) float p[kTileRows * kBlockTokens];
  alignas(64) float scale[kBlockTokens], minimum[kBlockTokens];  // of the values
  alignas(64) int16_t weights[kTileRows * kBlockTokens];
  float factor[kTileRows];
  const Queries queries = queries_of(a);
  const int padded = (a.tokens + kKeyGroup - 1) / kKeyGroup * kKeyGroup, vectors = s.padded_dim / W;
  for (int t = 0; t < padded; t += QG * kKeyGroup) {
    const int groups = std::min(QG, (padded - t) / kKeyGroup);
    const char *keys[QG], *ahead[QG];
    const float* scales[QG];
    for (int g = 0; g < groups; g++) {
      const Block at = block_at(s, a.spans, t + g * kKeyGroup), next = block_at(s, a.next, t + g * kKeyGroup);
      keys[g] = at.keys, ahead[g] = next.keys, scales[g] = at.scales;
      for (int run = 0; run < 4; run++) prefetch_far(next.scales + run * s.span_size);
      std::copy_n(at.scales + 2 * s.span_size, kKeyGroup, scale + t + g * kKeyGroup);
      std::copy_n(at.scales + 3 * s.span_size, kKeyGroup, minimum + t + g * kKeyGroup);
    }
    for (int r = 0; r < a.rows; r += QR)
      with_constant<QR>(std::min(QR, a.rows - r), [&](auto rows) {
        with_constant<QG>(groups, [&](auto count) {
          scores_integers<rows, count, C>(keys, r ? keys : ahead, queries, r, (s.head_dim + 1) / 2, scales, s.span_size,
                                          p + r * kBlockTokens + t);
        });
      });
  }
  // Data after the last token is undefined, and may be NaN.
  std::fill(scale + a.tokens, scale + padded, 0.0f);
  std::fill(minimum + a.tokens, minimum + padded, 0.0f);
  for (int r = 0; r < a.rows; r++) {
    float* row = p + r * kBlockTokens;
    const Seen seen = seen_by(a, r);
    mask_scores(a, r, seen, padded, row);
    vf highest = vset(-std::numeric_limits<float>::infinity());
    for (int t = 0; t < padded; t += W) highest = vmax(highest, vload(row + t));
    a.maximum[r] = seen.none() ? 0.0f : lane_max(highest);
    vf sum = vzero(), offset = vzero(), top = vzero();
    for (int t = 0; t < padded; t += W) {
      const vf e = exponential(vsub(vload(row + t), vset(a.maximum[r]))), w = vmul(e, vload(scale + t));
      sum = vadd(sum, e);
      offset = vfma(e, vload(minimum + t), offset);
      top = vmax(top, w);
      vstore(row + t, w);
    }
    const float shift = lane_sum(offset);                                   // NaN if a weight, scale or minimum is NaN
    if (shift != shift) std::fill(row, row + padded, 0.0f), top = vzero();  // NaN cannot become integers
    const float largest = lane_max(top);
    const bool usable = largest > 1e-34f;  // otherwise the inverse would overflow; all such values equal their minimum
    const vf inverse = vset(usable ? 32767 / largest : 0.0f);
    for (int t = 0; t < padded; t += W) store_rounded(weights + r * kBlockTokens + t, vmul(vload(row + t), inverse));
    factor[r] = usable ? largest / 32767 : 0.0f;
    a.sum[r] = lane_sum(sum);
    std::fill_n(a.out + (size_t)r * s.padded_dim, s.padded_dim, shift);
  }
  for (int r = 0; r < a.rows; r += OR)
    with_constant<OR>(std::min(OR, a.rows - r), [&](auto rows) {
      int v = 0;
      for (; v + OV <= vectors; v += OV) weigh_integers<rows, OV, C>(a, r, v, weights, factor);
      for (; v < vectors; v++) weigh_integers<rows, 1, C>(a, r, v, weights, factor);
    });
}

}  // namespace

void bend_scores(const AttentionTile& a, int row, float factor, float* scores, int n) {
  if (a.soft_cap) soft_cap(scores, factor, a.soft_cap, n);
  else if (factor != 1) scale(scores, factor, n);
  if (!a.sloped) return;
  const float slope = a.slopes[row];
  const int distance = a.begin - (a.context[row] - 1);
  for (int t = 0; t < n; t++) scores[t] += slope * (float)(distance + t);
}

void convert_queries(const AttentionTile& tile, char* out) {
  switch (tile.layout->dtype) {
    case DType::i8:
      return round_queries(tile, 255, out);
    case DType::u4:
      return round_queries(tile, 15, out);
#if defined(AS_ISA_AVX512_BF16)
    case DType::bf16:
      return convert_queries_bf16(tile, out);
#endif
    default:
      return;  // attend() reads the queries themselves
  }
}

namespace {

void attend_all(const AttentionTile* tiles, int count) {
  auto one_by_one = [&](auto work) {
    for (int i = 0; i < count; i++) work(tiles[i]);
  };
  switch (tiles[0].layout->dtype) {
    case DType::f32:
      return one_by_one(attend_floats<FloatCache<float>>);
#if defined(AS_ISA_AVX512_BF16)
    case DType::bf16:
      return attend_bf16(tiles, count);
#else
    case DType::bf16:
      return one_by_one(attend_floats<FloatCache<uint16_t>>);
#endif
    case DType::i8:
      return one_by_one(attend_integers<Int8Cache>);
    case DType::u4:
      return one_by_one(attend_integers<UInt4Cache>);
  }
}

// Returns a copy of a block's first `tokens` tokens, the first `count` of them zeroed. Writes its spans' addresses.
std::vector<char> without_tokens(const SpanLayout& layout, const void* const* from, int count, int tokens,
                                 const void** spans) {
  const int size = layout.span_size, needed = (tokens + size - 1) / size;
  std::vector<char> copy(needed * layout.bytes);
  for (int i = 0; i < needed; i++) spans[i] = std::memcpy(copy.data() + i * layout.bytes, from[i], layout.bytes);
  const std::vector<float> zeros(layout.head_dim);
  for (int t = 0; t < count; t++)
    write_token(layout, copy.data() + t / size * layout.bytes, t % size, zeros.data(), zeros.data());
  return copy;
}

// Corrects rows that do not see all of the tile's tokens. Unseen tokens have weight 0, but 0 times a value that is not
// finite is NaN. Such a row is computed again alone, with only the tokens that it sees; otherwise this gives the same
// bits. A copy of the block has zeros for tokens before the row's window.
void mend_rows(const AttentionTile& a) {
  const SpanLayout& layout = *a.layout;
  const size_t padded = layout.padded_dim;
  for (int r = 0; r < a.rows; r++) {
    const Seen seen = seen_by(a, r);
    if (seen.none() || (seen.begin == 0 && seen.end == a.tokens)) continue;
    vf poison = vzero();  // NaN if any value is not finite
    for (size_t d = 0; d < padded; d += W) poison = vfma(vload(a.out + r * padded + d), vzero(), poison);
    if (vsum(poison) == 0) continue;
    AttentionTile alone = a;
    alone.rows = 1, alone.q[0] = a.q[r], alone.context[0] = a.context[r], alone.tokens = seen.end;
    alone.first[0] = a.first[r], alone.slopes[0] = a.slopes[r];
    std::vector<char> copy;
    const void* spans[kBlockTokens / kKeyGroup];
    if (seen.begin) copy = without_tokens(layout, a.spans, seen.begin, seen.end, spans), alone.spans = spans;
    alone.next = alone.spans, alone.cold = false;
    alone.maximum = a.maximum + r, alone.sum = a.sum + r, alone.out = a.out + r * padded;
    std::vector<char> query(query_bytes(layout));
    convert_queries(alone, query.data());
    alone.converted = query.data();
    attend_all(&alone, 1);
  }
}

}  // namespace

void attend(const AttentionTile* tiles, int count) {
  attend_all(tiles, count);
  for (int i = 0; i < count; i++) mend_rows(tiles[i]);
}

void index_scores(const AttentionTile* tiles, int count, const float* weights, float* out) {
  alignas(64) float scores[kTileRows * kBlockTokens];
  for (int i = 0; i < count; i++) {
    const AttentionTile& a = tiles[i];
#if defined(AS_ISA_AVX512_BF16)
    if (a.layout->pairs) scores_bf16(a, scores);
    else scores_of<FloatCache<float>>(a, scores);
#else
    if (a.layout->dtype == DType::bf16) scores_of<FloatCache<uint16_t>>(a, scores);
    else scores_of<FloatCache<float>>(a, scores);
#endif
    for (int t = 0; t < a.tokens; t += kKeyGroup)
      for (int v = 0; v < KV; v++) {
        vf sum = i ? vload(out + t + v * W) : vzero();
        for (int r = 0; r < a.rows; r++)
          sum =
              vfma(vset(weights[i * kTileRows + r]), vmax(vzero(), vload(scores + r * kBlockTokens + t + v * W)), sum);
        vstore(out + t + v * W, sum);
      }
  }
}

void end_attention() {
#if defined(AS_ISA_AVX512_BF16)
  end_attention_bf16();
#endif
}

void merge(int rows, float* maximum, float* sum, float* out, const float* block_maximum, const float* block_sum,
           const float* block_out, int padded_dim) {
  alignas(64) float state[4][kTileRows] = {}, scale[2][kTileRows];
  std::copy_n(maximum, rows, state[0]), std::copy_n(block_maximum, rows, state[1]);
  std::copy_n(sum, rows, state[2]), std::copy_n(block_sum, rows, state[3]);
  for (int r = 0; r < rows; r += W) {
    const vf m = vload(state[0] + r), b = vload(state[1] + r), top = vmax(m, b);
    const vf x = vexp(vsub(m, top)), y = vexp(vsub(b, top));
    vstore(state[0] + r, top), vstore(scale[0] + r, x), vstore(scale[1] + r, y);
    vstore(state[2] + r, vfma(vload(state[2] + r), x, vmul(vload(state[3] + r), y)));
  }
  std::copy_n(state[0], rows, maximum), std::copy_n(state[2], rows, sum);
  for (int r = 0; r < rows; r++, out += padded_dim, block_out += padded_dim) {
    const vf x = vset(scale[0][r]), y = vset(scale[1][r]);
    for (int d = 0; d < padded_dim; d += W) vstore(out + d, vfma(vload(out + d), x, vmul(vload(block_out + d), y)));
  }
}

}  // namespace AS_ISA
}  // namespace as
