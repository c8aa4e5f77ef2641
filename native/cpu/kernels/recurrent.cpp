// Kernels of layers that keep a state: sums of products in ascending order, decays and the causal convolution.
#include <algorithm>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/silu.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {

float dot(const float* a, const float* b, int n) {
  vf s = vzero(), t = vzero();
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    s = vfma(vload(a + i), vload(b + i), s);
    t = vfma(vload(a + i + W), vload(b + i + W), t);
  }
  for (; i + W <= n; i += W) s = vfma(vload(a + i), vload(b + i), s);
  float sum = vsum(vadd(s, t));
  for (; i < n; i++) sum += a[i] * b[i];
  return sum;
}

namespace {

// R rows of y, V vectors of each at a time: 8 or, of 32 registers, 16 sums, which hide the latency of a fused
// multiply-add. Two rows (a key and a query) read whole rows of 128 values of m then, one after the other from memory.
constexpr int kTwice = W == 16 ? 2 : 1;
template <int R, int V>
AS_INLINE void product_rows(const float* x, size_t ldx, const float* m, size_t ldm, int count, float* y, size_t ldy,
                            int n) {
  int i = 0;
  for (; i + V * W <= n; i += V * W) {
    vf sums[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] = vload(y + r * ldy + i + v * W);
    for (int k = 0; k < count; k++) {
      vf factors[V];
      for (int v = 0; v < V; v++) factors[v] = vload(m + k * ldm + i + v * W);
      for (int r = 0; r < R; r++) {
        const vf one = vset(x[r * ldx + k]);
        for (int v = 0; v < V; v++) sums[r][v] = vfma(factors[v], one, sums[r][v]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) vstore(y + r * ldy + i + v * W, sums[r][v]);
  }
  if constexpr (V > 1) {
    if (i < n) product_rows<R, V / 2>(x, ldx, m + i, ldm, count, y + i, ldy, n - i);
  } else {
    for (int r = 0; r < R; r++)
      for (int j = i; j < n; j++) {
        float sum = y[r * ldy + j];
        for (int k = 0; k < count; k++) sum = std::fma(m[k * ldm + j], x[r * ldx + k], sum);
        y[r * ldy + j] = sum;
      }
  }
}

}  // namespace

void add_products(const float* x, size_t ldx, int rows, const float* m, size_t ldm, int count, float* y, size_t ldy,
                  int n) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) product_rows<4, 2 * kTwice>(x + r * ldx, ldx, m, ldm, count, y + r * ldy, ldy, n);
  for (; r + 2 <= rows; r += 2) product_rows<2, 4 * kTwice>(x + r * ldx, ldx, m, ldm, count, y + r * ldy, ldy, n);
  if (r < rows) product_rows<1, 8>(x + r * ldx, ldx, m, ldm, count, y + r * ldy, ldy, n);
}

void decay(const float* x, const double* later, const double* earlier, float* y, int n) {
  for (int i = 0; i < n; i += W) {
    const int lanes = std::min(W, n - i);
    float values[W] = {}, difference[W] = {};
    for (int j = 0; j < lanes; j++) {
      values[j] = x[i + j];
      difference[j] = (float)(later[i + j] - (earlier ? earlier[i + j] : 0.0));
    }
    vstore(values, vmul(vload(values), vexp(vload(difference))));
    std::copy_n(values, lanes, y + i);
  }
}

void causal_conv(const float* const* rows, const float* const* weights, int taps, const float* bias, float* y, int n,
                 bool activated) {
  const auto activation = [activated](vf sum)
                              __attribute__((always_inline)) { return activated ? vsilu_mul(sum, vset(1.0f)) : sum; };
  int i = 0;
  for (; i + W <= n; i += W) {
    vf sum = bias ? vload(bias + i) : vzero();
    for (int t = 0; t < taps; t++) sum = vfma(vload(rows[t] + i), vload(weights[t] + i), sum);
    vstore(y + i, activation(sum));
  }
  if (i < n) {
    float rest[W] = {};
    for (int j = i; j < n; j++) {
      float sum = bias ? bias[j] : 0;
      for (int t = 0; t < taps; t++) sum = std::fma(rows[t][j], weights[t][j], sum);
      rest[j - i] = sum;
    }
    vstore(rest, activation(vload(rest)));
    std::copy_n(rest, n - i, y + i);
  }
}

}  // namespace AS_ISA
}  // namespace as
