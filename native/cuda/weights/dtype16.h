// 16-bit floats on the host.
#pragma once
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "common/bf16.h"
#include "cuda/kernels/common/types.h"

namespace as::cuda {

inline float widened(uint16_t bits, DType16 dtype) {
  if (dtype == DType16::bf16) return bf16_to_float(bits);
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}
// Rounds to nearest even. Values too large for float16 become its largest finite value.
constexpr float kLargestFloat16 = 65504;
inline uint16_t rounded(float x, DType16 dtype) {
  if (dtype == DType16::bf16) return float_to_bf16(x);
  return static_cast<__half_raw>(__float2half_rn(std::clamp(x, -kLargestFloat16, kLargestFloat16))).x;
}
// Whether x is finite, and not too large for the type.
inline bool fits(float x, DType16 dtype) {
  return std::isfinite(x) && (dtype == DType16::bf16 || std::abs(x) < kTooLarge);
}
// The 16-bit type used with the type of this name: bfloat16 unless it is float16.
inline DType16 dtype16_of(const std::string& dtype) { return dtype == "float16" ? DType16::f16 : DType16::bf16; }

}  // namespace as::cuda
