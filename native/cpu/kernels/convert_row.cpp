// Converts rows of activations for GEMMs (ConvertedLayout): to integers with a scale for each row, or to bfloat16.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/kernels/integers.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// A row's scale and its inverse for values up to `most`: a = x / scale, rounded to nearest. A NaN or infinite x makes
// the scale and the row's results NaN. A row of (nearly) zeros gets the inverse 0 and becomes zeros. The scale is that
// of products with integers that are `unit` times the weights.
struct RowScale {
  float scale, inverse;
};
RowScale row_scale(const float* x, int k, float most, float unit) {
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
  return {top / (most * unit), most / top};
}

// The integers of a format's weights are this many times the weights.
AS_INLINE float weight_unit(const Packed& w) { return w.format == Format::e2m1a16 ? 2.0f : 1.0f; }

// n <= W values of a row in the order of w's k, from k on.
AS_INLINE const float* values_of(const Packed& w, const float* x, int k, int n, float (&gathered)[W]) {
  if (!w.order) return x + k;
  for (int i = 0; i < n; i++) gathered[i] = w.order[k + i] < 0 ? 0.0f : x[w.order[k + i]];
  return gathered;
}

// Writes the values of a row and, for each of P planes, their sums within each group.
template <typename F, int P>
void quantize_planes(const Packed& w, const ConvertedLayout& at, const float* x, float inverse, char* out) {
  using Value = typename F::Value;
  constexpr bool kWhole = sizeof(Value) == 2;
  char* values = out + at.values_at;
  for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
    vi sums[2] = {iset(0), iset(0)};
    for (int i = k0; i < k0 + w.group_k(g); i += W) {
      const int n = std::min(W, k0 + w.group_k(g) - i);
      float gathered[W];
      const vi a = rounded(values_of(w, x, i, n, gathered), n, vset(inverse)),
               high = P == 1 ? a : shift_right<8>(iadd(a, iset(128))), low = isub(a, shift_left<8>(high));
      store_values<Value>(values + i * sizeof(Value), kWhole ? a : high, n);
      if (P == 2 && !kWhole) store_values<Value>(values + at.plane_bytes + i, low, n);
      sums[0] = iadd(sums[0], high);
      sums[1] = iadd(sums[1], low);
    }
    int32_t plane_sums[2];
    for (int p = 0; p < P; p++) {
      plane_sums[p] = isum(sums[p]);
      std::memcpy(out + ((size_t)p * w.groups() + g) * 4, &plane_sums[p], 4);
    }
    if (at.float_sums_at) {  // rounded as the recipe of matmul_integer.cpp says
      const float low = (float)plane_sums[P - 1], sum = P == 1 ? low : std::fma(256.0f, (float)plane_sums[0], low);
      std::memcpy(out + at.float_sums_at + 4 * (size_t)g, &sum, 4);
    }
  }
  const size_t used = kWhole ? ((size_t)w.k + 3) / 4 * 8 : w.k;
  for (int p = 0; p < (kWhole ? 1 : P); p++) std::memset(values + p * at.plane_bytes + used, 0, at.plane_bytes - used);
}

void quantize_row(const Packed& w, const float* x, char* out) {
  const ConvertedLayout at = converted_layout(w);
  const RowScale row = row_scale(x, w.inputs, w.planes == 1 ? 127.0f : 127.0f * 256 + 127, weight_unit(w));
  std::memcpy(out + at.scale_at, &row.scale, 4);
  if (row.inverse == 0) {
    std::memset(out, 0, at.scale_at);
    if (at.float_sums_at) std::memset(out + at.float_sums_at, 0, at.values_at - at.float_sums_at);
    std::memset(out + at.values_at, 0, at.bytes - at.values_at);
    return;
  }
  with_format(w,
              [&](auto format, auto planes) { quantize_planes<decltype(format), planes>(w, at, x, row.inverse, out); });
}

#if defined(AS_ISA_AVX512_BF16)
// Rounds a row to bfloat16: to nearest even, and denormals to zero as the products do. Pads with zeros to a whole unit.
void round_to_pairs(const Packed& w, const float* x, char* out) {
  for (int k = 0; k < w.k; k += 2 * W, out += 4 * W) {
    const int n = std::min(2 * W, w.k - k);
    const __mmask16 low = n >= W ? 0xffff : (__mmask16)((1 << n) - 1), high = n >= 2 * W ? 0xffff
                                                                              : n > W ? (__mmask16)((1 << (n - W)) - 1)
                                                                                      : 0;
    const __m512bh rounded =
        _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x + k + W), _mm512_maskz_loadu_ps(low, x + k));
    std::memcpy(out, &rounded, sizeof(rounded));
  }
}
#endif

}  // namespace

ConvertedLayout converted_layout(const Packed& w) {
  int value_bytes = 1;
  if (w.planes) with_format(w, [&](auto format, auto) { value_bytes = sizeof(typename decltype(format)::Value); });
#if defined(AS_ISA_AMX)
  const bool float_sums = w.planes && w.groups() > 1;
#else
  const bool float_sums = false;
#endif
  ConvertedLayout at = converted_row_layout(w, value_bytes, float_sums);
#if defined(AS_ISA_AVX512_BF16)
  // With an odd number of cache lines, a tile's rows do not map to the same set of the first-level cache.
  if (w.pairs || w.planes) at.bytes = (at.bytes / 64 | 1) * 64;
#endif
  return at;
}

void convert_row(const Packed& w, const float* x, char* out) {
  if (w.planes) return quantize_row(w, x, out);
#if defined(AS_ISA_AVX512_BF16)
  if (w.pairs) return round_to_pairs(w, x, out);
#endif
}

}  // namespace AS_ISA
}  // namespace as
