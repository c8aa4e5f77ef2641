// silu(gate) * up of a vector: the same instructions wherever it is computed, so that fused and separate results have the same bits.
#pragma once
#include "format.h"
#include "simd.h"

namespace as {
namespace AS_ISA {

// gate / (1 + e^-gate) * up
AS_INLINE vf vsilu_mul(vf gate, vf up) {
#if defined(AS_ISA_AVX512)
  // A division keeps a port for 16 cycles: an estimate (2^-14) and a step of Newton's take 4. Up to 2^126, so that it is no infinity. The
  // rounded exponent costs 2^-24 |gate| of a result that is e^-|gate| small.
  const vf d = vadd(vset(1.0f), vexp2(vmin(vset(126.0f), vmul(gate, vset(-1.44269504088896341f)))));  // in this order a NaN passes
  const vf estimate = _mm512_rcp14_ps(d);
  return vmul(vmul(gate, vmul(estimate, _mm512_fnmadd_ps(d, estimate, vset(2.0f)))), up);
#else
  const vf e = vexp(vmin(vset(88.0f), vsub(vzero(), gate)));
  return vmul(vdiv(gate, vadd(vset(1.0f), e)), up);
#endif
}

}  // namespace AS_ISA
}  // namespace as
