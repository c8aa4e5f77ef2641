// The values of small floats: e4m3, e2m1 and nf4.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels/format.h"

namespace as {
namespace AS_ISA {
namespace {

// 4-bit NormalFloat (QLoRA, appendix E), as in bitsandbytes.
constexpr float kNormalFloats[16] = {-1.0f,
                                     -0.6961928009986877f,
                                     -0.5250730514526367f,
                                     -0.39491748809814453f,
                                     -0.28444138169288635f,
                                     -0.18477343022823334f,
                                     -0.09105003625154495f,
                                     0.0f,
                                     0.07958029955625534f,
                                     0.16093020141124725f,
                                     0.24611230194568634f,
                                     0.33791524171829224f,
                                     0.44070982933044434f,
                                     0.5626170039176941f,
                                     0.7229568362236023f,
                                     1.0f};
// OCP's 4-bit float: a sign bit, two exponent bits and one fraction bit.
constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

AS_INLINE const float* table_of(Format format) { return format == Format::nf4 ? kNormalFloats : kE2M1; }

// OCP's 8-bit float. It has no infinities; its NaN (0x7f and 0xff) are rejected when weights are loaded.
AS_INLINE float e4m3_value(int code) {
  // The bits of exponent and fraction at their float32 positions give 2^-120 of the value, including subnormals.
  const uint32_t bits = (uint32_t)(code & 0x7f) << 20 | (uint32_t)(code & 0x80) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return value * 0x1p120f;
}

AS_INLINE float small_float_value(Format format, int code) {
  return format == Format::e4m3 ? e4m3_value(code) : table_of(format)[code];
}

AS_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = rest << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  std::memcpy(&bits, &value, 4);
  if (rest >= 0x7c00) bits = 0x7f800000 | (rest & 0x3ff) << 13;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace
}  // namespace AS_ISA
}  // namespace as
