// Kernels of layers that keep a state: sums of products in ascending order, decays and the causal convolution.
#include <algorithm>

#include "common/exact.h"
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

// R rows at a time, which hide the latency of sums. Each sum has the order of dot().
template <int R>
AS_INLINE void dot_rows(const float* rows, size_t ld, const float* a, const float* b, int n, float* of_a, float* of_b) {
  vf s[R][2], t[R][2];
  for (int r = 0; r < R; r++) s[r][0] = s[r][1] = t[r][0] = t[r][1] = vzero();
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const vf a0 = vload(a + i), b0 = vload(b + i), a1 = vload(a + i + W), b1 = vload(b + i + W);
    for (int r = 0; r < R; r++) {
      const vf x0 = vload(rows + r * ld + i), x1 = vload(rows + r * ld + i + W);
      s[r][0] = vfma(x0, a0, s[r][0]), s[r][1] = vfma(x0, b0, s[r][1]);
      t[r][0] = vfma(x1, a1, t[r][0]), t[r][1] = vfma(x1, b1, t[r][1]);
    }
  }
  for (; i + W <= n; i += W)
    for (int r = 0; r < R; r++) {
      const vf x = vload(rows + r * ld + i);
      s[r][0] = vfma(x, vload(a + i), s[r][0]), s[r][1] = vfma(x, vload(b + i), s[r][1]);
    }
  for (int r = 0; r < R; r++) {
    float of[2] = {vsum(vadd(s[r][0], t[r][0])), vsum(vadd(s[r][1], t[r][1]))};
    for (int j = i; j < n; j++) of[0] += rows[r * ld + j] * a[j], of[1] += rows[r * ld + j] * b[j];
    of_a[r] = of[0], of_b[r] = of[1];
  }
}

// exact::exp of x <= 0 without branches, so that a loop over it becomes vectors. Its operations and their order are the
// same.
AS_INLINE double exp_of(double x) {
  constexpr double kShift = 6755399441055744.0;  // as in exact::nearest
  const double shifted = x * 1.44269504088896338700 + kShift, n = shifted - kShift;
  const double r = (x - n * exact::kLn2High) - n * exact::kLn2Low;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const uint64_t exponent = exact::bits_of(shifted) - exact::bits_of(kShift) + 1023;
  const uint64_t kept = x < -708.0 ? 0 : ~uint64_t{0};
  return exact::from_bits(exact::bits_of(p * exact::from_bits(exponent << 52)) & kept);
}

// A decay below it is 0: products with subnormal numbers would be slow.
constexpr float kLeastFactor = 0x1p-100f;

// decay_rows() for V vectors of each row, so that whole cache lines are read one after the other.
template <int V>
AS_INLINE void decay_columns(const float* keys, const float* factors, int count, size_t ld, float* rows, float* whole) {
  vf left[V];
  for (int v = 0; v < V; v++) left[v] = vset(1.0f);
  for (int j = count - 1; j >= 0; j--)
    for (int v = 0; v < V; v++) {
      const size_t at = j * ld + v * W;
      vstore(rows + at, vmul(vload(keys + at), left[v]));
      const vf next = vmul(left[v], vload(factors + at));
      left[v] = vzero_below(next, next, vset(kLeastFactor));
    }
  for (int v = 0; v < V; v++) vstore(whole + v * W, left[v]);
}

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

void dots(const float* rows, size_t ld, int count, const float* a, const float* b, int n, float* of_a, float* of_b) {
  constexpr int kRows = W == 16 ? 4 : 2;
  int i = 0;
  for (; i + kRows <= count; i += kRows) dot_rows<kRows>(rows + i * ld, ld, a, b, n, of_a + i, of_b + i);
  for (; i < count; i++) dot_rows<1>(rows + i * ld, ld, a, b, n, of_a + i, of_b + i);
}

void decay_factors(double later, const double* earlier, int count, float* factors) {
  for (int i = 0; i < count; i++) factors[i] = (float)exp_of(later - earlier[i]);
}

void channel_decays(const float* a, const float* bias, double rate, int n, float* decays, float* factors) {
  for (int i = 0; i < n; i++) {
    const double x = (double)a[i] + bias[i], e = exp_of(x > 0 ? -x : x);
    const double s = e / (2.0 + e), z = s * s;  // log(1 + e) = 2 atanh s, s <= 1 / 3
    double p = 1.0 / 21;
    p = p * z + 1.0 / 19;
    p = p * z + 1.0 / 17;
    p = p * z + 1.0 / 15;
    p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    decays[i] = (float)(rate * ((x > 0 ? x : 0.0) + 2.0 * (s + s * z * p)));
    const float factor = (float)exp_of(decays[i]);
    factors[i] = factor < kLeastFactor ? 0.0f : factor;
  }
}

void bounded_decays(const float* a, const float* bias, double rate, double bound, int n, float* decays,
                    float* factors) {
  for (int i = 0; i < n; i++) {
    const double x = -rate * ((double)a[i] + bias[i]), e = exp_of(x > 0 ? -x : x);
    decays[i] = (float)(bound * ((x > 0 ? 1.0 : e) / (1.0 + e)));
    const float factor = (float)exp_of(decays[i]);
    factors[i] = factor < kLeastFactor ? 0.0f : factor;
  }
}

void decay_rows(const float* keys, const float* factors, int count, int n, float* rows, float* whole) {
  int c = 0;
  for (; c + 8 * W <= n; c += 8 * W) decay_columns<8>(keys + c, factors + c, count, n, rows + c, whole + c);
  for (; c + W <= n; c += W) decay_columns<1>(keys + c, factors + c, count, n, rows + c, whole + c);
  for (; c < n; c++) {
    float left = 1.0f;
    for (int j = count - 1; j >= 0; j--) {
      rows[(size_t)j * n + c] = keys[(size_t)j * n + c] * left;
      left *= factors[(size_t)j * n + c];
      if (left < kLeastFactor) left = 0.0f;
    }
    whole[c] = left;
  }
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
