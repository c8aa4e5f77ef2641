// silu(gate) * up, gelu(gate) * up, gpt-oss' product and gelu, for a vector. All callers use the same instructions, so
// fused and separate results have the same bits.
//
// kExact: the same bits on every instruction set and on GPUs, by operations of IEEE 754 alone, as experts in mixed
// groups have them (docs/decisions/hybrid.md). Otherwise AVX-512 has shorter sequences of its own.
#pragma once
#include "cpu/kernels/format.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {

#if defined(AS_ISA_AVX512)
// a / d for 1 <= d <= 2^124. Not by vrcp14ps, which differs between processors.
template <bool kExact = false>
AS_INLINE vf vdivide(vf a, vf d) {
#if defined(AS_ISA_AMX)
  if (kExact) return vdiv(a, d);
  // On processors with tiles, a division occupies a port for 16 cycles; this takes 4. An integer subtraction negates
  // d's exponent and approximates 1 / d linearly in the mantissa: d * seed is constant to 1.5 %. A linear function of d
  // * seed corrects that to 1.1e-4, and a Newton step to 1.3e-8.
  const vf seed = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(0x7eb504f3), _mm512_castps_si512(d)));
  const vf y = vmul(seed, _mm512_fnmadd_ps(vmul(d, seed), vset(1.9409089088439941f), vset(2.7864856719970703f)));
  return vmul(a, vfma(y, _mm512_fnmadd_ps(d, y, vset(1.0f)), y));
#else
  return vdiv(a, d);
#endif
}
#endif

// gate / (1 + e^-x) * up
template <bool kExact = false>
AS_INLINE vf vgate_mul(vf gate, vf x, vf up) {
#if defined(AS_ISA_AVX512)
  if (!kExact) {
    // Limited to 2^124, so that the inverse is a normal number. Rounding the exponent costs a relative error of 2^-24
    // |x|, where the result is as small as e^-|x|.
    const vf d =
        vadd(vset(1.0f), vexp2(vmin(vset(124.0f), vmul(x, vset(-1.44269504088896341f)))));  // this order propagates NaN
    return vmul(vdivide(gate, d), up);
  }
#endif
  const vf e = vexp(vmin(vset(88.0f), vsub(vzero(), x)));
  return vmul(vdiv(gate, vadd(vset(1.0f), e)), up);
}

template <bool kExact = false>
AS_INLINE vf vsilu_mul(vf gate, vf up) {
  return vgate_mul<kExact>(gate, gate, up);
}

// The tanh approximation: gate / 2 * (1 + tanh(u)) = gate / (1 + e^-2u), u = sqrt(2 / pi) (gate + 0.044715 gate^3).
template <bool kExact = false>
AS_INLINE vf vgelu_tanh_mul(vf gate, vf up) {
  const vf square = vmul(gate, gate);
  const vf slope = vfma(square, vset(0.0713548162726f), vset(1.5957691216057308f));
  return vgate_mul<kExact>(gate, vmul(gate, slope), up);
}

// x / 2 * (1 + erf(x / sqrt(2))), as max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)). erfc by Abramowitz and Stegun, Handbook
// of Mathematical Functions, 7.1.26: within 1.5e-7.
template <bool kExact = false>
AS_INLINE vf vgelu(vf x) {
  const vf size = vmin(vset(14.0f), vmax(vsub(vzero(), x), x));  // this order propagates NaN; beyond 14 erfc is 0
  const vf z = vmul(size, vset(0.70710678118654752f)), d = vfma(z, vset(0.3275911f), vset(1.0f));
#if defined(AS_ISA_AVX512)
  const vf t = vdivide<kExact>(vset(1.0f), d);
#else
  const vf t = vdiv(vset(1.0f), d);
#endif
  vf p = vset(1.061405429f);
  p = vfma(p, t, vset(-1.453152027f));
  p = vfma(p, t, vset(1.421413741f));
  p = vfma(p, t, vset(-0.284496736f));
  p = vfma(p, t, vset(0.254829592f));
  const vf rest = vmul(vmul(p, t), vexp(vmul(z, vsub(vzero(), z))));
  return vsub(vmax(vzero(), x), vmul(vmul(size, vset(0.5f)), rest));
}

// gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within +-limit.
template <bool kExact = false>
AS_INLINE vf vclamped_silu_mul(vf gate, vf up, vf alpha, vf limit) {
  const vf g = vmin(limit, gate), u = vmax(vsub(vzero(), limit), vmin(limit, up));  // this order propagates NaN
  return vgate_mul<kExact>(g, vmul(alpha, g), vadd(u, vset(1.0f)));
}

}  // namespace AS_ISA
}  // namespace as
