// Compresses rows of a sequence to one: see softmax_pool in kernels.h.
#include <algorithm>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// A vector of channels. load(p): the vector at p.
template <typename Load>
AS_INLINE vf pooled(const float* const* values, const float* const* gates, const float* const* bias, int rows,
                    const Load& load) {
  vf most = vadd(load(gates[0]), load(bias[0]));
  for (int r = 1; r < rows; r++) most = vmax(most, vadd(load(gates[r]), load(bias[r])));
  vf total = vzero(), sum = vzero();
  for (int r = 0; r < rows; r++) {
    const vf weight = vexp(vsub(vadd(load(gates[r]), load(bias[r])), most));
    total = vadd(total, weight);
    sum = vfma(load(values[r]), weight, sum);
  }
  return vdiv(sum, total);
}

}  // namespace

void softmax_pool(const float* const* values, const float* const* gates, const float* const* bias, int rows, float* out,
                  int n) {
  int i = 0;
  for (; i + W <= n; i += W)
    vstore(out + i, pooled(values, gates, bias, rows,
                           [i](const float* p) __attribute__((always_inline)) { return vload(p + i); }));
  if (i == n) return;
  float rest[W];
  vstore(rest, pooled(values, gates, bias, rows, [i, n](const float* p) {
           float lanes[W] = {};
           std::copy(p + i, p + n, lanes);
           return vload(lanes);
         }));
  std::copy_n(rest, n - i, out + i);
}

}  // namespace AS_ISA
}  // namespace as
