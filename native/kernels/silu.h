// silu(gate) * up of a vector: the same instructions wherever it is computed, so that fused and separate results have the same bits.
#pragma once
#include "format.h"
#include "simd.h"

namespace as {
namespace AS_ISA {

// gate / (1 + e^-gate) * up
AS_INLINE vf vsilu_mul(vf gate, vf up) {
  const vf e = vexp(vmin(vset(88.0f), vsub(vzero(), gate)));
  return vmul(vdiv(gate, vadd(vset(1.0f), e)), up);
}

}  // namespace AS_ISA
}  // namespace as
