// Attention of a tile over one block of a bfloat16 cache with bfloat16 products: the recipe of attention.cpp, where
// both operands of both products are bfloat16.
//
//   score    = scale * (rounded query . key), pairs of d in ascending order
//   weight   = e^(score - maximum) rounded to bfloat16, exactly 0 for tokens that the row does not see
//   sum      = the sum of the rounded weights, in float32. So the applied weights sum to exactly one: equal values are
//              reproduced exactly, and rounding the weights costs 2^-9 of the values' spread, not of the values
//   out[d]   = weights . values, pairs of tokens in ascending order
//
// AVX-512 BF16 sums with vdpbf16ps. AMX sums with tile products of 32 d or 32 tokens, for any number of rows. The two
// orders differ. Adding zeros changes neither result.
//
// Data after the last token is undefined, and may be NaN. Its scores are in lanes of their own, which are never read.
// Zeros replace its values. With an odd number of tokens, that includes the second half of the last pair.
#include "cpu/kernels/tables.h"

#if defined(AS_ISA_AVX512_BF16)
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/kernels/amx.h"
#include "cpu/kernels/attention_tiles.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// The first n of 16 lanes.
AS_INLINE __mmask16 lanes(int n) { return (__mmask16)_bzhi_u32(0xffff, (unsigned)std::max(0, std::min(n, 16))); }

// e^(scale * (x - top)), with factor = log2(e) * scale: 2^n times a polynomial for 2^r, 0 <= r < 1, which is 1 at 0.
// Its error of 2.9e-6 is a thousandth of the rounding to bfloat16. A minimum of 2^-125 avoids denormals.
AS_INLINE vf weight(vf x, vf top, vf factor) {
  const vf t = vmax(vset(-125.0f), vmul(vsub(x, top), factor));  // this order propagates NaN
  const vf r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = vfma(vset(0.013426706709501801f), r, vset(0.05224243820153787f));
  p = vfma(p, r, vset(0.24128022159352805f));
  p = vfma(p, r, vset(0.6930448427766488f));
  p = vfma(p, r, vset(1.0f));
  return _mm512_scalef_ps(p, t);  // uses the floor of t
}

// Replaces unscaled scores by weights; computes maxima and sums. Calls between() before each row.
template <typename Between>
void soften(const AttentionTile& a, Scores& scores, Weights& weights, Between&& between) {
  const bool bent = a.soft_cap || a.sloped;  // bend_scores() scales them, too
  const float scale = bent ? 1 : a.scale;
  const vf factor = vset(scale * 1.44269504088896341f);
  const vi ones = _mm512_set1_epi16(0x3f80);
  for (int r = 0; r < a.rows; r++) {
    between();
    float* x = scores[r];
    uint16_t* to = weights[r];
    const int limit = std::max(0, std::min(a.context[r] - a.begin, a.tokens));
    const int before = std::min(std::max(0, a.first[r] - a.begin), limit);  // tokens before the row's window
    if (bent) bend_scores(a, r, a.scale, x, (a.tokens + kKeyGroup - 1) / kKeyGroup * kKeyGroup);
    std::fill_n(x, before, -std::numeric_limits<float>::infinity());
    const int whole = limit / kStep * kStep, rest = limit - whole;
    const __mmask16 low_lanes = lanes(rest), high_lanes = lanes(rest - W);
    const vf lowest = vset(-std::numeric_limits<float>::infinity());
    vf low = lowest, high = lowest, sum = vzero();
    for (int t = 0; t < whole; t += kStep) low = vmax(low, vload(x + t)), high = vmax(high, vload(x + t + W));
    if (rest) {
      low = _mm512_mask_max_ps(low, low_lanes, low, vload(x + whole));
      high = _mm512_mask_max_ps(high, high_lanes, high, vload(x + whole + W));
    }
    const float maximum = limit > before ? _mm512_reduce_max_ps(vmax(low, high)) : 0.0f;
    const vf top = vset(maximum);
    auto put = [&](int t, vf first, vf second) {
      const vi both = (vi)_mm512_cvtne2ps_pbh(second, first);
      sum = vdot_bf16(sum, both, ones);
      _mm512_store_si512(to + t, both);
    };
    int t = 0;
    for (; t < whole; t += kStep) put(t, weight(vload(x + t), top, factor), weight(vload(x + t + W), top, factor));
    for (; t < a.tokens; t += kStep) {  // tokens from `limit` on: exactly 0
      const bool mixed = t == whole;
      put(t, _mm512_maskz_mov_ps(mixed ? low_lanes : 0, weight(vload(x + t), top, factor)),
          _mm512_maskz_mov_ps(mixed ? high_lanes : 0, weight(vload(x + t + W), top, factor)));
    }
    std::fill_n(to, before, (uint16_t)0);  // each added only 2^-125 to the sum
    a.maximum[r] = maximum * scale;
    a.sum[r] = _mm512_reduce_add_ps(sum);
  }
}

// The addresses of a token's group of keys and of its value. spans: the tile's, or those of the next block, which is
// prefetched while the same tokens of this one are processed.
const char* keys_of(const SpanLayout& s, const void* const* spans, int token) {
  return static_cast<const char*>(spans[token / s.span_size]) + token % s.span_size / kKeyGroup * s.group_bytes;
}
const char* value_of(const SpanLayout& s, const void* const* spans, int token) {
  return static_cast<const char*>(spans[token / s.span_size]) + s.value_offset + token % s.span_size * s.value_bytes;
}

AS_INLINE vi lower_half(vi pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff)); }

#if defined(AS_ISA_AMX)

AS_INLINE void prefetch_tile(const char* p, int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) prefetch_far(p + i * stride);
}

// Multiplies queries with groups of keys, 32 d in a step.
class ScoreSteps : public TileSteps<ScoreSteps> {
 public:
  ScoreSteps(const AttentionTile& a, Scores& out)
      : TileSteps((a.tokens + kKeyGroup - 1) / kKeyGroup, a.layout->key_dim / kStep),
        a_(a),
        s_(*a.layout),
        out_(out[0]) {}

 private:
  friend TileSteps;
  template <int N>
  void step_of() {
    if (at_ == 0) {
      configure_tiles(a_.rows);
      for (int i = 0; i < N; i++) {
        const int token = (group_ + i) * kKeyGroup;
        keys_[i] = keys_of(s_, a_.spans, token), ahead_[i] = keys_of(s_, a_.next, token);
      }
      zero_tiles<N>();
    }
    const size_t at = (size_t)at_ * 1024;
    tile_load<4>(a_.converted + at_ * kStep * 2, s_.key_dim * 2);
    step_tiles<N>([&](int i) { return keys_[i] + at; }, 64);
    if (a_.cold)
      for (int i = 0; i < N; i++) prefetch_tile(ahead_[i] + at, 64);
    if (!ends()) return;
    store_tiles<N>(out_ + group_ * kKeyGroup, kBlockTokens * sizeof(float));
    next(N);
  }

  const AttentionTile& a_;
  const SpanLayout& s_;
  float* const out_;
  const char *keys_[kColumnTiles], *ahead_[kColumnTiles];
};

// Multiplies weights with columns of values, 32 tokens in a step.
class ValueSteps : public TileSteps<ValueSteps> {
 public:
  ValueSteps(const AttentionTile& a, const Weights& weights)
      : TileSteps(a.layout->padded_dim / 16, (a.tokens + kStep - 1) / kStep), a_(a), s_(*a.layout), weights_(weights) {}

 private:
  friend TileSteps;
  template <int N>
  void step_of() {
    if (at_ == 0) {
      configure_tiles(a_.rows);
      zero_tiles<N>();
    }
    const int t = at_ * kStep;
    tile_load<4>(weights_[0] + t, kBlockTokens * 2);
    if (s_.span_size >= kStep && t + kStep <= a_.tokens) {
      const char* values = value_of(s_, a_.spans, t) + group_ * 64;
      step_tiles<N>([&](int i) { return values + i * 64; }, 2 * s_.value_bytes);  // from one pair of tokens to the next
    } else {                                                                      // spans of 16, or the last tokens
      alignas(64) char copy[16 * N * 64];
      for (int p = 0; p < 16; p++) {
        const int token = t + 2 * p;
        for (int i = 0; i < N; i++) {
          vi x = _mm512_setzero_si512();
          if (token < a_.tokens) x = _mm512_loadu_si512(value_of(s_, a_.spans, token) + (group_ + i) * 64);
          if (token + 1 == a_.tokens) x = lower_half(x);
          _mm512_store_si512(copy + (p * N + i) * 64, x);
        }
      }
      step_tiles<N>([&](int i) { return copy + i * 64; }, N * 64);
    }
    if (a_.cold)
      for (int p = 0; p < kStep / 2 && t + 2 * p < a_.tokens; p++)
        for (int i = 0; i < N; i++) prefetch_far(value_of(s_, a_.next, t + 2 * p) + (group_ + i) * 64);
    if (!ends()) return;
    store_tiles<N>(a_.out + group_ * 16, s_.padded_dim * sizeof(float));
    next(N);
  }

  const AttentionTile& a_;
  const SpanLayout& s_;
  const Weights& weights_;
};

template <typename Steps>
void finish(Steps& steps) {
  while (steps.left() > 0) steps.step();
}

void score_tile(const AttentionTile& a, Scores& scores) {
  ScoreSteps steps(a, scores);
  finish(steps);
}

// Pipelines the tiles: while the vector units compute a tile's softmax, the tile unit computes the previous tile's
// values and the next tile's scores.
template <typename ScoreSteps, typename ValueSteps>
void attend_steps(const AttentionTile* tiles, int count) {
  alignas(64) Scores scores[2];
  alignas(64) Weights weights[2];
  ScoreSteps first(tiles[0], scores[0]);
  finish(first);
  for (int i = 0; i < count; i++) {
    const int now = i % 2, other = 1 - now;
    ValueSteps before(tiles[std::max(0, i - 1)], weights[other]);
    ScoreSteps after(tiles[std::min(count - 1, i + 1)], scores[other]);
    int values_left = i > 0 ? before.left() : 0, scores_left = i + 1 < count ? after.left() : 0;
    const int each_row = (values_left + scores_left + tiles[i].rows - 1) / tiles[i].rows;
    auto step = [&] {
      if (values_left > 0) before.step(), values_left--;
      else if (scores_left > 0) after.step(), scores_left--;
    };
    soften(tiles[i], scores[now], weights[now], [&] {
      for (int n = 0; n < each_row; n++) step();
    });
    while (values_left + scores_left > 0) step();
  }
  ValueSteps last(tiles[count - 1], weights[(count - 1) % 2]);
  finish(last);
}

void attend_tiles(const AttentionTile* tiles, int count) {
  if (tiles[0].layout->for_one_tile) attend_steps<LatentScoreSteps, LatentValueSteps>(tiles, count);
  else attend_steps<ScoreSteps, ValueSteps>(tiles, count);
}

#else

// Rows of a product. 8 x 2 accumulators use each operand several times, and their chains hide the latency of 6 cycles.
constexpr int kProductRows = 8;

// out [R][16 G]: scores of rows [r0, r0 + R) with G groups of keys.
template <int R, int G, bool kCold>
void score_rows(const AttentionTile& a, int r0, int token, float* out) {
  const SpanLayout& s = *a.layout;
  const int pairs = (s.head_dim + 1) / 2;
  const size_t stride = s.key_dim * 2;
  const char* queries = a.converted + r0 * stride;
  const char *keys[G], *ahead[G];
  for (int g = 0; g < G; g++)
    keys[g] = keys_of(s, a.spans, token + g * kKeyGroup), ahead[g] = keys_of(s, a.next, token + g * kKeyGroup);
  vf sum[R][G];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) sum[r][g] = vzero();
  for (int p = 0; p < pairs; p++) {
    vi k[G];
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) {
      k[g] = _mm512_loadu_si512(keys[g] + p * 64);
      if (kCold) prefetch_far(ahead[g] + p * 64);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vi x = iset_bytes(queries + r * stride + 4 * p);
#pragma GCC unroll 2
      for (int g = 0; g < G; g++) sum[r][g] = vdot_bf16(sum[r][g], k[g], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) vstore(out + r * kBlockTokens + g * W, sum[r][g]);
}

template <int R, int V>
AS_INLINE void weigh_pair(const vi (&x)[V], const uint16_t* weights, vf (&sum)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const vi w = iset_bytes(weights + r * kBlockTokens);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[r][v] = vdot_bf16(sum[r][v], x[v], w);
  }
}

// out of rows [r0, r0 + R), vectors [first, first + V).
template <int R, int V, bool kCold>
void weigh_rows(const AttentionTile& a, const Weights& weights, int r0, int first) {
  const SpanLayout& s = *a.layout;
  const size_t stride = 2 * s.value_bytes;
  vf sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sum[r][v] = vzero();
  vi x[V];
  for (int t = 0; t < a.tokens; t += s.span_size) {
    const char *values = value_of(s, a.spans, t) + first * 64, *ahead = value_of(s, a.next, t) + first * 64;
    const uint16_t* w = weights[r0] + t;
    const int tokens = std::min(s.span_size, a.tokens - t);
    for (int p = 0; p < tokens / 2; p++, values += stride, ahead += stride, w += 2) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        x[v] = _mm512_loadu_si512(values + v * 64);
        if (kCold) prefetch_far(ahead + v * 64);
      }
      weigh_pair<R, V>(x, w, sum);
    }
    if (tokens % 2) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) x[v] = lower_half(_mm512_loadu_si512(values + v * 64));
      weigh_pair<R, V>(x, w, sum);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) vstore(a.out + (size_t)(r0 + r) * s.padded_dim + (first + v) * W, sum[r][v]);
}

template <bool kCold, int R>
void weigh_columns(const AttentionTile& a, const Weights& weights, int r0) {
  constexpr int V = R <= 4 ? 4 : 2;
  const int vectors = a.layout->padded_dim / W;
  int v = 0;
  for (; v + V <= vectors; v += V) weigh_rows<R, V, kCold>(a, weights, r0, v);
  for (; v < vectors; v++) weigh_rows<R, 1, kCold>(a, weights, r0, v);
}

// Calls f(row, number of rows, whether to prefetch) for each part of the tile.
template <typename F>
void in_parts(const AttentionTile& a, F&& f) {
  for (int r = 0; r < a.rows; r += kProductRows)
    with_constant<kProductRows>(std::min(kProductRows, a.rows - r), [&](auto rows) {
      if (a.cold && r == 0) f(r, rows, std::true_type{});
      else f(r, rows, std::false_type{});
    });
}

void score_tile(const AttentionTile& a, Scores& scores) {
  in_parts(a, [&](int r, auto rows, auto cold) {
    int t = 0;
    for (; t + 2 * kKeyGroup <= a.tokens; t += 2 * kKeyGroup) score_rows<rows, 2, cold>(a, r, t, scores[r] + t);
    for (; t < a.tokens; t += kKeyGroup) score_rows<rows, 1, cold>(a, r, t, scores[r] + t);
  });
}

void attend_tile(const AttentionTile& a) {
  alignas(64) Scores scores;
  alignas(64) Weights weights;
  score_tile(a, scores);
  soften(a, scores, weights, [] {});
  in_parts(a, [&](int r, auto rows, auto cold) { weigh_columns<cold, rows>(a, weights, r); });
}

void attend_tiles(const AttentionTile* tiles, int count) {
  for (int i = 0; i < count; i++) attend_tile(tiles[i]);
}

#endif

}  // namespace

void convert_queries_bf16(const AttentionTile& a, char* out) {
  const int dim = a.layout->head_dim, padded = a.layout->key_dim;
  const auto rounded = [&](int r, int d) {
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes(dim - d), a.q[r] + d));
  };
#if defined(AS_ISA_AMX)
  if (a.layout->for_one_tile) {  // the second operand of the scores' products: [d / 2][row][2]
    alignas(64) uint16_t rows[kTileRows][kStep] = {};
    for (int d = 0; d < padded; d += kStep, out += sizeof rows) {
      for (int r = 0; r < a.rows; r++)
        for (int i = 0; i < kStep; i += W) _mm256_store_si256((__m256i*)(rows[r] + i), rounded(r, d + i));
      transpose_16((const char*)rows, sizeof rows[0], out);
    }
    return;
  }
#endif
  for (int r = 0; r < a.rows; r++, out += padded * 2)
    for (int d = 0; d < padded; d += W) _mm256_storeu_si256((__m256i*)(out + d * 2), rounded(r, d));
}

void attend_bf16(const AttentionTile* tiles, int count) { attend_tiles(tiles, count); }

void scores_bf16(const AttentionTile& a, float* out) { score_tile(a, *reinterpret_cast<Scores*>(out)); }

void end_attention_bf16() {
#if defined(AS_ISA_AMX)
  if (configured_rows) tile_release();
  configured_rows = 0;
#endif
}

}  // namespace AS_ISA
}  // namespace as
#endif
