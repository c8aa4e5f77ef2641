// Norms, activations and sums over a row: vectors with a scalar tail.
#include <cmath>
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/silu.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {

// Sums two vectors of lanes, then the lanes, then the tail.
float square_sum(const float* x, int n) {
  vf a = vzero(), b = vzero();
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const vf p = vload(x + i), q = vload(x + i + W);
    a = vfma(p, p, a);
    b = vfma(q, q, b);
  }
  for (; i + W <= n; i += W) {
    const vf p = vload(x + i);
    a = vfma(p, p, a);
  }
  float sum = vsum(vadd(a, b));
  for (; i < n; i++) sum += x[i] * x[i];
  return sum;
}

// y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich, 2019).
void rms_norm(const float* x, const float* w, float* y, int n, float eps) {
  const float inverse = 1.0f / std::sqrt(square_sum(x, n) / (float)n + eps);
  const vf vi = vset(inverse);
  int i = 0;
  for (; i + W <= n; i += W) vstore(y + i, vmul(vmul(vload(x + i), vi), vload(w + i)));
  for (; i < n; i++) y[i] = x[i] * inverse * w[i];
}

// y = (x - mean) / sqrt(variance + eps) * w + bias (Ba et al., 2016). The lanes' sums are added as those of square_sum.
void layer_norm(const float* x, const float* w, const float* bias, float* y, int n, float eps) {
  vf a = vzero(), b = vzero();
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) a = vadd(a, vload(x + i)), b = vadd(b, vload(x + i + W));
  for (; i + W <= n; i += W) a = vadd(a, vload(x + i));
  float sum = vsum(vadd(a, b));
  for (; i < n; i++) sum += x[i];
  const float mean = sum / (float)n;
  const vf vm = vset(mean);
  for (i = 0; i + W <= n; i += W) vstore(y + i, vsub(vload(x + i), vm));
  for (; i < n; i++) y[i] = x[i] - mean;
  const float inverse = 1.0f / std::sqrt(square_sum(y, n) / (float)n + eps);
  const vf vi = vset(inverse);
  for (i = 0; i + W <= n; i += W) vstore(y + i, vfma(vmul(vload(y + i), vi), vload(w + i), vload(bias + i)));
  for (; i < n; i++) y[i] = std::fma(y[i] * inverse, w[i], bias[i]);
}

namespace {

template <typename Product>
AS_INLINE void gated(const Product& product, const float* gate, const float* up, float* y, int n) {
  int i = 0;
  for (; i + W <= n; i += W) vstore(y + i, product(vload(gate + i), vload(up + i)));
  if (i < n) {
    float g[W] = {}, u[W] = {}, out[W];
    for (int j = 0; j < n - i; j++) g[j] = gate[i + j], u[j] = up[i + j];
    vstore(out, product(vload(g), vload(u)));
    for (int j = 0; j < n - i; j++) y[i + j] = out[j];
  }
}

}  // namespace

template <bool kExact>
void silu_mul(const float* gate, const float* up, float* y, int n) {
  gated([](vf g, vf u) __attribute__((always_inline)) { return vsilu_mul<kExact>(g, u); }, gate, up, y, n);
}

template <bool kExact>
void gelu_tanh_mul(const float* gate, const float* up, float* y, int n) {
  gated([](vf g, vf u) __attribute__((always_inline)) { return vgelu_tanh_mul<kExact>(g, u); }, gate, up, y, n);
}

template <bool kExact>
void gelu_mul(const float* gate, const float* up, float* y, int n) {
  gated([](vf g, vf u) __attribute__((always_inline)) { return vmul(vgelu<kExact>(g), u); }, gate, up, y, n);
}

template <bool kExact>
void clamped_silu_mul(const float* gate, const float* up, float* y, int n, float alpha, float limit) {
  gated([alpha, limit](vf g, vf u)
            __attribute__((always_inline)) { return vclamped_silu_mul<kExact>(g, u, vset(alpha), vset(limit)); },
        gate, up, y, n);
}

namespace {

template <typename Function>
AS_INLINE void each(const Function& function, float* x, size_t n) {
  size_t i = 0;
  for (; i + W <= n; i += W) vstore(x + i, function(vload(x + i)));
  if (i < n) {
    float rest[W] = {};
    for (size_t j = i; j < n; j++) rest[j - i] = x[j];
    vstore(rest, function(vload(rest)));
    for (size_t j = i; j < n; j++) x[j] = rest[j - i];
  }
}

}  // namespace

template <bool kExact>
void activate(Activation function, float* x, size_t n) {
  switch (function) {
    case Activation::gelu:
      return each([](vf v) __attribute__((always_inline)) { return vgelu<kExact>(v); }, x, n);
    case Activation::gelu_tanh:
      return each([](vf v) __attribute__((always_inline)) { return vgelu_tanh_mul<kExact>(v, vset(1.0f)); }, x, n);
    case Activation::silu:
      return each([](vf v) __attribute__((always_inline)) { return vsilu_mul<kExact>(v, vset(1.0f)); }, x, n);
    case Activation::tanh:
      return each([](vf v) __attribute__((always_inline)) { return vtanh(v); }, x, n);
    case Activation::relu:
      return each([](vf v) __attribute__((always_inline)) { return vmax(vzero(), v); }, x, n);  // NaN stays
    case Activation::quick_gelu:
      return each(
          [](vf v) __attribute__((always_inline)) { return vgate_mul<kExact>(v, vmul(v, vset(1.702f)), vset(1.0f)); },
          x, n);
  }
}

#define AS_INSTANTIATE(kExact)                                                                   \
  template void silu_mul<kExact>(const float*, const float*, float*, int);                       \
  template void gelu_tanh_mul<kExact>(const float*, const float*, float*, int);                  \
  template void gelu_mul<kExact>(const float*, const float*, float*, int);                       \
  template void clamped_silu_mul<kExact>(const float*, const float*, float*, int, float, float); \
  template void activate<kExact>(Activation, float*, size_t);
AS_INSTANTIATE(false)
AS_INSTANTIATE(true)
#undef AS_INSTANTIATE

void sigmoid_mul(const float* gate, const float* x, float* y, int n) {
  gated([](vf g, vf value) __attribute__((always_inline)) { return vgate_mul(value, g, vset(1.0f)); }, gate, x, y, n);
}

void multiply(float* x, const float* w, float factor, size_t n) {
  const vf f = vset(factor);
  size_t i = 0;
  for (; i + W <= n; i += W) vstore(x + i, vmul(vmul(vload(x + i), f), vload(w + i)));
  for (; i < n; i++) x[i] = x[i] * factor * w[i];
}

void scale(float* x, float factor, size_t n) {
  size_t i = 0;
  for (; i + W <= n; i += W) vstore(x + i, vmul(vload(x + i), vset(factor)));
  for (; i < n; i++) x[i] *= factor;
}

// x = cap * tanh(factor * x / cap)
void soft_cap(float* x, float factor, float cap, size_t n) {
  const float slope = factor / cap;
  each([slope, cap](vf v) __attribute__((always_inline)) { return vmul(vset(cap), vtanh(vmul(v, vset(slope)))); }, x,
       n);
}

void add(float* x, const float* y, size_t n) {
  size_t i = 0;
  for (; i + W <= n; i += W) vstore(x + i, vadd(vload(x + i), vload(y + i)));
  for (; i < n; i++) x[i] += y[i];
}

void sum_partials(const float* const* partials, int count, float* out, size_t n) {
  size_t i = 0;
  for (; i + W <= n; i += W) {
    vf s = vload(partials[0] + i);
    for (int r = 1; r < count; r++) s = vadd(s, vload(partials[r] + i));
    vstore(out + i, s);
  }
  for (; i < n; i++) {
    float s = partials[0][i];
    for (int r = 1; r < count; r++) s += partials[r][i];
    out[i] = s;
  }
}

void weighted_sum(const float* const* rows, const float* weights, int count, float* out, size_t n) {
  size_t i = 0;
  for (; i + W <= n; i += W) {
    vf s = vzero();
    for (int r = 0; r < count; r++) s = vfma(vload(rows[r] + i), vset(weights[r]), s);
    vstore(out + i, s);
  }
  for (; i < n; i++) {
    float s = 0;
    for (int r = 0; r < count; r++) s = std::fma(rows[r][i], weights[r], s);
    out[i] = s;
  }
}

// Rotary embedding of one head with pairs (i, i + half) (Su et al., 2021; Hugging Face's layout).
void rope(float* x, const float* cosine, const float* sine, int half) {
  float* upper = x + half;
  int i = 0;
  for (; i + W <= half; i += W) {
    const vf a = vload(x + i), b = vload(upper + i), c = vload(cosine + i), s = vload(sine + i);
    vstore(x + i, vsub(vmul(a, c), vmul(b, s)));
    vstore(upper + i, vadd(vmul(b, c), vmul(a, s)));
  }
  for (; i < half; i++) {
    const float a = x[i], b = upper[i];
    x[i] = a * cosine[i] - b * sine[i];
    upper[i] = b * cosine[i] + a * sine[i];
  }
}

// Rotary embedding with adjacent features as pairs: (2 i, 2 i + 1).
void rope_interleaved(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cosine[i] - b * sine[i];
    x[2 * i + 1] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace AS_ISA
}  // namespace as
