// Scales and offsets of a group as floats, however its head has them (format.h).
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

// One panel's scales of a group, or its offsets as they are stored: v of NV vectors.
AS_INLINE vf stored_scale(ScaleType type, const char* p, int v) {
  if (type == ScaleType::float32) return vload(reinterpret_cast<const float*>(p) + v * W);
  const uint16_t* half = reinterpret_cast<const uint16_t*>(p) + v * W;
  return type == ScaleType::float16 ? vload_f16(half) : vload_bf16(half);
}

// out: scales [NR], then offsets [NR], so that a weight is scale * (q - middle of the format) + offset, q as it lies in
// memory. Out of line: a group's products take longer, and need the registers.
__attribute__((noinline, unused)) void load_scales(const Packed& w, int panel, int g, float* out) {
  const char *head = w.head(panel, g), *second = head + NR * w.scale_bytes();
  const ZeroType zeros = w.scaling.zeros;
  // 8-bit codes are moved to the middle where they lie, those of 4 bits have no room for it.
  const float moved = (float)(w.middle() - w.bias - w.center());
  for (int v = 0; v < NV; v++) {
    vf scale, offset = vzero();
    if (w.scaling.super_group) {
      const uint16_t* super = w.super_scales(panel, g) + v * W;
      scale = vmul(vload_f16(super), vload_i8(reinterpret_cast<const int8_t*>(head) + v * W));
      if (zeros == ZeroType::offsets)
        offset = vmul(vload_f16(super + NR), vload_i8(reinterpret_cast<const int8_t*>(second) + v * W));
    } else {
      scale = stored_scale(w.scaling.scales, head, v);
      if (zeros == ZeroType::offsets) offset = stored_scale(w.scaling.scales, second, v);
    }
    if (zeros == ZeroType::points)
      offset = vmul(scale, vsub(vset((float)w.middle()), vload_u8(reinterpret_cast<const uint8_t*>(second) + v * W)));
    else if (moved != 0) offset = vfma(vset(moved), scale, offset);
    vstore(out + v * W, scale);
    vstore(out + NR + v * W, offset);
  }
}

}  // namespace
}  // namespace AS_ISA
}  // namespace as
