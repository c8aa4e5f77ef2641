// Attention of a few query rows that share one KV head over one block of kBlockTokens tokens of context.
//
// Recipe (the same in prefill and decode, whatever else is in the tile): score = one chain of fused multiply-adds over the
// head dimension, times scale; maximum over the tokens the row sees; e^(score - maximum), 0 for the others; their sum over
// vectors of tokens in ascending order, then over lanes; out[d] = one chain over ascending tokens. Tokens a row does not see
// add exact zeros, so it does not matter how far the tile's other rows see. Keys are stored [head_dim][16 tokens]: a lane is
// a token and no score needs a horizontal sum. Blocks are merged in ascending order (Milakov and Gimelshein, 2018).
#include <algorithm>
#include <limits>
#include "kernels.h"
#include "simd.h"
#include "tables.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int KV = kKeyGroup / W;  // vectors of a group of keys
#if defined(AS_ISA_AVX512)
constexpr int QR = 8, OR = 4, OV = 4;  // rows of a score tile; rows and vectors of an output tile
#elif defined(AS_ISA_AVX2)
constexpr int QR = 4, OR = 4, OV = 2;
#else
constexpr int QR = 4, OR = 4, OV = 4;
#endif

template <int R, typename T>
inline void scores(const T* keys, const float* const* q, int head_dim, float scale, float* out) {
  vf acc[R][KV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < KV; v++) acc[r][v] = vzero();
  for (int d = 0; d < head_dim; d++) {
    vf k[KV];
    for (int v = 0; v < KV; v++) k[v] = vload_as<T>(keys + d * kKeyGroup + v * W);
    for (int r = 0; r < R; r++) {
      const vf a = vset(q[r][d]);
      for (int v = 0; v < KV; v++) acc[r][v] = vfma(a, k[v], acc[r][v]);
    }
  }
  const vf s = vset(scale);
  for (int r = 0; r < R; r++)
    for (int v = 0; v < KV; v++) vstore(out + r * kBlockTokens + v * W, vmul(acc[r][v], s));
}

template <typename T, int R>
inline void scores_of(int rows, const T* keys, const float* const* q, int head_dim, float scale, float* out) {
  if (rows == R) return scores<R, T>(keys, q, head_dim, scale, out);
  if constexpr (R > 1) scores_of<T, R - 1>(rows, keys, q, head_dim, scale, out);
}

// out[r][0 .. V * W) = sum over tokens of p[r][token] * values[token], continuing the chain in `out`.
template <int R, int V, typename T>
inline void weigh(const T* values, int padded_dim, const float* p, int tokens, float* out) {
  vf acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = vload(out + (size_t)r * padded_dim + v * W);
  for (int t = 0; t < tokens; t++) {
    vf x[V];
    for (int v = 0; v < V; v++) x[v] = vload_as<T>(values + (size_t)t * padded_dim + v * W);
    for (int r = 0; r < R; r++) {
      const vf a = vset(p[r * kBlockTokens + t]);
      for (int v = 0; v < V; v++) acc[r][v] = vfma(a, x[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) vstore(out + (size_t)r * padded_dim + v * W, acc[r][v]);
}

template <typename T, int R>
inline void weigh_rows(int rows, const T* values, int padded_dim, const float* p, int tokens, float* out) {
  if (rows == R) {
    int d = 0;
    for (; d + OV * W <= padded_dim; d += OV * W) weigh<R, OV, T>(values + d, padded_dim, p, tokens, out + d);
    for (; d < padded_dim; d += W) weigh<R, 1, T>(values + d, padded_dim, p, tokens, out + d);
    return;
  }
  if constexpr (R > 1) weigh_rows<T, R - 1>(rows, values, padded_dim, p, tokens, out);
}

template <typename T>
void attend_typed(const AttentionTile& a) {
  alignas(64) float p[kTileRows * kBlockTokens];
  const int padded = (a.tokens + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
  for (int t = 0; t < padded; t += kKeyGroup) {
    const T* keys = static_cast<const T*>(a.spans[t / a.span_size]) + (size_t)(t % a.span_size) * a.head_dim;
    for (int r = 0; r < a.rows; r += QR)
      scores_of<T, QR>(std::min(QR, a.rows - r), keys, a.q + r, a.head_dim, a.scale, p + r * kBlockTokens + t);
  }
  for (int r = 0; r < a.rows; r++) {
    float* row = p + r * kBlockTokens;
    const int limit = std::max(0, std::min(a.limit[r], a.tokens));
    for (int t = limit; t < padded; t++) row[t] = -std::numeric_limits<float>::infinity();
    vf m = vset(-std::numeric_limits<float>::infinity());
    for (int t = 0; t < padded; t += W) m = vmax(m, vload(row + t));
    const float maximum = limit > 0 ? vhmax(m) : 0.0f;
    vf sum = vzero();
    for (int t = 0; t < padded; t += W) {
      const vf e = vexp(vsub(vload(row + t), vset(maximum)));
      sum = vadd(sum, e);
      vstore(row + t, e);
    }
    a.maximum[r] = maximum;
    a.sum[r] = vsum(sum);
  }
  std::fill_n(a.out, (size_t)a.rows * a.padded_dim, 0.0f);
  for (int t = 0; t < a.tokens; t += a.span_size) {
    const T* values = static_cast<const T*>(a.spans[t / a.span_size]) + a.v_offset;
    const int tokens = std::min(a.span_size, a.tokens - t);
    for (int r = 0; r < a.rows; r += OR)
      weigh_rows<T, OR>(std::min(OR, a.rows - r), values, a.padded_dim, p + r * kBlockTokens + t, tokens,
                        a.out + (size_t)r * a.padded_dim);
  }
}

}  // namespace

void attend(const AttentionTile& tile) {
  if (tile.dtype == DType::f32) attend_typed<float>(tile);
  else attend_typed<uint16_t>(tile);
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
