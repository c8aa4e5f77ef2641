// The floating-point operations of the exact recipe. Each rounds as IEEE 754 says, and the compiler may not fuse them.
#pragma once
#include "cuda/kernels/exact/exact.h"
#include "cuda/kernels/exact/warp.cuh"

namespace as::cuda {

// As the vectors of cpu/simd.h: if either is NaN, the second one.
__device__ inline float exact_min(float a, float b) { return a < b ? a : b; }
__device__ inline float exact_max(float a, float b) { return a > b ? a : b; }

// e^x for x <= 88; 0 below -87.3. NaN stays NaN.
__device__ inline float exact_exp(float x) {
  const float low = -87.3f, clipped = exact_max(low, x), n = rintf(__fmul_rn(clipped, 1.44269504088896341f));
  float r = __fmaf_rn(n, -0.693359375f, clipped);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040;
  p = __fmaf_rn(p, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  const int power = clipped == clipped ? __float2int_rn(n) : 0;
  return x < low ? 0.0f : __fmul_rn(p, __uint_as_float((uint32_t)(power + 127) << 23));
}

// gate / (1 + e^-x) * up
__device__ inline float exact_gate(float gate, float x, float up) {
  const float e = exact_exp(exact_min(88.0f, __fsub_rn(0.0f, x)));
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, e)), up);
}

__device__ inline float exact_gelu(float x) {
  const float size = exact_min(14.0f, exact_max(__fsub_rn(0.0f, x), x)), z = __fmul_rn(size, 0.70710678118654752f),
              t = __fdiv_rn(1.0f, __fmaf_rn(z, 0.3275911f, 1.0f));
  float p = 1.061405429f;
  p = __fmaf_rn(p, t, -1.453152027f);
  p = __fmaf_rn(p, t, 1.421413741f);
  p = __fmaf_rn(p, t, -0.284496736f);
  p = __fmaf_rn(p, t, 0.254829592f);
  const float rest = __fmul_rn(__fmul_rn(p, t), exact_exp(__fmul_rn(z, __fsub_rn(0.0f, z))));
  return __fsub_rn(exact_max(0.0f, x), __fmul_rn(__fmul_rn(size, 0.5f), rest));
}

// The forms of cpu/kernels/silu.h. Not inlined, because a kernel would have it dozens of times.
static __device__ __noinline__ float exact_gated(ExactGate kind, float alpha, float limit, float gate, float up) {
  if (kind == ExactGate::gelu) return __fmul_rn(exact_gelu(gate), up);
  float x = gate;
  if (kind == ExactGate::gelu_tanh) {
    x = __fmul_rn(gate, __fmaf_rn(__fmul_rn(gate, gate), 0.0713548162726f, 1.5957691216057308f));
  } else if (kind == ExactGate::clamped_silu) {
    gate = exact_min(limit, gate), x = __fmul_rn(alpha, gate);
    up = __fadd_rn(exact_max(__fsub_rn(0.0f, limit), exact_min(limit, up)), 1.0f);
  }
  return exact_gate(gate, x, up);
}

// The integers of a row of activations: a = rint(x * inverse).
struct ExactScale {
  float scale, inverse;
};
// largest: the greatest |x| of the row as bits. unit: what the weights' integers are of the weights.
__device__ inline ExactScale exact_scale(uint32_t largest, float levels, float unit) {
  const float top = __uint_as_float(largest);
  if (largest >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 0};
  if (!(top > 1e-34f)) return {0, 0};
  return {__fdiv_rn(top, levels * unit), __fdiv_rn(levels, top)};
}

// A group's scale and offset as floats, from what is stored.
struct StoredScale {
  uint32_t scale, zero;
};
struct GroupScale {
  float scale, offset;
};
__device__ inline float exact_float(ScaleType type, uint32_t bits) {
  if (type == ScaleType::float32) return __uint_as_float(bits);
  if (type == ScaleType::bfloat16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half((uint16_t)bits));
}
__device__ inline uint32_t load_bits(const char* from, int bytes) {
  if (bytes == 2) return __ldg(reinterpret_cast<const uint16_t*>(from));
  if (bytes == 4) return __ldg(reinterpret_cast<const uint32_t*>(from));
  return __ldg(reinterpret_cast<const uint8_t*>(from));
}
__device__ inline int scale_bytes(const ExactMatrix& w) {
  return w.super_group ? 1 : w.scales == ScaleType::float32 ? 4 : 2;
}
// head: of the group; lane: the row in the panel.
template <bool kOffsets>
__device__ inline StoredScale load_scale(const ExactMatrix& w, const char* head, int lane) {
  const int bytes = scale_bytes(w);
  StoredScale found{load_bits(head + lane * bytes, bytes), 0};
  if (!kOffsets || w.zeros == ZeroType::none) return found;
  const int own = w.zeros == ZeroType::points ? 1 : bytes;
  found.zero = load_bits(head + w.panel * bytes + lane * own, own);
  return found;
}
// The nested scales of a panel's group.
__device__ inline const uint16_t* super_scales(const ExactMatrix& w, const char* panel, int group) {
  return reinterpret_cast<const uint16_t*>(panel + (size_t)(group * w.group / w.super_group) * 4 * w.panel);
}
// panel: the group's. kOffsets: the matrix is not of lone scales.
template <bool kOffsets>
__device__ inline GroupScale exact_group_scale(const ExactMatrix& w, const StoredScale& s, const char* panel, int group,
                                               int lane) {
  if (!kOffsets) return {exact_float(w.scales, s.scale), 0};
  if (w.super_group) {
    const uint16_t* super = super_scales(w, panel, group);
    const float scale = __fmul_rn(exact_float(ScaleType::float16, super[lane]), (float)(int8_t)s.scale);
    const float offset = w.zeros == ZeroType::offsets
                             ? __fmul_rn(exact_float(ScaleType::float16, super[w.panel + lane]), (float)(int8_t)s.zero)
                             : 0.0f;
    return {scale, __fmaf_rn(w.moved, scale, offset)};
  }
  const float scale = exact_float(w.scales, s.scale);
  if (w.zeros == ZeroType::points) return {scale, __fmul_rn(scale, __fsub_rn(w.middle, (float)s.zero))};
  if (w.zeros == ZeroType::none) return {scale, __fmul_rn(w.moved, scale)};
  const float offset = exact_float(w.scales, s.zero);
  return {scale, w.plain ? offset : __fmaf_rn(w.moved, scale, offset)};
}

}  // namespace as::cuda
