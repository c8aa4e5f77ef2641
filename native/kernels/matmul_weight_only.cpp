// y = x w^T + bias with int8 or int4 weights, computed in float32 (format.h), where there are no integer dot products that
// are worth their rounding of activations (Rules::wide_integers).
//
// Recipe of every output, whatever the number of rows: within a group one chain of fused multiply-adds of x and q - middle
// over k in ascending order, from zero; then, groups in ascending order, total = scale * chain + total and
// total = offset * (sum of x in the group) + total, fused; at last + bias. Scaling sums instead of weights saves an
// operation a weight where one row streams them: a core turns about as many into floats as its memory delivers.
//
// With few rows weights are converted in registers, several panels at a time where rows alone give too few independent
// chains; with many rows a block of them is converted once for all row tiles.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "simd.h"
#include "tables.h"
#include "tile.h"

#if !defined(AS_WIDE_INTEGERS)
namespace as {
namespace AS_ISA {
namespace {

// A format's weights: kUnit k are loaded as one Raw of W lanes, of which value<J>() gives the J-th k as floats q - middle.
struct Int8 {
  static constexpr int kUnit = 1, kBytes = W;  // bytes of one Raw
  using Raw = vf;
  static Raw load(const char* p) {
#if defined(AS_ISA_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(AS_ISA_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    int32_t four;
    std::memcpy(&four, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#endif
  }
  template <int J> static vf value(Raw raw) { return raw; }
};

struct Int4 {
  static constexpr int kUnit = 8, kBytes = 4 * W;
  template <int J> static constexpr int shift() { return J % 4 * 8 + J / 4 * 4; }
#if defined(AS_ISA_AVX512)
  using Raw = __m512i;
  static Raw load(const char* p) { return _mm512_loadu_si512(p); }
  // The permutation looks at the lowest four bits of a lane: a table saves masking and converting.
  template <int J> static vf value(Raw raw) {
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_permutexvar_ps(shift<J>() ? _mm512_srli_epi32(raw, shift<J>()) : raw, table);
  }
#elif defined(AS_ISA_AVX2)
  using Raw = __m256i;
  static Raw load(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
  template <int J> static vf value(Raw raw) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(raw, 28 - shift<J>()), 28));
  }
#else
  using Raw = int32x4_t;
  static Raw load(const char* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
  template <int J> static vf value(Raw raw) { return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(raw, 28 - shift<J>()), 28)); }
#endif
};

// f(std::integral_constant<int, J>) for J = 0 ... N - 1
template <typename F, int... J>
AS_INLINE void unroll(F&& f, std::integer_sequence<int, J...>) { (f(std::integral_constant<int, J>{}), ...); }

// acc [R][P * NV] += x [R, k] w [k, P panels], w[p] being k's first weight in panel p.
template <typename F, int R, int P>
AS_INLINE void chain(const char* const (&w)[P], int k, const float* x, int ldx, vf (&acc)[R][P * NV]) {
  auto step = [&](int i, int count) __attribute__((always_inline)) {
    typename F::Raw raw[P * NV];
    for (int p = 0; p < P; p++) {
      const char* at = w[p] + (size_t)(i / F::kUnit) * NV * F::kBytes;
      prefetch_far(at + kStreamAhead);
      for (int v = 0; v < NV; v++) raw[p * NV + v] = F::load(at + v * F::kBytes);
    }
    unroll([&](auto j) __attribute__((always_inline)) {
      constexpr int J = decltype(j)::value;
      if (J >= count) return;
      vf b[P * NV];
      for (int v = 0; v < P * NV; v++) b[v] = F::template value<J>(raw[v]);
      for (int r = 0; r < R; r++) {
        const vf a = vset(x[(size_t)r * ldx + i + J]);
        for (int v = 0; v < P * NV; v++) acc[r][v] = vfma(a, b[v], acc[r][v]);
      }
    }, std::make_integer_sequence<int, F::kUnit>{});
  };
  int i = 0;
  for (; i + F::kUnit <= k; i += F::kUnit) step(i, F::kUnit);
  if (i < k) step(i, k - i);
}

const float* sums_of(const Activations& a, int row) { return reinterpret_cast<const float*>(a.prepared + row * a.stride); }

// y [columns] = total [NR] (+ bias)
AS_INLINE void write(const vf* total, const float* bias, float* y, int columns) {
  if (columns >= NR) {
    for (int v = 0; v < NV; v++) vstore(y + v * W, bias ? vadd(total[v], vload(bias + v * W)) : total[v]);
    return;
  }
  float row[NR];
  for (int v = 0; v < NV; v++) vstore(row + v * W, total[v]);
  for (int j = 0; j < columns; j++) y[j] = bias ? row[j] + bias[j] : row[j];
}

// R rows from `row` on against P panels from `panel` on.
template <typename F, int R, int P>
void few_rows(const Packed& w, const Activations& a, int row, int panel, const float* bias, float* y, int ldy) {
  vf total[R][P * NV];
  for (auto& t : total)
    for (vf& v : t) v = vzero();
  for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
    vf acc[R][P * NV];
    for (auto& t : acc)
      for (vf& v : t) v = vzero();
    const char* data[P];
    for (int p = 0; p < P; p++) data[p] = w.weights(panel + p, g);
    chain<F, R, P>(data, w.group_k(g), a.x + (size_t)row * a.ldx + k0, a.ldx, acc);
    vf chains[R * P * NV];
    spill(acc, chains);
    for (int r = 0; r < R; r++) {
      const vf sum = vset(sums_of(a, row + r)[g]);
      for (int v = 0; v < P * NV; v++) {
        const uint16_t* scale = w.scales(panel + v / NV, g) + v % NV * W;
        total[r][v] = vfma(vload_bf16(scale + NR), sum, vfma(vload_bf16(scale), chains[r * P * NV + v], total[r][v]));
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) {
      const int column = (panel + p) * NR;
      write(total[r] + p * NV, bias ? bias + column : nullptr, y + (size_t)(row + r) * ldy + column, w.n - column);
    }
}

// Panels that R rows take at once, so that there are enough chains for the latency of a multiply-add.
template <int R>
constexpr int panels_at_once() { return R == 1 ? (NV == 2 ? 4 : 2) : NV == 2 && R <= 3 ? 2 : 1; }

// Rows [row, row + rows) against one panel; rows <= MB.
template <typename F>
void many_rows(const Packed& w, const Activations& a, int row, int rows, int panel, const float* bias, float* y, int ldy) {
  alignas(64) float block[KC * NR];
  alignas(64) float chains[MB * NR];  // of a group that goes on in the next block
  alignas(64) float totals[MB * NR];
  std::fill_n(totals, rows * NR, 0.0f);
  const size_t sums_stride = a.stride / sizeof(float);
  for (int g = 0, first = 0; g < w.groups(); first += w.group_k(g), g++) {
    const int length = w.group_k(g);
    for (int k0 = 0; k0 < length; k0 += KC) {
      const int kn = std::min(KC, length - k0);
      const char* data = w.weights(panel, g) + (size_t)(k0 / F::kUnit) * NV * F::kBytes;
      for (int i = 0; i < kn; i += F::kUnit)
        for (int v = 0; v < NV; v++) {
          const typename F::Raw raw = F::load(data + ((size_t)(i / F::kUnit) * NV + v) * F::kBytes);
          unroll([&](auto j) __attribute__((always_inline)) {
            constexpr int J = decltype(j)::value;
            if (i + J < kn) vstore(block + (i + J) * NR + v * W, F::template value<J>(raw));
          }, std::make_integer_sequence<int, F::kUnit>{});
        }
      const bool begins = k0 == 0, ends = k0 + kn == length;
      for (int r0 = 0; r0 < rows; r0 += MR) {
        fetch_piece(data + (size_t)kn / F::kUnit * NV * F::kBytes, (size_t)KC / F::kUnit * NV * F::kBytes, r0 / MR, (rows + MR - 1) / MR);
        with_constant<MR>(std::min(MR, rows - r0), [&](auto count) {
          constexpr int R = decltype(count)::value;
          vf acc[R][NV];
          vf* kept = reinterpret_cast<vf*>(chains + r0 * NR);
          for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++) acc[r][v] = begins ? vzero() : kept[r * NV + v];
          const float* x = a.x + (size_t)(row + r0) * a.ldx + first + k0;
          for (int i = 0; i < kn; i++) {
            vf b[NV];
            for (int v = 0; v < NV; v++) b[v] = vload(block + i * NR + v * W);
            for (int r = 0; r < R; r++) {
              const vf value = vset(x[(size_t)r * a.ldx + i]);
              for (int v = 0; v < NV; v++) acc[r][v] = vfma(value, b[v], acc[r][v]);
            }
          }
          if (!ends) return spill(acc, kept);
          vf scale[NV], offset[NV];
          for (int v = 0; v < NV; v++) scale[v] = vload_bf16(w.scales(panel, g) + v * W), offset[v] = vload_bf16(w.offsets(panel, g) + v * W);
          vf* total = reinterpret_cast<vf*>(totals + r0 * NR);
          const float* sums = sums_of(a, row + r0) + g;
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {  // unrolled for the reason that spill() is
            const vf sum = vset(sums[r * sums_stride]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) total[r * NV + v] = vfma(offset[v], sum, vfma(scale[v], acc[r][v], total[r * NV + v]));
          }
        });
      }
    }
  }
  const int column = panel * NR;
  for (int r = 0; r < rows; r++) {
    vf total[NV];
    for (int v = 0; v < NV; v++) total[v] = vload(totals + r * NR + v * W);
    write(total, bias ? bias + column : nullptr, y + (size_t)(row + r) * ldy + column, w.n - column);
  }
}

template <typename F>
void matmul_format(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  if (m > 2 * MR) {
    for (int m0 = 0, most = block_rows(m); m0 < m; m0 += most)
      for (int p = p0; p < p1; p++) many_rows<F>(w, a, m0, std::min(most, m - m0), p, bias, y, ldy);
    return;
  }
  for (int p = p0; p < p1;) {
    int done = 1;
    for (int r0 = 0; r0 < m; r0 += MR)
      with_constant<MR>(std::min(MR, m - r0), [&](auto count) {
        constexpr int R = decltype(count)::value, P = panels_at_once<R>();
        if (P > 1 && m == R && p + P <= p1) few_rows<F, R, P>(w, a, r0, p, bias, y, ldy), done = P;
        else few_rows<F, R, 1>(w, a, r0, p, bias, y, ldy);
      });
    p += done;
  }
}

}  // namespace

void matmul_weight_only(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  if (w.format == Format::int8) matmul_format<Int8>(w, a, bias, y, ldy, m, p0, p1);
  else matmul_format<Int4>(w, a, bias, y, ldy, m, p0, p1);
}

}  // namespace AS_ISA
}  // namespace as
#endif
