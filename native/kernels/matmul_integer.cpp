// y = x w^T + bias with quantized weights and integer activations (format.h): w8a8 and w4a8 with per-token int8 activations;
// with VNNI or sdot int8 and int4 too, with per-token 16-bit activations.
//
// A 16-bit activation is two int8 planes, 256 * high + low with low in [-128, 127]: its error is 2^-16 of the row's largest
// value (rounding to bfloat16 would lose 2^-9 of each value), no weight needs to be converted to float, and planes are just
// more rows of the same product. At one row, 64 weights take a load and two products instead of four conversions, loads and
// multiply-adds.
//
// Recipe: within a group an exact integer sum of activation * (q - middle) for each plane, so kernels and tilings are free;
// then sum = 256 * high + low in float32, the group's sum of activations alike; groups in ascending order, total =
// scale * sum + total and total = offset * (sum of the group's activations) + total, fused; at last total * the row's scale
// + bias. Nothing saturates:
//   VNNI     vpdpbusd adds four products of u8 and s8 to 32 bits.
//   without  8-bit weights: both widened to 16 bits for vpmaddwd (a pair is at most 2 * 255 * 127). Measured as fast as
//            vpmaddubsw of |w| and sign(a, w), and AVX-512 has no vpsign.
//            4-bit weights: vpmaddubsw; a pair is at most 2 * 15 * 127 = 3810, so eight of them fit 16 bits.
//   Arm      integers_arm.h
// Weights are used as they lie in memory at any number of rows: they need no block in float32.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(AS_ISA_ARM)
#include "integers_arm.h"
#endif
#include "kernels.h"
#include "simd.h"
#include "tables.h"
#include "tile.h"

namespace as {
namespace AS_ISA {
namespace {

// Bytes ahead. Four bits pass more slowly than eight.
constexpr int kAheadBytes = kStreamAhead, kAheadNibbles = 1024;

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
#endif

inline int32_t four_bytes(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(AS_ISA_AVX512_VNNI)
// acc + four products of u8 weights and s8 activations in every lane
inline vi dot(vi acc, vi w, vi a) {
  // Not the intrinsic: GCC 12 copies the accumulator before and after each.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
  return acc;
}

// A group of R rows: line(r) is where the values of row (or plane of a row) r lie.
struct Bytes {
  static constexpr int kMiddle = 128, kUnit = 4;
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV]) {
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi raw[NV];
      prefetch_far(w + kAheadBytes);
      prefetch_far(w + kAheadBytes + 64);
      for (int v = 0; v < NV; v++) raw[v] = iload(w + v * W * 4);
      for (int r = 0; r < R; r++) {
        const vi value = iset(four_bytes(line(r) + i));
        for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], raw[v], value);
      }
    }
  }
};

struct Nibbles {
  static constexpr int kMiddle = 8, kUnit = 8;
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV]) {
    constexpr bool kSplit = R * NV < 8;  // too few chains for the latency: low and high nibbles in chains of their own
    const vi mask = iset(0x0f0f0f0f);
    vi upper[R][NV];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < NV; v++) upper[r][v] = iset(0);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi low[NV], high[NV];
      prefetch_far(w + kAheadNibbles);
      prefetch_far(w + kAheadNibbles + 64);
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        low[v] = iand(raw, mask), high[v] = iand(shift_right16<4>(raw), mask);
      }
      for (int r = 0; r < R; r++) {
        const vi first = iset(four_bytes(line(r) + i)), second = iset(four_bytes(line(r) + i + 4));
        for (int v = 0; v < NV; v++) {
          acc[r][v] = dot(acc[r][v], low[v], first);
          if constexpr (kSplit) upper[r][v] = dot(upper[r][v], high[v], second);
          else acc[r][v] = dot(acc[r][v], high[v], second);
        }
      }
    }
    if constexpr (kSplit)
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], upper[r][v]);
  }
};

#elif !defined(AS_ISA_ARM)

struct Bytes {
  static constexpr int kMiddle = 128, kUnit = 4;
  using Value = int16_t;  // of four k in the order 0, 2, 1, 3: as the even and the odd bytes of a lane are unpacked
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV]) {
    const vi mask = iset(0x00ff00ff);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi even[NV], odd[NV];
      prefetch_far(w + kAheadBytes);
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        even[v] = iand(raw, mask), odd[v] = shift_right16<8>(raw);
      }
      for (int r = 0; r < R; r++) {
        const vi first = iset(four_bytes(line(r) + 2 * i)), second = iset(four_bytes(line(r) + 2 * i + 4));
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(iadd(acc[r][v], pairs16(even[v], first)), pairs16(odd[v], second));
      }
    }
  }
};

struct Nibbles {
  static constexpr int kMiddle = 8, kUnit = 8;
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV]) {
    const vi mask = iset(0x0f0f0f0f), ones = iset(0x00010001);
    for (int k0 = 0; k0 < k; k0 += 32) {  // eight pairs: as many as 16 bits hold
      vi part[R][NV];
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) part[r][v] = iset(0);
      for (int i = k0; i < k0 + 32 && i < k; i += kUnit, w += NR * 4) {
        vi low[NV], high[NV];
        prefetch_far(w + kAheadNibbles);
        for (int v = 0; v < NV; v++) {
          const vi raw = iload(w + v * W * 4);
          low[v] = iand(raw, mask), high[v] = iand(shift_right16<4>(raw), mask);
        }
        for (int r = 0; r < R; r++) {
          const vi first = iset(four_bytes(line(r) + i)), second = iset(four_bytes(line(r) + i + 4));
          for (int v = 0; v < NV; v++) part[r][v] = iadd16(iadd16(part[r][v], pairs8(low[v], first)), pairs8(high[v], second));
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], pairs16(part[r][v], ones));
    }
  }
};

#endif

// R rows of P planes from `row` on against one panel.
template <typename F, int R, int P>
void tile(const Packed& w, const PreparedLayout& at, const Activations& a, int row, int panel, const float* bias, float* y, int ldy) {
  vf total[R][NV];
  const char* first = a.prepared + row * a.stride;
  const size_t sums = 4 * (size_t)w.groups();
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) total[r][v] = vzero();
  for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
    auto sum_of = [&](int r) __attribute__((always_inline)) { return four_bytes(first + r / P * a.stride + r % P * sums + 4 * g); };
    const char* values = first + at.values_at + k0 * sizeof(typename F::Value);
    vi acc[R * P][NV];
    for (int r = 0; r < R * P; r++) {
      const vi start = iset(-F::kMiddle * sum_of(r));
      for (int v = 0; v < NV; v++) acc[r][v] = start;
    }
    F::template group<R * P>(w.weights(panel, g), w.group_k(g),
                             [&](int r) __attribute__((always_inline)) { return values + r / P * a.stride + r % P * at.plane_bytes; }, acc);
    vi chains[R * P * NV];
    spill(acc, chains);
    const uint16_t* scale = w.scales(panel, g);
    for (int r = 0; r < R; r++) {
      const float low = (float)sum_of(r * P + P - 1);
      const vf sum = vset(P == 1 ? low : std::fma(256.0f, (float)sum_of(r * P), low));
      for (int v = 0; v < NV; v++) {
        vf chain = to_float(chains[(r * P + P - 1) * NV + v]);
        if (P == 2) chain = vfma(vset(256.0f), to_float(chains[r * P * NV + v]), chain);
        total[r][v] = vfma(vload_bf16(scale + NR + v * W), sum, vfma(vload_bf16(scale + v * W), chain, total[r][v]));
      }
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

template <typename F, int P>
void matmul_format(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  constexpr int kRows = MR / P;
  const PreparedLayout at = prepared(w);
  for (int m0 = 0, most = block_rows(m); m0 < m; m0 += most)
    for (int p = p0, end = std::min(m, m0 + most); p < p1; p++)
      for (int r0 = m0; r0 < end; r0 += kRows)
        with_constant<kRows>(std::min(kRows, end - r0), [&](auto count) {
          tile<F, decltype(count)::value, P>(w, at, a, r0, p, bias, y, ldy);
        });
}

// A row's scale and its inverse for values up to `most`: a = x / scale to nearest. A NaN or infinite x makes the scale NaN,
// and so the row's results. A row of (nearly) zeros has the inverse 0 and is zeros.
struct RowScale {
  float scale, inverse;
};
RowScale row_scale(const float* x, int k, float most) {
  vf largest = vzero(), poison = vzero();
  int i = 0;
  for (; i + W <= k; i += W) {
    const vf v = vload(x + i);
    largest = vmax(largest, vmax(v, vsub(vzero(), v)));
    poison = vfma(v, vzero(), poison);
  }
  float top = vhmax(largest), bad = vsum(poison);
  for (; i < k; i++) {
    top = std::max(top, std::fabs(x[i]));
    bad += x[i] * 0.0f;
  }
  if (std::isnan(bad)) return {NAN, 0};
  if (!(top > 1e-34f)) return {0, 0};
  return {top / most, most / top};
}

#if defined(AS_ISA_AVX512_VNNI)

// Values of a row as P planes, and their sums within each group.
template <int P>
void prepare_planes(const Packed& w, const PreparedLayout& at, const float* x, float inverse, char* out) {
  char* values = out + at.values_at;
  for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int i = k0; i < k0 + w.group_k(g); i += W) {
      const int n = std::min(W, k0 + w.group_k(g) - i);
      const __mmask16 mask = (__mmask16)(n == W ? 0xffff : (1 << n) - 1);
      const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), _mm512_set1_ps(inverse)));
      const __m512i high = P == 1 ? a : _mm512_srai_epi32(_mm512_add_epi32(a, _mm512_set1_epi32(128)), 8);
      _mm512_mask_cvtepi32_storeu_epi8(values + i, mask, high);
      sums[0] = _mm512_add_epi32(sums[0], high);
      if (P == 2) {
        const __m512i low = _mm512_sub_epi32(a, _mm512_slli_epi32(high, 8));
        _mm512_mask_cvtepi32_storeu_epi8(values + at.plane_bytes + i, mask, low);
        sums[1] = _mm512_add_epi32(sums[1], low);
      }
    }
    for (int p = 0; p < P; p++) {
      const int32_t sum = _mm512_reduce_add_epi32(sums[p]);
      std::memcpy(out + ((size_t)p * w.groups() + g) * 4, &sum, 4);
    }
  }
  for (int p = 0; p < P; p++) std::memset(values + p * at.plane_bytes + w.k, 0, at.plane_bytes - w.k);
}

#elif !defined(AS_WIDE_INTEGERS)

// Values of one row, four k at a time, in the order in which the kernel reads them.
template <typename Value>
void store_values(const float* rounded, int n, int k0, char* out) {
  Value* to = reinterpret_cast<Value*>(out) + k0;
  for (int i = 0; i < n; i++) to[i] = (Value)(int)rounded[i];
  if (sizeof(Value) == 2)
    for (int i = 0; i + 4 <= (n + 3) / 4 * 4; i += 4) std::swap(to[i + 1], to[i + 2]);
}

template <int P>
void prepare_planes(const Packed& w, const PreparedLayout& at, const float* x, float inverse, char* out) {
  static_assert(P == 1);
  std::memset(out + at.values_at, 0, at.plane_bytes);
  int32_t sum = 0;
  constexpr int kChunk = 32;
  const int step = w.groups() > 1 && w.group % kChunk ? 8 : kChunk;  // divides the size of all groups but the last
  for (int k0 = 0, g = 0; k0 < w.k; k0 += step) {
    alignas(64) float rounded[kChunk] = {};
    const int n = std::min(step, w.k - k0);
    std::memcpy(rounded, x + k0, n * sizeof(float));
    for (int j = 0; j < kChunk; j += W) vstore(rounded + j, vround(vmul(vload(rounded + j), vset(inverse))));
    if (w.format == Format::w8a8) store_values<Bytes::Value>(rounded, n, k0, out + at.values_at);
    else store_values<Nibbles::Value>(rounded, n, k0, out + at.values_at);
    for (int j = 0; j < kChunk; j++) sum += (int)rounded[j];
    if (k0 + n == w.k || (k0 + n) % w.group == 0) {
      std::memcpy(out + 4 * (size_t)g++, &sum, 4);
      sum = 0;
    }
  }
}

#endif

void prepare_integers(const Packed& w, const float* x, char* out) {
  const PreparedLayout at = prepared(w);
  const RowScale row = row_scale(x, w.k, w.planes == 1 ? 127.0f : 127.0f * 256 + 127);
  std::memcpy(out + at.scale_at, &row.scale, 4);
  if (row.inverse == 0) {
    std::memset(out, 0, at.scale_at);
    std::memset(out + at.values_at, 0, w.planes * at.plane_bytes);
    return;
  }
#if defined(AS_WIDE_INTEGERS)
  if (w.planes == 2) return prepare_planes<2>(w, at, x, row.inverse, out);
#endif
  prepare_planes<1>(w, at, x, row.inverse, out);
}

#if defined(AS_ISA_AVX512_BF16)
// Rounds a row to bfloat16, to nearest even, denormals to zero as the products take them; zeros up to a whole unit of the layout.
void prepare_pairs(const Packed& w, const float* x, char* out) {
  for (int k = 0; k < w.k; k += 2 * W, out += 4 * W) {
    const int n = std::min(2 * W, w.k - k);
    const __mmask16 low = n >= W ? 0xffff : (__mmask16)((1 << n) - 1), high = n >= 2 * W ? 0xffff : n > W ? (__mmask16)((1 << (n - W)) - 1) : 0;
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x + k + W), _mm512_maskz_loadu_ps(low, x + k));
    std::memcpy(out, &rounded, sizeof(rounded));
  }
}
#endif

}  // namespace

void matmul_integer(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  const bool bytes = bits_of(w.format) == 8;
#if defined(AS_WIDE_INTEGERS)
  if (w.planes == 2) return bytes ? matmul_format<Bytes, 2>(w, a, bias, y, ldy, m, p0, p1) : matmul_format<Nibbles, 2>(w, a, bias, y, ldy, m, p0, p1);
#endif
  bytes ? matmul_format<Bytes, 1>(w, a, bias, y, ldy, m, p0, p1) : matmul_format<Nibbles, 1>(w, a, bias, y, ldy, m, p0, p1);
}

PreparedLayout prepared(const Packed& w) {
  PreparedLayout at = prepared_layout(w, bits_of(w.format) == 8 ? sizeof(Bytes::Value) : sizeof(Nibbles::Value));
#if defined(AS_ISA_AVX512_BF16)
  // An odd number of lines: equal places of a tile's rows then do not share a set of the first-level cache.
  if (w.pairs || w.planes) at.bytes = (at.bytes / 64 | 1) * 64;
#endif
  return at;
}

void prepare(const Packed& w, const float* x, char* out) {
  if (w.planes) return prepare_integers(w, x, out);
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
