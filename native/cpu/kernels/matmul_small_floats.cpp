// y = x w^T + bias with weights in small floats (format.h: e4m3, nf4, e2m1) and a scale for each group.
//
// Recipe of every output, for any number of rows: within a group, one chain of fused multiply-adds over k in ascending
// order from zero; groups in ascending order, total = scale * chain + total, fused; finally + bias. Dividing a group
// only spills the chain, without rounding.
//
// With one or two rows, weights are converted as they are read. With more rows, a block of a panel is converted once. A
// vector of weights takes one load and 5 instructions to convert. So AVX2's three vectors, 24 weights, take 5 cycles at
// 4 instructions a cycle, which keeps up with memory (4 bytes a cycle for a core).
#include <algorithm>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/small_floats.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// 8-bit floats are converted through 16-bit floats. Shifted to the fields of those, their bits give 2^-8 of the value,
// also for subnormals, at no extra cost. (The mask clears the copy of the sign that the arithmetic shift leaves.)
struct Bytes {
  static constexpr int kUnit = 1;
  static constexpr float kFactor = 256;  // of the sums
  explicit Bytes(Format) {}
  AS_INLINE void convert(const uint8_t* w, vf (&out)[kUnit][NV]) const {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
#if defined(AS_ISA_AVX512)
      const __m256i x = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(w + v * W))), 8);
      out[0][v] = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbfff)));
#elif defined(AS_ISA_AVX2)
      const __m128i x = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(w + v * W))), 8);
      out[0][v] = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(x, 1), _mm_set1_epi16((short)0xbfff)));
#else
      uint16_t half[W];
      for (int i = 0; i < W; i++) half[i] = (uint16_t)((w[v * W + i] & 0x80) << 8 | (w[v * W + i] & 0x7f) << 7);
      out[0][v] = vload_f16(half);
#endif
    }
  }
};

// 4-bit floats, from a table.
struct Nibbles {
  static constexpr int kUnit = 2;
  static constexpr float kFactor = 1;
#if defined(AS_ISA_AVX512)
  vf table;
  explicit Nibbles(Format format) : table(vload(table_of(format))) {}
  AS_INLINE vf look_up(vi quantized) const { return _mm512_permutexvar_ps(quantized, table); }
  AS_INLINE void convert(const uint8_t* w, vf (&out)[kUnit][NV]) const {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const vi pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w + v * W)));
      out[0][v] = look_up(pairs);  // only the four lowest bits of an index matter
      out[1][v] = look_up(_mm512_srli_epi32(pairs, 4));
    }
  }
#elif defined(AS_ISA_AVX2)
  vf low, high;
  explicit Nibbles(Format format) : low(vload(table_of(format))), high(vload(table_of(format) + 8)) {}
  // Selects by a lane's three lowest bits, then by the fourth bit, which `fourth` has as the sign.
  AS_INLINE vf look_up(vi quantized, vi fourth) const {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, quantized), _mm256_permutevar8x32_ps(high, quantized),
                            _mm256_castsi256_ps(fourth));
  }
  AS_INLINE void convert(const uint8_t* w, vf (&out)[kUnit][NV]) const {
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const vi pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(w + v * W)));
      out[0][v] = look_up(pairs, _mm256_slli_epi32(pairs, 28));
      out[1][v] = look_up(_mm256_srli_epi32(pairs, 4), _mm256_slli_epi32(pairs, 24));
    }
  }
#else
  const float* table;
  explicit Nibbles(Format format) : table(table_of(format)) {}
  AS_INLINE void convert(const uint8_t* w, vf (&out)[kUnit][NV]) const {
    for (int v = 0; v < NV; v++) {
      float even[W], odd[W];
      for (int i = 0; i < W; i++) even[i] = table[w[v * W + i] & 15], odd[i] = table[w[v * W + i] >> 4];
      out[0][v] = vload(even), out[1][v] = vload(odd);
    }
  }
#endif
};

constexpr int kDirectRows = 2;

// chain [R][NR] = (load ? chain : 0) + x [R, k] w [k, NR].
template <int R, typename F>
AS_INLINE void multiply_small_floats(const F& format, const uint8_t* w, int k, const float* x, size_t ldx, float* chain,
                                     bool load) {
  vf acc[R][NV];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = load ? vload(chain + r * NR + v * W) : vzero();
  vf b[F::kUnit][NV];
  auto step = [&](int i, int u) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const vf a = vset(x[r * ldx + i + u]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = vfma(a, b[u][v], acc[r][v]);
    }
  };
  int i = 0;
  for (; i + F::kUnit <= k; i += F::kUnit, w += NR) {
    for (int line = 0; line < NR; line += 64) prefetch_weights<R, kStreamAhead>(w + line);
    format.convert(w, b);
#pragma GCC unroll 2
    for (int u = 0; u < F::kUnit; u++) step(i, u);
  }
  if (i < k) format.convert(w, b), step(i, 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) vstore(chain + r * NR + v * W, acc[r][v]);
}

// The same for converted weights.
template <int R>
void multiply_floats(const float* w, int k, const float* x, size_t ldx, float* chain, bool load) {
  vf acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = load ? vload(chain + r * NR + v * W) : vzero();
  for (int i = 0; i < k; i++) {
    vf b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) b[v] = vload(w + (size_t)i * NR + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const vf a = vset(x[r * ldx + i]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = vfma(a, b[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) vstore(chain + r * NR + v * W, acc[r][v]);
}

template <typename F>
void convert_block(const F& format, const uint8_t* w, int k, float* out) {
  vf b[F::kUnit][NV];
  for (int i = 0; i < k; i += F::kUnit, w += NR) {
    format.convert(w, b);
    for (int u = 0; u < F::kUnit && i + u < k; u++)
      for (int v = 0; v < NV; v++) vstore(out + (size_t)(i + u) * NR + v * W, b[u][v]);
  }
}

// `rows` <= MB rows against one panel.
template <typename F>
void multiply_panel(const F& format, const Packed& w, const float* x, size_t ldx, int rows, int panel,
                    const float* bias, float* y, int ldy) {
  alignas(64) thread_local float chains[MB * NR], totals[MB * NR], block[KC * NR];
  std::fill_n(totals, rows * NR, 0.0f);
  for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
    alignas(64) float scales[2 * NR];
    load_scales(w, panel, g, 1, scales);
    for (int i = 0; i < NR; i += W) vstore(scales + i, vmul(vload(scales + i), vset(F::kFactor)));
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(w.weights(panel, g));
    const int length = w.group_k(g), most = rows <= kDirectRows ? length : KC;
    for (int first = 0; first < length; first += most) {
      const int k = std::min(most, length - first);
      const uint8_t* quantized = weights + w.weight_bytes(first);
      const float* values = x + k0 + first;
      if (rows <= kDirectRows) {
        with_constant<kDirectRows>(rows, [&](auto count) {
          multiply_small_floats<decltype(count)::value>(format, quantized, k, values, ldx, chains, first > 0);
        });
        continue;
      }
      convert_block(format, quantized, k, block);
      for (int r0 = 0; r0 < rows; r0 += MR)
        with_constant<MR>(std::min(MR, rows - r0), [&](auto count) {
          multiply_floats<decltype(count)::value>(block, k, values + r0 * ldx, ldx, chains + r0 * NR, first > 0);
        });
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) {
        float* total = totals + r * NR + v * W;
        vstore(total, vfma(vload(scales + v * W), vload(chains + r * NR + v * W), vload(total)));
      }
  }
  const int column = panel * NR, columns = std::min(NR, w.n - column);
  for (int r = 0; r < rows; r++) {
    float* out = y + (size_t)r * ldy + column;
    std::copy_n(totals + r * NR, columns, out);
    if (bias)
      for (int j = 0; j < columns; j++) out[j] += bias[column + j];
  }
}

template <typename F>
void matmul_format(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  const F format(w.format);
  for (int m0 = 0, most = block_rows(m); m0 < m; m0 += most)
    for (int p = p0; p < p1; p++)
      multiply_panel(format, w, a.x + (size_t)m0 * a.ldx, a.ldx, std::min(most, m - m0), p, bias, y + (size_t)m0 * ldy,
                     ldy);
}

}  // namespace

void matmul_small_floats(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0,
                         int p1) {
  if (w.format == Format::e4m3) return matmul_format<Bytes>(w, a, bias, y, ldy, m, p0, p1);
  matmul_format<Nibbles>(w, a, bias, y, ldy, m, p0, p1);
}

}  // namespace AS_ISA
}  // namespace as
