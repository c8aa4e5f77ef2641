// Floats of 16 bits on the host.
#pragma once
#include <cuda_fp16.h>

#include <string>

#include "common/bf16.h"
#include "cuda/kernels.h"

namespace as {
namespace cuda {

inline float widened(uint16_t bits, Half half) {
  if (half == Half::bf16) return bf16_to_float(bits);
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}
// To nearest, to even; too large for float16: infinite.
inline uint16_t rounded(float x, Half half) {
  return half == Half::bf16 ? float_to_bf16(x) : static_cast<__half_raw>(__float2half_rn(x)).x;
}
// Of a type's name: of others bfloat16, which is what goes with them.
inline Half half_of(const std::string& dtype) { return dtype == "float16" ? Half::f16 : Half::bf16; }

}  // namespace cuda
}  // namespace as
