// InstantQuant: quantizes rows of a stored matrix (format.h).
//
// For each group of a row: scale = (max - min) / (2^bits - 1) and q = (x - min) / scale, rounded to nearest. Offset
// (the value of the middle q) and scale are stored as bfloat16: offset is rounded, and scale is enlarged just enough
// that min and max still have a q. This widens the range by at most 2^-7. q is computed with the stored values, so
// their rounding adds no other error. Uses only operations that round alike on every instruction set, so q, scales and
// offsets are the same on all of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/place.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

struct SourceF32 {
  using Storage = float;
  static vf load(const float* p) { return vload(p); }
};
struct SourceF16 {
  using Storage = uint16_t;
  static vf load(const uint16_t* p) { return vload_f16(p); }
};
struct SourceBF16 {
  using Storage = uint16_t;
  static vf load(const uint16_t* p) { return vload_bf16(p); }
};

// Calls f(vector, number of valid lanes) for x [n]. Lanes past the end repeat the last value.
template <typename S, typename F>
AS_INLINE void for_vectors(const typename S::Storage* x, int n, F&& f) {
  int i = 0;
  for (; i + W <= n; i += W) f(S::load(x + i), i);
  if (i < n) {
    typename S::Storage rest[W];
    for (int j = 0; j < W; j++) rest[j] = x[std::min(i + j, n - 1)];
    f(S::load(rest), i);
  }
}

// Converts a group's values: q = (x / 2 - half_offset) * factor + middle. Uses halves, because max - min may exceed the
// largest float.
struct Range {
  float half_offset, factor;
  uint16_t scale, offset;  // bfloat16
};

uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr uint16_t kNan = 0x7fc0;

// The maximum lane. With groups of 64, a scalar loop over lanes would take as long as everything else.
AS_INLINE float largest(vf v) {
#if defined(AS_ISA_AVX512)
  return _mm512_reduce_max_ps(v);
#elif defined(AS_ISA_AVX2)
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  return vhmax(v);
#endif
}
AS_INLINE bool any_nan(vf v) {
#if defined(AS_ISA_AVX512)
  return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
#elif defined(AS_ISA_AVX2)
  return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
#else
  return std::isnan(vsum(v));
#endif
}

template <typename S>
Range range_of(const typename S::Storage* x, int n, int bits, int64_t& bad) {
  const float infinity = std::numeric_limits<float>::infinity();
  vf low = vset(infinity), high = vset(-infinity), poison = vzero();
  for_vectors<S>(x, n, [&](vf v, int) __attribute__((always_inline)) {
    low = vmin(low, v), high = vmax(high, v);
    poison = vfma(v, vzero(), poison);
  });
  if (any_nan(poison)) {
    for_vectors<S>(x, n, [&](vf v, int i) {
      float lanes[W];
      vstore(lanes, v);
      for (int j = 0; j < W && i + j < n; j++) bad += !std::isfinite(lanes[j]);
    });
    return {0, 0, 0, kNan};
  }
  const float levels = (float)((1 << bits) - 1), middle = (float)(1 << (bits - 1));
  // + 0 avoids -0: which of two zeros is the minimum depends on the instruction set.
  const float half_min = -largest(vsub(vzero(), low)) * 0.5f + 0.0f, half_max = largest(high) * 0.5f;
  const float half_middle = half_min + middle * ((half_max - half_min) / levels);
  constexpr uint32_t kMost = 0x7eff0000, kSign = 0x80000000;  // the largest that is finite when doubled
  const uint32_t exact = bits_of_float(half_middle), rounded = (exact + 0x7fff + (exact >> 16 & 1)) & 0xffff0000;
  const float half_offset = float_of_bits((rounded & kSign) | std::min(rounded & ~kSign, kMost));
  const float half_scale = float_of_bits(
      (bits_of_float(std::max((half_offset - half_min) / middle, (half_max - half_offset) / (levels - middle))) +
       0xffff) &
      0xffff0000);
  const uint16_t offset = (uint16_t)(bits_of_float(2 * half_offset) >> 16);
  // If the range is negligible, all values become the middle. (The inverse would overflow.)
  if (half_scale < 0x1p-120f) return {0, 0, 0, offset};
  return {half_offset, 1.0f / half_scale, (uint16_t)(bits_of_float(2 * half_scale) >> 16), offset};
}

// Stores integral values of 0...255 as bytes.
AS_INLINE void store_bytes(uint8_t* out, vf v) {
#if defined(AS_ISA_AVX512)
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
#elif defined(AS_ISA_AVX2)
  const __m256i words = _mm256_cvtps_epi32(v);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)out, _mm_packus_epi16(halves, halves));
#else
  float lanes[W];
  vstore(lanes, v);
  for (int i = 0; i < W; i++) out[i] = (uint8_t)(int32_t)lanes[i];
#endif
}

// Writes q of x [n] to out [kPlacedK], followed by zeros.
template <typename S>
AS_INLINE void quantize_chunk(const typename S::Storage* x, int n, const Range& range, float levels, uint8_t* out) {
  const vf half = vset(0.5f), offset = vset(range.half_offset), factor = vset(range.factor), most = vset(levels),
           middle = vset(0.5f * (levels + 1));
  for_vectors<S>(x, n, [&](vf v, int i) __attribute__((always_inline)) {
    const vf scaled = vadd(vround(vmul(vsub(vmul(v, half), offset), factor)), middle);
    store_bytes(out + i, vmax(vzero(), vmin(most, scaled)));
  });
  if (n < kPlacedK) std::memset(out + n, 0, kPlacedK - n);
}

template <typename S>
int64_t quantize_from(const Packed& w, const SourceRows& source, int64_t r0, int64_t r1) {
  const int bits = bits_of(w.format);
  const float levels = (float)((1 << bits) - 1);
  int64_t bad = 0;
  for (int64_t row = r0; row < r1;) {
    const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
    const int rows = (int)std::min<int64_t>({r1 - row, (int64_t)kPlacedRows, (int64_t)(w.panel - lane)});
    const int64_t stride = source.stride;
    const auto* whole = static_cast<const typename S::Storage*>(source.data) + (row - source.row_offset) * stride;
    const auto* x = whole + source.column;
    Range ranges[kPlacedRows];
    int64_t known = -1;  // the group of the whole row that these ranges belong to
    for (int g = 0, first = 0; g < w.groups(); first += w.group_k(g), g++) {
      const int length = w.group_k(g);
      const int64_t group = (source.column + first) / source.group, begin = group * source.group,
                    end = std::min(source.columns, begin + source.group);
      for (int r = 0; r < rows; r++) {
        if (group != known) ranges[r] = range_of<S>(whole + r * stride + begin, (int)(end - begin), bits, bad);
        w.scales(panel, g)[lane + r] = ranges[r].scale;
        w.offsets(panel, g)[lane + r] = ranges[r].offset;
      }
      known = group;
      for (int k0 = 0; k0 < length; k0 += kPlacedK) {
        const int n = std::min(kPlacedK, length - k0);
        alignas(64) uint8_t q[kPlacedRows][kPlacedK];
        for (int r = 0; r < rows; r++) quantize_chunk<S>(x + r * stride + first + k0, n, ranges[r], levels, q[r]);
        place(w, q, rows, n, k0, lane, w.weights(panel, g));
      }
    }
    row += rows;
  }
  return bad;
}

}  // namespace

int64_t quantize(const Packed& w, const SourceRows& source, int64_t r0, int64_t r1) {
  if (source.type == SourceType::f32) return quantize_from<SourceF32>(w, source, r0, r1);
  if (source.type == SourceType::f16) return quantize_from<SourceF16>(w, source, r0, r1);
  return quantize_from<SourceBF16>(w, source, r0, r1);
}

}  // namespace AS_ISA
}  // namespace as
