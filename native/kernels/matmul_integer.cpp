// y = x w^T + bias with quantized weights and per-token int8 activations (format.h): w8a8, w4a8.
//
// Recipe: within a group an exact integer sum of activation * (q - middle), so kernels and tilings are free; then, groups
// in ascending order, total = scale * sum + total and total = offset * (sum of the group's activations) + total, fused; at
// last total * the row's scale + bias. Nothing saturates:
//   VNNI     vpdpbusd adds four products of u8 and s8 to 32 bits.
//   without  8-bit weights: both widened to 16 bits for vpmaddwd (a pair is at most 2 * 255 * 127). Measured as fast as
//            vpmaddubsw of |w| and sign(a, w), and AVX-512 has no vpsign.
//            4-bit weights: vpmaddubsw; a pair is at most 2 * 15 * 127 = 3810, so eight of them fit 16 bits.
// Weights are used as they lie in memory at any number of rows: they need no block in float32.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "simd.h"
#include "tables.h"
#include "tile.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kPrefetch = 2048;  // bytes ahead

#if defined(AS_ISA_AVX512)
using vi = __m512i;
inline vi iload(const void* p) { return _mm512_loadu_si512(p); }
inline vi iset(int32_t x) { return _mm512_set1_epi32(x); }
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi iadd16(vi a, vi b) { return _mm512_add_epi16(a, b); }
inline vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
template <int N> inline vi shift_right16(vi a) { return _mm512_srli_epi16(a, N); }
inline vi pairs16(vi a, vi b) { return _mm512_madd_epi16(a, b); }
inline vi pairs8(vi a, vi b) { return _mm512_maddubs_epi16(a, b); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
#elif defined(AS_ISA_AVX2)
using vi = __m256i;
inline vi iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vi iset(int32_t x) { return _mm256_set1_epi32(x); }
inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi iadd16(vi a, vi b) { return _mm256_add_epi16(a, b); }
inline vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
template <int N> inline vi shift_right16(vi a) { return _mm256_srli_epi16(a, N); }
inline vi pairs16(vi a, vi b) { return _mm256_madd_epi16(a, b); }
inline vi pairs8(vi a, vi b) { return _mm256_maddubs_epi16(a, b); }
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
#else
using vi = int32x4_t;
inline vi iload(const void* p) { return vld1q_s32((const int32_t*)p); }
inline vi iset(int32_t x) { return vdupq_n_s32(x); }
inline vi iand(vi a, vi b) { return vandq_s32(a, b); }
template <int N> inline vi shift_right16(vi a) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), N)); }
inline vf to_float(vi a) { return vcvtq_f32_s32(a); }
#endif

inline int32_t four_bytes(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(AS_ISA_AVX512_VNNI) || defined(AS_ISA_NEON)
// acc + four products of u8 weights and s8 activations in every lane
inline vi dot(vi acc, vi w, vi a) {
#if defined(AS_ISA_AVX512_VNNI)
  // Not the intrinsic: GCC 12 copies the accumulator before and after each.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
  return acc;
#else
  const int16x8_t a16 = vmovl_s8(vget_low_s8(vreinterpretq_s8_s32(a)));
  auto two = [&](uint8x8_t bytes) {
    const int16x8_t w16 = vreinterpretq_s16_u16(vmovl_u8(bytes));
    return vpaddq_s32(vmull_s16(vget_low_s16(w16), vget_low_s16(a16)), vmull_s16(vget_high_s16(w16), vget_high_s16(a16)));
  };
  const uint8x16_t bytes = vreinterpretq_u8_s32(w);
  return vaddq_s32(acc, vpaddq_s32(two(vget_low_u8(bytes)), two(vget_high_u8(bytes))));
#endif
}

struct W8A8 {
  static constexpr int kMiddle = 128, kUnit = 4;
  using Value = int8_t;
  template <int R>
  static AS_INLINE void group(const char* w, int k, const char* a, size_t stride, vi (&acc)[R][NV]) {
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi raw[NV];
      __builtin_prefetch(w + kPrefetch);
      __builtin_prefetch(w + kPrefetch + 64);
      for (int v = 0; v < NV; v++) raw[v] = iload(w + v * W * 4);
      for (int r = 0; r < R; r++) {
        const vi value = iset(four_bytes(a + r * stride + i));
        for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], raw[v], value);
      }
    }
  }
};

struct W4A8 {
  static constexpr int kMiddle = 8, kUnit = 8;
  using Value = int8_t;
  template <int R>
  static AS_INLINE void group(const char* w, int k, const char* a, size_t stride, vi (&acc)[R][NV]) {
    const vi mask = iset(0x0f0f0f0f);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi low[NV], high[NV];
      __builtin_prefetch(w + kPrefetch);
      __builtin_prefetch(w + kPrefetch + 64);
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        low[v] = iand(raw, mask), high[v] = iand(shift_right16<4>(raw), mask);
      }
      for (int r = 0; r < R; r++) {
        const vi first = iset(four_bytes(a + r * stride + i)), second = iset(four_bytes(a + r * stride + i + 4));
        for (int v = 0; v < NV; v++) acc[r][v] = dot(dot(acc[r][v], low[v], first), high[v], second);
      }
    }
  }
};

#else

struct W8A8 {
  static constexpr int kMiddle = 128, kUnit = 4;
  using Value = int16_t;  // of four k in the order 0, 2, 1, 3: as the even and the odd bytes of a lane are unpacked
  template <int R>
  static AS_INLINE void group(const char* w, int k, const char* a, size_t stride, vi (&acc)[R][NV]) {
    const vi mask = iset(0x00ff00ff);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi even[NV], odd[NV];
      __builtin_prefetch(w + kPrefetch);
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        even[v] = iand(raw, mask), odd[v] = shift_right16<8>(raw);
      }
      for (int r = 0; r < R; r++) {
        const vi first = iset(four_bytes(a + r * stride + 2 * i)), second = iset(four_bytes(a + r * stride + 2 * i + 4));
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(iadd(acc[r][v], pairs16(even[v], first)), pairs16(odd[v], second));
      }
    }
  }
};

struct W4A8 {
  static constexpr int kMiddle = 8, kUnit = 8;
  using Value = int8_t;
  template <int R>
  static AS_INLINE void group(const char* w, int k, const char* a, size_t stride, vi (&acc)[R][NV]) {
    const vi mask = iset(0x0f0f0f0f), ones = iset(0x00010001);
    for (int k0 = 0; k0 < k; k0 += 32) {  // eight pairs: as many as 16 bits hold
      vi part[R][NV];
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) part[r][v] = iset(0);
      for (int i = k0; i < k0 + 32 && i < k; i += kUnit, w += NR * 4) {
        vi low[NV], high[NV];
        __builtin_prefetch(w + kPrefetch);
        for (int v = 0; v < NV; v++) {
          const vi raw = iload(w + v * W * 4);
          low[v] = iand(raw, mask), high[v] = iand(shift_right16<4>(raw), mask);
        }
        for (int r = 0; r < R; r++) {
          const vi first = iset(four_bytes(a + r * stride + i)), second = iset(four_bytes(a + r * stride + i + 4));
          for (int v = 0; v < NV; v++) part[r][v] = iadd16(iadd16(part[r][v], pairs8(low[v], first)), pairs8(high[v], second));
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], pairs16(part[r][v], ones));
    }
  }
};

#endif

// R rows from `row` on against one panel.
template <typename F, int R>
void tile(const Packed& w, const PreparedLayout& at, const Activations& a, int row, int panel, const float* bias, float* y, int ldy) {
  vf total[R][NV];
  const char* first = a.prepared + row * a.stride;
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) total[r][v] = vzero();
  for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
    vi acc[R][NV];
    for (int r = 0; r < R; r++) {
      const vi start = iset(-F::kMiddle * four_bytes(first + r * a.stride + 4 * g));
      for (int v = 0; v < NV; v++) acc[r][v] = start;
    }
    F::template group<R>(w.weights(panel, g), w.group_k(g), first + at.values_at + k0 * sizeof(typename F::Value), a.stride, acc);
    vi chains[R * NV];
    spill(acc, chains);
    const float* scale = w.scales(panel, g);
    for (int r = 0; r < R; r++) {
      const vf sum = vset((float)four_bytes(first + r * a.stride + 4 * g));
      for (int v = 0; v < NV; v++)
        total[r][v] = vfma(vload(scale + NR + v * W), sum, vfma(vload(scale + v * W), to_float(chains[r * NV + v]), total[r][v]));
    }
  }
  const int column = panel * NR, columns = w.n - column;
  for (int r = 0; r < R; r++) {
    float scale;
    std::memcpy(&scale, first + r * a.stride + at.scale_at, 4);
    float* out = y + (size_t)(row + r) * ldy + column;
    alignas(64) float edge[NR];
    for (int v = 0; v < NV; v++) vstore(edge + v * W, vmul(total[r][v], vset(scale)));
    if (columns >= NR) {
      for (int v = 0; v < NV; v++) {
        const vf value = vload(edge + v * W);
        vstore(out + v * W, bias ? vadd(value, vload(bias + column + v * W)) : value);
      }
    } else {
      for (int j = 0; j < columns; j++) out[j] = bias ? edge[j] + bias[column + j] : edge[j];
    }
  }
}

template <typename F>
void matmul_format(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  const PreparedLayout at = prepared(w);
  for (int m0 = 0; m0 < m; m0 += MB)
    for (int p = p0; p < p1; p++)
      for (int r0 = m0; r0 < std::min(m, m0 + MB); r0 += MR)
        with_constant<MR>(std::min(MR, std::min(m, m0 + MB) - r0), [&](auto count) {
          tile<F, decltype(count)::value>(w, at, a, r0, p, bias, y, ldy);
        });
}

// Values of one row, four k at a time, in the order in which the kernel reads them.
template <typename Value>
void store_values(const float* rounded, int n, int k0, char* out) {
  Value* to = reinterpret_cast<Value*>(out) + k0;
  for (int i = 0; i < n; i++) to[i] = (Value)(int)rounded[i];
  if (sizeof(Value) == 2)
    for (int i = 0; i + 4 <= (n + 3) / 4 * 4; i += 4) std::swap(to[i + 1], to[i + 2]);
}

}  // namespace

void matmul_integer(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  if (w.format == Format::w8a8) matmul_format<W8A8>(w, a, bias, y, ldy, m, p0, p1);
  else matmul_format<W4A8>(w, a, bias, y, ldy, m, p0, p1);
}

PreparedLayout prepared(const Packed& w) {
  PreparedLayout at = prepared_layout(w, w.format == Format::w8a8 ? sizeof(W8A8::Value) : sizeof(W4A8::Value));
#if defined(AS_ISA_AVX512_BF16)
  // An odd number of lines: equal places of a tile's rows then do not share a set of the first-level cache.
  if (w.pairs || has_integer_activations(w.format)) at.bytes = (at.bytes / 64 | 1) * 64;
#endif
  return at;
}

// Per-token dynamic quantization: scale = max |x| / 127, a = x / scale to nearest. A NaN or infinite x makes the scale NaN,
// and so the row's results. A row of (nearly) zeros is zeros.
static void prepare_integers(const Packed& w, const float* x, char* out) {
  const PreparedLayout at = prepared(w);
  vf largest = vzero(), poison = vzero();
  int i = 0;
  for (; i + W <= w.k; i += W) {
    const vf v = vload(x + i);
    largest = vmax(largest, vmax(v, vsub(vzero(), v)));
    poison = vfma(v, vzero(), poison);
  }
  float most = vhmax(largest), bad = vsum(poison);
  for (; i < w.k; i++) {
    most = std::max(most, std::fabs(x[i]));
    bad += x[i] * 0.0f;
  }
  const bool usable = most > 1e-34f && !std::isnan(bad);
  const float scale = std::isnan(bad) ? NAN : usable ? most / 127.0f : 0.0f, inverse = usable ? 127.0f / most : 0.0f;
  std::memcpy(out + at.scale_at, &scale, 4);
  std::memset(out + at.values_at, 0, at.bytes - at.values_at);
  if (!usable) {
    std::memset(out, 0, 4 * (size_t)w.groups());
    return;
  }
  int32_t sum = 0;
  constexpr int kChunk = 32;
  const int step = w.groups() > 1 && w.group % kChunk ? 8 : kChunk;  // divides the size of all groups but the last
  for (int k0 = 0, g = 0; k0 < w.k; k0 += step) {
    alignas(64) float rounded[kChunk] = {};
    const int n = std::min(step, w.k - k0);
    std::memcpy(rounded, x + k0, n * sizeof(float));
    for (int j = 0; j < kChunk; j += W) vstore(rounded + j, vround(vmul(vload(rounded + j), vset(inverse))));
    if (w.format == Format::w8a8) store_values<W8A8::Value>(rounded, n, k0, out + at.values_at);
    else store_values<W4A8::Value>(rounded, n, k0, out + at.values_at);
    for (int j = 0; j < kChunk; j++) sum += (int)rounded[j];
    if (k0 + n == w.k || (k0 + n) % w.group == 0) {
      std::memcpy(out + 4 * (size_t)g++, &sum, 4);
      sum = 0;
    }
  }
}

#if defined(AS_ISA_AVX512_BF16)
// Rounds a row to bfloat16, to nearest even, denormals to zero as the products take them; zeros up to a whole unit of the layout.
static void prepare_pairs(const Packed& w, const float* x, char* out) {
  for (int k = 0; k < w.k; k += 2 * W, out += 4 * W) {
    const int n = std::min(2 * W, w.k - k);
    const __mmask16 low = n >= W ? 0xffff : (__mmask16)((1 << n) - 1), high = n >= 2 * W ? 0xffff : n > W ? (__mmask16)((1 << (n - W)) - 1) : 0;
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x + k + W), _mm512_maskz_loadu_ps(low, x + k));
    std::memcpy(out, &rounded, sizeof(rounded));
  }
}
#endif

void prepare(const Packed& w, const float* x, char* out) {
  if (has_integer_activations(w.format)) return prepare_integers(w, x, out);
#if defined(AS_ISA_AVX512_BF16)
  if (w.pairs) return prepare_pairs(w, x, out);
#endif
  if (!is_quantized(w.format)) return;
  float* sums = reinterpret_cast<float*>(out);
  for (int g = 0; g < w.groups(); g++, x += w.group) {
    const int n = w.group_k(g);
    vf sum = vzero();
    int i = 0;
    for (; i + W <= n; i += W) sum = vadd(sum, vload(x + i));
    sums[g] = vsum(sum);
    for (; i < n; i++) sums[g] += x[i];
  }
}

}  // namespace AS_ISA
}  // namespace as
