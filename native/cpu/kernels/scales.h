// Scales and offsets of a group as floats, converted from any head layout (format.h).
#pragma once
#include <cstdint>

#include "cpu/kernels/format.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// W bytes as floats.
AS_INLINE vf vload_u8(const uint8_t* p) {
#if defined(AS_ISA_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(AS_ISA_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  float lanes[W];
  for (int i = 0; i < W; i++) lanes[i] = (float)p[i];
  return vload(lanes);
#endif
}
AS_INLINE vf vload_i8(const int8_t* p) {
#if defined(AS_ISA_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(AS_ISA_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  float lanes[W];
  for (int i = 0; i < W; i++) lanes[i] = (float)p[i];
  return vload(lanes);
#endif
}

// A head's scales or its stored offsets.
struct Float32s {
  static constexpr int kBytes = 4;
  static AS_INLINE vf load(const char* p, int v) { return vload(reinterpret_cast<const float*>(p) + v * W); }
};
struct Float16s {
  static constexpr int kBytes = 2;
  static AS_INLINE vf load(const char* p, int v) { return vload_f16(reinterpret_cast<const uint16_t*>(p) + v * W); }
};
struct BFloat16s {
  static constexpr int kBytes = 2;
  static AS_INLINE vf load(const char* p, int v) { return vload_bf16(reinterpret_cast<const uint16_t*>(p) + v * W); }
};

// For `count` groups whose heads are `step` bytes apart: scales [NR], then offsets [NR], such that a weight is scale *
// (q - middle of the format) + offset with q as stored in the panel. 8-bit values are stored with their center at the
// middle. 4-bit values have no room for that: `moved` is the difference.
template <typename Stored>
AS_INLINE void load_plain(const char* head, size_t step, int count, ZeroType zeros, float middle, float moved,
                          float* out) {
  const auto load = [&](auto offset) __attribute__((always_inline)) {
    for (int i = 0; i < count; i++, head += step, out += 2 * NR)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        const vf scale = Stored::load(head, v);
        const vf its = offset(scale, head + NR * Stored::kBytes, v);
        vstore(out + v * W, scale), vstore(out + NR + v * W, its);
      }
  };
  if (zeros == ZeroType::points)
    return load([&](vf scale, const char* second, int v) __attribute__((always_inline)) {
      return vmul(scale, vsub(vset(middle), vload_u8(reinterpret_cast<const uint8_t*>(second) + v * W)));
    });
  if (zeros == ZeroType::none)
    return load([&](vf scale, const char*, int) __attribute__((always_inline)) { return vmul(vset(moved), scale); });
  load([&](vf scale, const char* second, int v)
           __attribute__((always_inline)) { return vfma(vset(moved), scale, Stored::load(second, v)); });
}

// For `count` groups from g on. A super-group's float16 scales are converted once.
template <bool kOffsets>
AS_INLINE void load_nested(const Packed& w, int panel, int g, int count, float moved, float* out) {
  const int groups = w.scaling.super_group / w.group;
  const char* head = w.head(panel, g);
  const size_t step = w.group_bytes(w.group);
  vf above[NV], above_offset[NV];
  for (int i = 0; i < count; i++, head += step, out += 2 * NR) {
    if (i == 0 || (g + i) % groups == 0) {
      const uint16_t* super = w.super_scales(panel, g + i);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) above[v] = vload_f16(super + v * W), above_offset[v] = vload_f16(super + NR + v * W);
    }
    const int8_t *first = reinterpret_cast<const int8_t*>(head), *second = first + NR;
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      const vf scale = vmul(above[v], vload_i8(first + v * W));
      const vf offset = kOffsets ? vmul(above_offset[v], vload_i8(second + v * W)) : vzero();
      vstore(out + v * W, scale), vstore(out + NR + v * W, vfma(vset(moved), scale, offset));
    }
  }
}

constexpr int kLoadedGroups = 8;  // groups whose scales are loaded at a time: as many as most super-groups have

// For `count` groups from g on, [2 * NR] each. Out of line, because the group's products take longer and need the
// registers.
__attribute__((noinline, unused)) void load_scales(const Packed& w, int panel, int g, int count, float* out) {
  const ZeroType zeros = w.scaling.zeros;
  const float middle = (float)w.middle(), moved = (float)(w.middle() - w.bias - w.center());
  if (w.scaling.super_group)
    return zeros == ZeroType::offsets ? load_nested<true>(w, panel, g, count, moved, out)
                                      : load_nested<false>(w, panel, g, count, moved, out);
  const char* head = w.head(panel, g);
  const size_t step = w.group_bytes(w.group);
  switch (w.scaling.scales) {
    case ScaleType::float32:
      return load_plain<Float32s>(head, step, count, zeros, middle, moved, out);
    case ScaleType::float16:
      return load_plain<Float16s>(head, step, count, zeros, middle, moved, out);
    default:
      return load_plain<BFloat16s>(head, step, count, zeros, middle, moved, out);
  }
}

}  // namespace
}  // namespace AS_ISA
}  // namespace as
